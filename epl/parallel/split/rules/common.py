"""What several rules need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.value import SplitTensor, shard
from epl.plan.split.cut import Cut

Dims = int | Sequence[int] | None


def dims_of(value: torch.Tensor, dim: Dims) -> list[int]:
    """The dims that a reduction runs over, counted from the front; without any, all."""
    if dim is None or (not isinstance(dim, int) and not dim):
        return list(range(value.ndim))
    return [d % value.ndim for d in ((dim,) if isinstance(dim, int) else dim)] if value.ndim else []


def numbers(args: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes or dims given as one sequence or one by one. Torch takes tensors for them too: computed with as these, they would change."""
    given = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    return tuple(int(n) if isinstance(n, torch.Tensor) else n for n in given)


def like(value: SplitTensor, local: torch.Tensor) -> SplitTensor:
    """A value cut as this one, with another block."""
    return shard(local, value.place, value.cut, value.ranks)


def reduced(value: SplitTensor, local: torch.Tensor, dims: Sequence[int], keepdim: bool) -> SplitTensor:
    """A value cut as this one from which other dims are gone."""
    place = value.place if keepdim else value.place - sum(d < value.place for d in dims)
    return shard(local, place, value.cut, value.ranks)


def is_cut(value: Any) -> bool:
    """Whether this rank holds a block of it."""
    return isinstance(value, SplitTensor) and not value.is_partial


def owned(ids: torch.Tensor, cut: Cut, ranks: SplitRanks) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the global ids this rank holds, and where; 0 for the others."""
    mine, at, base = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids), 0
    for start, stop in cut.ranges(ranks.rank):
        here = (ids >= start) & (ids < stop)
        mine |= here
        at = torch.where(here, ids - start + base, at)
        base += stop - start
    return mine, at


def readable(local: torch.Tensor, place: int) -> torch.Tensor:
    """A block with at least one element along `place`: one of zeros where it is empty, so that every rank has a graph."""
    if local.shape[place]:
        return local
    shape = list(local.shape)
    shape[place] = 1
    return torch.cat([local, local.new_zeros(shape)], place)
