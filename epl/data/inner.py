"""The torch DataLoader underneath a divided one: it loads this rank's rows, with all of the user's settings."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypedDict, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from epl.data.division import take_samples
from epl.data.share import BatchShare, DataShare
from epl.data.structure import digest

Note = TypeVar("Note")
CHECKED_BATCHES = 2  # batches of a stream whose values are compared between ranks, in every worker


class Settings(TypedDict):
    """What passes from the user's loader to the one underneath unchanged."""

    num_workers: int
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    prefetch_factor: int | None
    pin_memory_device: str


class Feed(Iterator[object], Generic[Note]):
    """Hands the inner loader what to fetch next, and keeps a note about each batch for the loop that receives it."""

    def __init__(self, pieces: Iterator[tuple[list[object], Note]]) -> None:
        self._pieces = pieces
        self._ready: deque[object] = deque()
        self.notes: deque[Note] = deque()

    def fill(self) -> None:
        """Have the next piece ready, so that asking for it draws nothing."""
        if not self._ready:
            for things, note in self._pieces:
                self._ready.extend(things)
                self.notes.append(note)
                return

    def __next__(self) -> object:
        self.fill()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()


class FeedSampler(Sampler[object]):
    """The inner loader's sampler: the feed of the epoch that is being started."""

    def __init__(self) -> None:
        self.feed: Iterator[object] = iter(())

    def __iter__(self) -> Iterator[object]:
        return self.feed


class KeepShare:
    """The user's `collate_fn` on this rank's rows of a global batch; runs in workers, so other rows never travel."""

    def __init__(self, collate_fn: Callable[[list[object]], object], share: DataShare) -> None:
        self.collate_fn, self.share = collate_fn, share
        self.seen = 0

    def __call__(self, samples: list[object]) -> tuple[int, str, object]:
        self.seen += 1
        fingerprint = digest(samples) if self.seen <= CHECKED_BATCHES else ""
        own, _ = take_samples(samples, self.share)
        return len(samples), fingerprint, self.collate_fn(own)


class CountRows:
    """The user's `collate_fn`, with the number of samples it was given."""

    def __init__(self, collate_fn: Callable[[list[object]], object]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[object]) -> tuple[int, object]:
        return len(samples), self.collate_fn(samples)


class Lease:
    """The inner loader for one epoch; who holds it keeps it from being used for another one."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self.loader = loader


class InnerLoaders:
    """Makes the inner loader of an epoch, or gives the one whose workers were kept (`persistent_workers`)."""

    def __init__(self) -> None:
        self._kept: DataLoader[object] | None = None
        self._lease: weakref.ref[Lease] | None = None

    @property
    def idle_workers(self) -> bool:
        """Workers of an earlier epoch wait for the next one."""
        return self._kept is not None and not self._busy

    @property
    def _busy(self) -> bool:
        return self._lease is not None and self._lease() is not None

    def lease(self, loader: DataLoader[object], make: Callable[[bool], DataLoader[object]]) -> Lease:
        """The inner loader for the next epoch; `make(persistent)` builds a new one where none is waiting."""
        if not loader.persistent_workers:
            return Lease(make(False))
        if self._busy:  # two epochs at once cannot share workers
            return Lease(make(False))
        if self._kept is None:
            self._kept = make(True)
        lease = Lease(self._kept)
        self._lease = weakref.ref(lease)
        return lease

    def close(self) -> None:
        """Let go of the kept workers; they end with the last epoch that uses them."""
        self._kept = self._lease = None


def make_indexed(
    loader: DataLoader[object], *, items: bool, generator: torch.Generator, persistent: bool
) -> DataLoader[object]:
    """An inner loader of a map-style dataset: fetches what its `FeedSampler` says, index lists or (`items`) indices."""
    dataset: Dataset[object] = loader.dataset
    common = _settings(loader)
    if items:
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=FeedSampler(),
            collate_fn=loader.collate_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
            persistent_workers=persistent,
            **common,
        )
    return DataLoader(
        dataset,
        batch_sampler=FeedSampler(),  # type: ignore[arg-type]  # what it yields are index lists
        collate_fn=loader.collate_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        persistent_workers=persistent,
        **common,
    )


def make_streaming(
    loader: DataLoader[object],
    *,
    batch_size: int | None,
    collate_fn: Callable[[list[object]], object],
    drop_last: bool,
    generator: torch.Generator | None,
    persistent: bool,
) -> DataLoader[object]:
    """An inner loader of an iterable dataset."""
    return DataLoader(
        loader.dataset,
        batch_size=batch_size,
        collate_fn=collate_fn,
        drop_last=drop_last,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        persistent_workers=persistent,
        **_settings(loader),
    )


def start_feed(lease: Lease, feed: Iterator[object]) -> Iterator[object]:
    """The iterator of the inner loader over what `feed` hands it."""
    inner = lease.loader
    sampler = inner.sampler if inner.batch_size is None and inner.batch_sampler is None else inner.batch_sampler
    assert isinstance(sampler, FeedSampler)
    sampler.feed = feed
    return iter(inner)


def whole_share(count: int, share: DataShare) -> BatchShare:
    """How a global batch of `count` samples is divided."""
    return take_samples(range(count), share)[1]


def _settings(loader: DataLoader[object]) -> Settings:
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "prefetch_factor": loader.prefetch_factor,
        "pin_memory_device": loader.pin_memory_device,
    }
