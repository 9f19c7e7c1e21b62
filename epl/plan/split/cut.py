"""How a dim is divided over the ranks of a split.

    An Axis is granules (features, heads, groups of heads, classes) dealt out in order:   5 granules over 2 ranks: 0 1 2 | 3 4
    A Cut is a dim made of sections, each of all granules, `inner` elements per granule:

        q | k | v of 4 heads of size 8      granules 4, inners (8, 8, 8)      rank 0 of 2: heads 0 1 of q, of k and of v
        gate | up of 6 features             granules 6, inners (1, 1)

so a fused qkv, gate | up, grouped heads and (batch · heads) are all one form, sizes that do not divide included.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

ROWS = "rows"
"""The name of the axis along which ranks have rows of their own."""


class Axis:
    """Granules that are dealt out over the ranks in order; two cuts belong together only if they share the axis (by identity)."""

    __slots__ = ("counts", "granules", "name", "starts", "ways")

    def __init__(self, name: str, granules: int, ways: int, counts: Sequence[int] | None = None) -> None:
        """`counts`: how many granules each rank gets, if not as even as can be."""
        self.name, self.granules, self.ways = name, granules, ways
        even = (granules // ways + (rank < granules % ways) for rank in range(ways))
        self.counts = tuple(even) if counts is None else tuple(counts)
        self.starts = tuple(accumulate((0, *self.counts[:-1])))

    def __repr__(self) -> str:
        return f"{self.name}:{self.granules}/{self.ways}"


class Cut:
    """A dim made of sections (q | k | v), each of all granules of `inner` elements; a rank holds its granules of each section."""

    __slots__ = ("_ranges", "axis", "inners", "size")

    def __init__(self, axis: Axis, inners: Sequence[int] = (1,)) -> None:
        self.axis, self.inners = axis, tuple(inners)
        self.size = axis.granules * sum(self.inners)
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    @staticmethod
    def even(name: str, size: int, ways: int) -> Cut:
        """A dim of this size, element by element."""
        return Cut(Axis(name, size, ways))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Cut) and self.axis is other.axis and self.inners == other.inners)

    def __hash__(self) -> int:
        return hash((id(self.axis), self.inners))

    def __repr__(self) -> str:
        return f"{self.axis}x{self.inners}"

    def length(self, rank: int) -> int:
        """Elements of the dim that a rank holds."""
        return self.axis.counts[rank] * sum(self.inners)

    @property
    def lengths(self) -> list[int]:
        """Elements of the dim by rank."""
        return [self.length(rank) for rank in range(self.axis.ways)]

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """A rank's intervals of the whole dim, in the order in which it holds them."""
        if rank not in self._ranges:
            base, found = 0, []
            start, count = self.axis.starts[rank], self.axis.counts[rank]
            for inner in self.inners:
                found.append((base + start * inner, base + (start + count) * inner))
                base += self.axis.granules * inner
            self._ranges[rank] = [interval for interval in found if interval[0] < interval[1]]
        return self._ranges[rank]

    def alike(self, other: Cut) -> bool:
        """Whether every rank holds the same elements in the same order, whatever the axes are called."""
        if self == other:
            return True
        ways = self.axis.ways
        return ways == other.axis.ways and all(self.ranges(rank) == other.ranges(rank) for rank in range(ways))

    def take(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """A rank's part of a whole tensor; a view where it is in one piece."""
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in self.ranges(rank)]
        if not parts:
            return tensor.narrow(dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, blocks: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole from the blocks of all ranks."""
        if len(self.inners) == 1:
            return torch.cat(list(blocks), dim)
        found, base = [], [0] * len(blocks)
        for inner in self.inners:
            for rank, block in enumerate(blocks):
                length = self.axis.counts[rank] * inner
                found.append(block.narrow(dim, base[rank], length))
                base[rank] += length
        return torch.cat(found, dim)
