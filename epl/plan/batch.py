"""Which rows of a global batch each rank computes, and with what weight: row arithmetic on plain numbers.

A global batch of n rows (R·M·b of them, or fewer in the tail of an epoch) is cut twice, in the order of the sampler:

    n = 10, replicas = 2, parts = 2        0 1 2 3 4 | 5 6 7 8 9      replica blocks
                                           0 1 2|3 4 | 5 6 7|8 9      parts: the ranks of a replica that divide its rows
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from epl.errors import DataError


@dataclass(frozen=True)
class Rows:
    """The rows [start, stop) that one rank sees, and their weight in the global batch's mean.

    A rank that would see nothing sees one row of a neighbour at weight 0 instead, so that its step still happens.
    """

    start: int
    stop: int
    weight: float

    @property
    def padding(self) -> bool:
        """Whether this is a row that only keeps the rank in step."""
        return self.weight == 0.0

    def __len__(self) -> int:
        return self.stop - self.start


class Flat(NamedTuple):
    """A dim of a tensor in which rows are merged with what comes after them (tokens): all elements of row 0, then those of row 1, …"""

    dim: int
    inner: int
    """Elements of each row."""


RowDim = int | Flat
"""How a tensor carries the batch: a dim of which every element is a row, or one in which a row has several elements."""


def flat(dim: RowDim) -> Flat:
    """With one element for each row where the dim is the batch itself."""
    return Flat(dim, 1) if isinstance(dim, int) else dim


def cut_evenly(start: int, stop: int, pieces: int) -> list[tuple[int, int]]:
    """[start, stop) as contiguous pieces whose lengths differ by at most one, longer ones first; some may be empty."""
    if pieces < 1 or stop < start:
        raise DataError(f"expected at least one piece of a range of rows; found {pieces} pieces of [{start}, {stop})")
    size, longer = divmod(stop - start, pieces)
    cuts = [start + i * size + min(i, longer) for i in range(pieces + 1)]
    return list(pairwise(cuts))


def divide(n: int, replicas: int, parts: int = 1) -> list[tuple[int, int]]:
    """The rows of every part of every replica, replica by replica: contiguous, in order, as even as can be."""
    return [part for block in cut_evenly(0, n, replicas) for part in cut_evenly(*block, parts)]


def share_rows(n: int, replicas: int, parts: int = 1) -> list[Rows]:
    """What every part of every replica sees of a global batch of n rows; the weights add up to 1."""
    if n < 1:
        raise DataError(f"a global batch has at least one row; found {n}")
    return [_rows(start, stop, n) for start, stop in divide(n, replicas, parts)]


def _rows(start: int, stop: int, n: int) -> Rows:
    # The longer pieces come first, so row 0 is never in an empty piece and `start - 1` exists.
    return Rows(start, stop, (stop - start) / n) if start < stop else Rows(start - 1, start, 0.0)


def global_batch(replicas: int, micro_batch: int | None, num_micro_batch: int) -> str:
    """The batch equation, in numbers as far as they are known."""
    names = "global batch = replicas × micro batch × num_micro_batch"
    if micro_batch is None:
        return f"{names} = {replicas} × b × {num_micro_batch} = {replicas * num_micro_batch}·b"
    total = replicas * micro_batch * num_micro_batch
    return f"{names} = {replicas} × {micro_batch} × {num_micro_batch} = {total}"
