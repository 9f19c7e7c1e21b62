"""Where a parameter is cut: its whole shape, the dim, and the cut of that dim."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from epl.plan.split.cut import Cut


@dataclass(frozen=True)
class ParameterLayout:
    """How a parameter lies on the ranks of a split; the parameter itself is a plain tensor, this rank's block."""

    shape: torch.Size
    """Of the whole parameter."""
    dim: int
    cut: Cut

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's block of something of the parameter's whole shape, as memory of its own."""
        return self.cut.take(whole, self.dim, rank).clone(memory_format=torch.contiguous_format)

    def block_shape(self, rank: int) -> torch.Size:
        """The shape of what a rank holds."""
        return torch.Size((*self.shape[: self.dim], self.cut.length(rank), *self.shape[self.dim + 1 :]))

    def pieces(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(start in the whole dim, start in the block, length) of every piece that a rank holds."""
        ranges = self.cut.ranges(rank)
        lengths = [stop - start for start, stop in ranges]
        for (start, _), at, length in zip(ranges, accumulate((0, *lengths[:-1])), lengths, strict=True):
            yield start, at, length


_LAYOUT = "epl_layout"


def layout_of(tensor: torch.Tensor) -> ParameterLayout | None:
    """How a parameter is cut; None if this rank holds all of it."""
    found = getattr(tensor, _LAYOUT, None)
    return found if isinstance(found, ParameterLayout) else None


def set_layout(parameter: torch.Tensor, layout: ParameterLayout | None) -> None:
    """Note on a parameter that it is from now on this rank's block, or, with None, that it is whole again."""
    if layout is not None:
        setattr(parameter, _LAYOUT, layout)
    elif hasattr(parameter, _LAYOUT):
        delattr(parameter, _LAYOUT)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape that a tensor has on one device."""
    layout = layout_of(tensor)
    return tensor.shape if layout is None else layout.shape
