"""Where ranks have rows of their own and parameters are split: the bridges into a split part and out of it.

`replicate(k)` and `split(k)` on the same k ranks. Outside split parts rank r computes on its own n_r rows, inside on all Σ n of them,
divided between the ranks as it comes: rows, features, classes.

    in     own rows                      a value cut along its rows; nothing is sent, the rules do that where it is needed
           no rows, alike on all ranks   whole
           no rows, of the own batch     averaged over ranks by rows                                       (a notice says so)
    out    cut along rows                own rows; nothing is sent
           partial sums                  own rows, by a reduce-scatter
           whole                         own rows of it; without rows it stays
           cut in another way (logits)   `OwnRowsOf`: looks like own rows × all classes; losses and metrics work on the blocks

[Note: gradients.] Outside, a gradient on rank r is that of its own loss, a mean over n_r rows. Inside it is that of the replica's loss,
Σ w_r loss_r with w_r = n_r / Σ n, on all ranks alike. So on the way out a gradient is multiplied by w_r, and on the way in divided by
it: what data parallelism then averages by rows (epl/train/weights.py) is the replica's gradient. Without these two factors a
backbone would learn k times too little, and train.

A gradient that is itself used (a penalty on gradients) is a value of the world in which it arrives, and it has crossed the border the
other way. So what goes back through its crossing is treated as what crosses there forward, and is no further multiplied: inside, the
gradient g of the outside is w·g, and the one of w·g, inside, that of g, outside, times w, divided by w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from epl import _torch
from epl.parallel.split.functions import ReduceScatter
from epl.parallel.split.ownrowsof import OwnRowsOf, own_rows_of
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.value import SplitTensor, shard, take, whole
from epl.plan.split.cut import ROWS, Axis, Cut
from epl.report.log import notice


@dataclass(frozen=True, eq=False)
class RowShare:
    """The rows of one call (or micro batch) on the ranks of a split, and what each rank's loss counts for."""

    axis: Axis
    weights: tuple[float, ...]
    idle: tuple[bool, ...]
    """Whether a rank's row only keeps it in step (a tail with fewer rows than ranks). It repeats another and has no place inside, where a
    loss or a statistic would count it; outside the rank is given the results of another row."""

    @staticmethod
    def of(counts: Sequence[int], counted: Sequence[bool] | None = None, *, by_rows: bool = True) -> RowShare:
        """From how many rows each rank has; those not `counted` only keep a rank in step.

        Without `by_rows` every rank's loss counts alike, as data parallelism has it where nobody knows the rows (epl/train/weights.py).
        """
        if not by_rows:
            return RowShare._of(counts, (1 / len(counts),) * len(counts), (False,) * len(counts))
        real = [n if counted is None or counted[r] else 0 for r, n in enumerate(counts)]
        total = sum(real)
        weights = tuple(n / total if total else 1 / len(real) for n in real)
        return RowShare._of(counts, weights, tuple(not n and total > 0 for n in real))

    @staticmethod
    def _of(counts: Sequence[int], weights: tuple[float, ...], idle: tuple[bool, ...]) -> RowShare:
        inside = [0 if idle[rank] else n for rank, n in enumerate(counts)]
        return RowShare(Axis(ROWS, sum(inside), len(inside), inside), weights, idle)

    def of_micro_batch(self, counts: Sequence[int]) -> RowShare:
        """The rows of one micro batch; what a rank's loss counts for is that of the whole call."""
        return RowShare._of(counts, self.weights, self.idle)

    def cut(self, inners: tuple[int, ...] = (1,)) -> Cut:
        """How a dim of rows lies on the ranks that has sections with so many elements of each."""
        return Cut(self.axis, inners)

    def own(self, value: torch.Tensor, how: Batched, rank: int) -> torch.Tensor:
        """The part of a rank's own rows that has a place inside."""
        assert how.dim is not None
        return value.narrow(how.dim, 0, 0) if self.idle[rank] else value

    def shown(self, how: Batched, rank: int) -> int:
        """How long the dim with rows is outside."""
        return sum(how.inners) if self.idle[rank] else self.cut(how.inners).length(rank)


class Batched(NamedTuple):
    """How a tensor carries the batch."""

    dim: int | None
    """The dim with the rows; None: it has none."""
    inners: tuple[int, ...] = (1,)
    """Sections of that dim, by their elements for each row: (positions,) if rows and positions are one dim, (1, 1) for two views of all rows."""
    coupled: bool = False
    """Without rows, but made from them: each rank has one of its own."""


PLAIN = Batched(None)


class PartCall(NamedTuple):
    """How the arguments and results of one call of a split part carry the batch."""

    inputs: tuple[Batched, ...]
    """For every tensor among its arguments, in order."""
    outputs: tuple[Batched, ...]
    shapes: tuple[torch.Size, ...]
    """Of the arguments, as recorded."""


class _Scaled(torch.autograd.Function):
    """Identity; gradients are multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return _ScaledBack.apply(grads[0], ctx.factor), None
        return (grads[0] if ctx.factor == 1.0 else grads[0] * ctx.factor), None


class _ScaledBack(torch.autograd.Function):
    """A gradient on its way back through `_Scaled`; what comes back through this goes the way of `_Scaled`."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return gradient * factor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Scaled.apply(grads[0], ctx.factor), None


