"""What every epoch of a divided loader is made of, whatever the dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import cast

import torch
from torch.utils.data import DataLoader

from epl.data.exchange import Exchange, gather_or_fail
from epl.data.inner import InnerLoaders
from epl.data.order import check_places
from epl.data.rng import RngState, RngStream, rank_zero_stream, set_generator, share_seed
from epl.data.share import BatchShare, DataShare
from epl.errors import DataError

Batches = Iterator[tuple[object, BatchShare]]
END = object()


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One iteration over a divided loader."""

    loader: DataLoader[object]
    share: DataShare
    exchange: Exchange
    inner: InnerLoaders
    place: str
    """Which epoch of which loader, for messages and for ranks to compare."""
    steps: int | None
    """How many steps it will have, if the sampler or dataset tells."""
    said: set[str]
    """What the user was told about this loader already."""

    @property
    def drop(self) -> bool:
        """An incomplete global batch is left out."""
        return self.loader.drop_last or self.share.drop_tail

    def common_stream(self) -> RngStream | None:
        """Where all ranks draw the same from: rank 0's state as it is now; alone, the process itself."""
        return None if self.share.alone else rank_zero_stream(self.loader, self.exchange)

    @property
    def in_process(self) -> bool:
        """The dataset runs in this process, and draws from its generators."""
        return self.loader.num_workers == 0


def next_or_end(iterator: Iterator[object]) -> object:
    """The next value, or `END`: inside a generator a StopIteration may not pass."""
    return next(iterator, END)


def own_generator(share: DataShare, before: bytes, base_seed: int) -> torch.Generator:
    """What the inner loader draws its workers' seed from: the first share the plain run's, each other one its own."""
    generator = torch.Generator()
    if share.index == 0:
        set_generator(generator, before)
    else:
        generator.manual_seed(share_seed(base_seed, share.replica, share.part))
    return generator


def own_stream(share: DataShare, base_seed: int) -> RngStream | None:
    """Where a dataset in this process draws its augmentations from: this share's stream; alone, the process's own."""
    if share.alone:
        return None
    return RngStream(RngState.seeded(share_seed(base_seed, share.replica, share.part)))


def gather_rows(epoch: Epoch, rows: int) -> BatchShare:
    """How a step is divided where only the ranks themselves know how many rows they have."""
    share = epoch.share
    words = gather_or_fail(epoch.exchange, lambda: (epoch.place, share.index, rows), f"reading {epoch.place}")
    return rows_by_share(epoch, words)


def rows_by_share(epoch: Epoch, words: list[object]) -> BatchShare:
    """The rows that all ranks told, one number for each share; ranks that see the same share must tell the same."""
    check_places(words)
    told: dict[int, int] = {}
    for rank, word in enumerate(words):
        _, index, rows = cast("tuple[str, int, int]", word)
        if told.setdefault(index, rows) != rows:
            raise DataError(
                f"{epoch.place}: expected the same rows on all ranks of a replica, found {rows} on rank {rank} where "
                f"another rank has {told[index]}. Seed what the dataset draws from alike on these ranks."
            )
    return BatchShare(tuple(told[index] for index in range(epoch.share.shares)), epoch.share.index)
