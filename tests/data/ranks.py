"""Ranks as threads that take turns, each with random states of its own: what the loaders do between processes, in one.

Only one rank runs at a time; the turn passes where a rank waits for the others. So a case is deterministic, and a rank
that would wait for ever is seen at once.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from epl.data import BatchShare, DataShare, distribute_loader
from epl.data.iterator import BatchIterator
from epl.data.rng import RngState


class Stuck(Exception):
    """This rank waits for one that has ended, or that waits for something else."""


class Together:
    """The ranks of one case."""

    def __init__(self, nranks: int) -> None:
        self.nranks = nranks
        self._changed = threading.Condition()
        self._turn = 0
        self._waiting: dict[int, tuple[str, bytes]] = {}
        self._answers: dict[int, list[tuple[str, bytes]]] = {}
        self._ended: set[int] = set()
        self._states = [RngState.capture()] * nranks

    def run(self, function: Callable[[int, Exchange], Any]) -> list[Any]:
        """What `function(rank, exchange)` returned or raised, by rank."""
        outcomes: list[Any] = [None] * self.nranks

        def one(rank: int) -> None:
            try:
                self._take_turn(rank)
                outcomes[rank] = function(rank, Exchange(self, rank))
            except BaseException as error:
                outcomes[rank] = error
            with self._changed:
                self._ended.add(rank)
                self._pass_turn()

        own = RngState.capture()
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.nranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while any(Path(f"/proc/self/task/{thread.native_id}").exists() for thread in threads):
            time.sleep(0.001)  # join() returns a moment before the thread is gone from the system
        own.restore()
        return outcomes

    def meet(self, rank: int, kind: str, value: object) -> list[object]:
        """The values of all ranks, once all are here."""
        with self._changed:
            self._states[rank] = RngState.capture()
            self._waiting[rank] = (kind, pickle.dumps(value))
            self._pass_turn()
        self._take_turn(rank)
        answers = self._answers.pop(rank, None)
        if answers is None or {k for k, _ in answers} != {kind}:
            raise Stuck(f"rank {rank} waits in {kind}")
        return [pickle.loads(data) for _, data in answers]

    def _take_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)
        self._states[rank].restore()

    def _pass_turn(self) -> None:
        running = [r for r in range(self.nranks) if r not in self._ended]
        free = [r for r in running if r not in self._waiting]
        if not free and running:
            if not self._ended:
                values = [self._waiting[r] for r in range(self.nranks)]
                self._answers = dict.fromkeys(running, values)
            self._waiting.clear()  # with somebody gone nobody gets an answer
            free = running
        if free:
            self._turn = free[0]
        self._changed.notify_all()


class Exchange:
    def __init__(self, together: Together, rank: int) -> None:
        self.together, self.rank = together, rank
        self.calls = 0

    def all_gather(self, value: object) -> list[object]:
        self.calls += 1
        return self.together.meet(self.rank, "all_gather", value)

    def broadcast(self, value: object) -> object:
        self.calls += 1
        return self.together.meet(self.rank, "broadcast", value)[0]


def together(nranks: int, function: Callable[[int, Exchange], Any]) -> list[Any]:
    """The values by rank; the first rank's real error if there was one."""
    outcomes = Together(nranks).run(function)
    errors = [o for o in outcomes if isinstance(o, BaseException)]
    if errors:
        raise next((e for e in errors if not isinstance(e, Stuck)), errors[0])
    return outcomes


def errors_of(nranks: int, function: Callable[[int, Exchange], Any]) -> list[BaseException]:
    """The error of every rank; all must have ended with one."""
    outcomes = Together(nranks).run(function)
    assert all(isinstance(o, BaseException) for o in outcomes), outcomes
    return outcomes


def numbers(n: int) -> list[torch.Tensor]:
    """A dataset whose samples are their own indices."""
    return [torch.tensor(i) for i in range(n)]


def plain(loader: DataLoader[Any], *, epochs: int = 1, seed: int = 0) -> tuple[list[list[torch.Tensor]], RngState]:
    """What a plain loop sees on one device, and the random state it leaves."""
    own = RngState.capture()
    torch.manual_seed(seed)
    seen = [list(loader) for _ in range(epochs)]
    state = RngState.capture()
    own.restore()
    return seen, state


def same(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    """Equal batches in equal epochs, without comparing storage."""
    return [[t.tolist() for t in epoch] for epoch in a] == [[t.tolist() for t in epoch] for epoch in b]


def shares(replicas: int = 1, parts: int = 1, **settings: Any) -> list[DataShare]:
    return [
        DataShare(replicas=replicas, replica=r, parts=parts, part=j, **settings)
        for r in range(replicas)
        for j in range(parts)
    ]


def read(loader: DataLoader[Any]) -> Iterator[tuple[Any, BatchShare]]:
    """One epoch with the division of each batch."""
    iterator = iter(loader)
    assert isinstance(iterator, BatchIterator)
    for batch in iterator:
        assert iterator.share is not None
        yield batch, iterator.share


def read_divided(
    make: Callable[[], DataLoader[Any]], divided: list[DataShare], *, epochs: int = 1, seed: int | None = None
) -> list[list[list[tuple[Any, BatchShare]]]]:
    """By rank, by epoch, by step: the batch and its division. All ranks are seeded alike unless `seed` is None."""

    def rank_main(rank: int, exchange: Exchange) -> list[list[tuple[Any, BatchShare]]]:
        torch.manual_seed(1000 + rank if seed is None else seed)
        loader = distribute_loader(make(), divided[rank], exchange)
        return [list(read(loader)) for _ in range(epochs)]

    return together(len(divided), rank_main)


def global_batches(ranks: list[list[list[tuple[Any, BatchShare]]]]) -> list[list[torch.Tensor]]:
    """By epoch and step, the rows of all ranks that count, put together in order; with the divisions checked."""
    result = []
    for epochs in zip(*ranks, strict=True):
        steps = []
        for step in zip(*epochs, strict=True):
            assert len({share.rows for _, share in step}) == 1
            assert [share.index for _, share in step] == list(range(len(step)))
            steps.append(torch.cat([batch[: share.own] for batch, share in step]))
            for batch, share in step:
                assert share.padded == (share.own == 0)
                assert len(batch) == (share.own or len(batch))
        result.append(steps)
    return result
