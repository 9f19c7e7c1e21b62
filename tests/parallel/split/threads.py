"""The ranks of a split as threads of one process: collectives over a barrier, with a deadline instead of a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from epl.parallel.split.ranks import Op, SplitRanks

T = TypeVar("T")
DEADLINE = 20.0
"""Seconds that one collective may wait for the other threads."""


class Board:
    """Where the threads of one run lay down what they send."""

    def __init__(self, ways: int, deadline: float = DEADLINE) -> None:
        self.ways = ways
        self.barrier = threading.Barrier(ways, timeout=deadline)
        self.slots: list[Any] = [None] * ways

    def exchange(self, rank: int, what: str, item: Any) -> list[Any]:
        """What every thread laid down for the same collective; a mismatch is an error on all of them."""
        self.slots[rank] = what, item
        self.barrier.wait()
        seen = list(self.slots)
        self.barrier.wait()  # nobody lays down the next before everybody has read this one
        kinds = [kind for kind, _ in seen]
        if len(set(kinds)) > 1:
            raise AssertionError(f"the ranks are in different collectives: {kinds}")
        return [item for _, item in seen]


class ThreadRanks(SplitRanks):
    """This thread's view of the split; `calls` lists its collectives, `notes` what the rules said they would send."""

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, board.ways)
        self.board = board
        self.calls: list[str] = []
        self.notes: list[tuple[str, int, str]] = []

    def note(self, what: str, size: int, why: str) -> None:
        self.notes.append((what, size, why))

    def _exchange(self, what: str, item: Any) -> list[Any]:
        self.calls.append(what.split()[0])
        return self.board.exchange(self.rank, what, item)

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        assert tensor.is_contiguous()
        with torch.no_grad():
            sent = self._exchange(f"all-reduce {op} {tuple(tensor.shape)} {tensor.dtype}", tensor.clone())
            total = sent[0].clone()
            for other in sent[1:]:
                total = total + other if op == "sum" else torch.maximum(total, other)
            return tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int], dim: int) -> list[torch.Tensor]:
        assert tensor.shape[dim] == lengths[self.rank], (tensor.shape, dim, lengths)
        rest = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
        with torch.no_grad():
            return [t.clone() for t in self._exchange(f"all-gather {dim} {rest} {tensor.dtype}", tensor.clone())]

    def all_to_all(self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        with torch.no_grad():
            sent = self._exchange("all-to-all", [part.clone() for part in parts])
            received = [given[self.rank] for given in sent]
        assert [tuple(t.shape) for t in received] == [tuple(shape) for shape in shapes]
        return received


def run_threads(function: Callable[[ThreadRanks], T], ways: int, deadline: float = DEADLINE) -> list[T]:
    """The results of `function(ranks)` on so many threads, by rank; the first error of any thread is raised."""
    board = Board(ways, deadline)
    results: list[Any] = [None] * ways
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(ThreadRanks(rank, board))
        except BaseException as error:  # whatever it is, the others must not wait for this thread
            errors.append((rank, error))
            board.barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(ways)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # a broken barrier is only the echo of another thread's error
        own = [error for _, error in errors if not isinstance(error, threading.BrokenBarrierError)]
        raise (
            own[0]
            if own
            else AssertionError("the ranks are not in the same collectives: one waited for the others in vain")
        )
    return results
