"""Between whole, cut and partial values: the autograd functions over collectives.

    function        forward                         backward
    Enter           whole, used by cut work         gradients are summed over ranks
    Reduce          partial sums become whole       the gradient is whole already
    Gather          cut becomes whole               each rank keeps its part
    Take            whole becomes cut               gradients are put together
    ReduceScatter   partial sums become cut         gradients are put together
    EnterGathered   Gather, used by cut work        gradients are summed over ranks, each of which keeps its part
    Recut           cut along another dim           gradients are cut back: the opposite exchange

Each backward is itself one of these, so that gradients of gradients are right too. A whole value inside a split part is the same on all ranks, and so is its gradient; whatever meets a cut value goes through one of these.
"""

from __future__ import annotations

from typing import Any

import torch

from epl import _torch
from epl.errors import SplitError
from epl.parallel.split.ranks import SplitRanks
from epl.plan.split.cut import ROWS, Cut


class Enter(torch.autograd.Function):
    """A whole value enters cut work: identity; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SplitRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():  # nobody differentiates gradients: no need for a node
            return ctx.ranks.all_reduce(grads[0]), None
        return Reduce.apply(grads[0], ctx.ranks, False), None


class Reduce(torch.autograd.Function):
    """A partial sum becomes whole; the gradient is whole already. `fresh`: nobody else reads the addend, not even autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SplitRanks, fresh: bool) -> torch.Tensor:
        ctx.ranks = ranks
        if fresh and x.is_contiguous():
            return _torch.same_memory(ranks.all_reduce_(x))  # not a view: who gets it may change it in place
        return ranks.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return Enter.apply(grads[0], ctx.ranks) if torch.is_grad_enabled() else grads[0], None, None


class Gather(torch.autograd.Function):
    """A cut value becomes whole; the gradient is whole: each rank keeps its part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SplitRanks, dim: int, cut: Cut) -> torch.Tensor:
        ctx.args = ranks, dim, cut
        _refuse(ranks, cut)
        return cut.join(ranks.all_gather(x, cut.lengths, dim), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return Take.apply(grads[0], *ctx.args), None, None, None


class Take(torch.autograd.Function):
    """A whole value is cut; its gradient is put together from all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SplitRanks, dim: int, cut: Cut) -> torch.Tensor:
        ctx.args = ranks, dim, cut
        return cut.take(x, dim, ranks.rank).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return Gather.apply(grads[0], *ctx.args), None, None, None


class ReduceScatter(torch.autograd.Function):
    """Partial sums become a cut value, of blocks of any lengths."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SplitRanks, dim: int, cut: Cut) -> torch.Tensor:
        ctx.args = ranks, dim, cut
        return ranks.reduce_scatter([cut.take(x, dim, rank) for rank in range(ranks.ways)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return Enter.apply(Gather.apply(grads[0], *ctx.args), ctx.args[0]), None, None, None


class EnterGathered(torch.autograd.Function):
    """A value that was gathered from blocks enters cut work: the gradient of a block is its part of the sum, and no rank needs the rest."""

    @staticmethod
    def forward(
        ctx: Any, block: torch.Tensor, gathered: torch.Tensor, ranks: SplitRanks, dim: int, cut: Cut
    ) -> torch.Tensor:
        ctx.args = ranks, dim, cut
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ReduceScatter.apply(grads[0], *ctx.args), None, None, None, None


class Recut(torch.autograd.Function):
    """A value cut along one dim becomes cut along another; its gradient goes the opposite way. Each rank sends 1/k of its block to each."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranks: SplitRanks, old: int, old_cut: Cut, new: int, new_cut: Cut
    ) -> torch.Tensor:
        ctx.args = ranks, old, old_cut, new, new_cut
        _refuse(ranks, old_cut, new_cut)
        return _exchanged(x, ranks, old, old_cut, new, new_cut)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ranks, old, old_cut, new, new_cut = ctx.args
        return Recut.apply(grads[0], ranks, new, new_cut, old, old_cut), None, None, None, None, None


def _refuse(ranks: SplitRanks, *cuts: Cut) -> None:
    if ranks.refused and any(cut.axis.name == ROWS for cut in cuts):
        raise SplitError(ranks.refused)


def _exchanged(x: torch.Tensor, ranks: SplitRanks, old: int, old_cut: Cut, new: int, new_cut: Cut) -> torch.Tensor:
    parts = [new_cut.take(x, new, rank) for rank in range(ranks.ways)]
    shape = list(parts[ranks.rank].shape)
    shapes = []
    for length in old_cut.lengths:
        shape[old] = length
        shapes.append(tuple(shape))
    return old_cut.join(ranks.all_to_all(parts, shapes), old)