class _Out(_Scaled):
    """The same on the way out of a part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return _same(x)


def _same(x: torch.Tensor) -> torch.Tensor:
    """What leaves a part, on the same memory. Code outside may change it in place (`out += residual`), which torch forbids of a view
    that an autograd function returns. A view stays one: it may be of what the part was given, which has a graph of its own."""
    return x.view_as(x) if _torch.is_view(x) else x.detach()


class _Leave(torch.autograd.Function):
    """A whole value without rows is used by every rank's own loss: its gradient is their sum, by weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SplitRanks, weight: float) -> torch.Tensor:
        ctx.args = ranks, weight
        return _same(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Average.apply(grads[0], *ctx.args), None, None


class _Average(torch.autograd.Function):
    """Each rank's own value without rows becomes their average, by rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SplitRanks, weight: float) -> torch.Tensor:
        ctx.args = ranks, weight
        return ranks.all_reduce_((x * weight).contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # × w_r as an addend of the average, ÷ w_r on the way out of the inside world
        return (_Leave.apply(grads[0], *ctx.args) if torch.is_grad_enabled() else grads[0]), None, None


def share_loss(value: torch.Tensor, ranks: SplitRanks, weight: float) -> torch.Tensor:
    """A whole value without rows, for use in this rank's own loss, which counts for `weight`."""
    return cast("torch.Tensor", _Leave.apply(value, ranks, weight)) if value.requires_grad else value


class RowBridge:
    """The way into split parts and out of them, for the rows of one call."""

    def __init__(self, ranks: SplitRanks, share: RowShare) -> None:
        self.ranks, self.share = ranks, share
        self.glue: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: NotImplemented
        """Who knows how a function between split parts treats the rows: what it gives, or NotImplemented."""

    @property
    def weight(self) -> float:
        """What this rank's loss counts for in the replica's."""
        return self.share.weights[self.ranks.rank]

    def enter(self, value: Any, how: Batched) -> Any:
        """An argument of a split part, as the part sees it."""
        if isinstance(value, OwnRowsOf):
            if value.stays_cut:
                return value.all_rows
            value = value.gathered()
        if not isinstance(value, torch.Tensor) or isinstance(value, SplitTensor):
            return value
        if how.dim is not None:
            weight = self.weight
            own = self.share.own(value, how, self.ranks.rank)
            if value.requires_grad:
                own = cast("torch.Tensor", _Scaled.apply(own, 1 / weight if weight else 0.0))
            return shard(own, how.dim, self.share.cut(how.inners), self.ranks)
        if how.coupled and value.is_floating_point():
            notice(
                f"a {tuple(value.shape)} value that each rank computes from its own rows goes into a split part without a batch dim: "
                "it is averaged over the ranks by their rows"
            )
            return _Average.apply(value, self.ranks, self.weight)
        return value

    def leave(self, value: Any, how: Batched) -> Any:
        """A result of a split part, as the code around it sees it."""
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, SplitTensor) and value.is_partial:
            value = self._scattered(value, how)
        if isinstance(value, SplitTensor):
            if value.cut.axis is self.share.axis:
                return self.rows_of(value, how)
            if how.dim is not None and value.place != how.dim:
                return own_rows_of(value, self, how)
            value = whole(value, "leaves a split part")
        if how.dim is None:
            return share_loss(value, self.ranks, self.weight)
        return self.out(self._filled(take(value, how.dim, self.share.cut(how.inners), self.ranks), value, how))

    def rows_of(self, value: SplitTensor, how: Batched) -> torch.Tensor:
        """This rank's own rows, outside, of a value that is cut along its rows."""
        if not any(self.share.idle):
            return self.out(value.local)
        how = how._replace(dim=value.place, inners=value.cut.inners)
        return self.out(self._filled(value.local, whole(value, "a rank without rows needs one"), how))

    def _filled(self, own: torch.Tensor, everyones: torch.Tensor, how: Batched) -> torch.Tensor:
        """Of a rank without rows, the last row of all; no gradient leaves it. Others have their own."""
        if not self.share.idle[self.ranks.rank]:
            return own
        assert how.dim is not None
        rows = self.share.axis.granules
        last = Cut(Axis("last", rows, 2, (rows - 1, 1)), how.inners)
        return torch.cat([own, last.take(everyones.detach(), how.dim, 1)], how.dim)

    def out(self, own: torch.Tensor) -> torch.Tensor:
        """This rank's own rows, outside."""
        return cast("torch.Tensor", _Out.apply(own, self.weight)) if own.requires_grad else own

    def _scattered(self, value: SplitTensor, how: Batched) -> Any:
        if how.dim is None or value.total is not None:
            return whole(value)
        cut = self.share.cut(how.inners)
        own = cast("torch.Tensor", ReduceScatter.apply(value.local, self.ranks, how.dim, cut))
        out = shard(own, how.dim, cut, self.ranks)
        return out if value.extra is None else out + value.extra
