"""Losses: on logits spread over ranks by classes, by rows or by pixels, nothing of the size of the logits is sent."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from epl import _torch
from epl.parallel.split.functions import Enter
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.rules.common import is_cut, owned
from epl.parallel.split.rules.pointwise import pointwise
from epl.parallel.split.rules.reductions import summed, top_over
from epl.parallel.split.rules.registry import rule
from epl.parallel.split.value import SplitTensor, block_of, differentiable, partial, settle, shard, whole

# ---- cross entropy over classes ------------------------------------------------------------------------------------------------


class CrossEntropyCut(torch.autograd.Function):
    """Per-row loss of logits [n, classes here]: two small all-reduces, nothing of the size of the logits is sent.

    loss = a · lse − Σ_c t_c x_c with t_c the weighted, smoothed target of class c and a = Σ_c t_c.

    Beside the losses it returns the chances of the classes here, for its own backward: what a backward reads has to be an argument or a
    result, or gradients of gradients lack, in silence, all that comes from there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ranks: SplitRanks,
        at: torch.Tensor | None,
        on: torch.Tensor | None,
        smooth: tuple[torch.Tensor, torch.Tensor] | None,
        soft: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # at, on: the target's place here and its weight (0 elsewhere); smooth: weights of the classes here and of the rows; soft: [n, c]
        top = top_over(x, ranks, 1).squeeze(1)
        raised = (x - top.unsqueeze(1)).exp_()
        parts = [raised.sum(1)]
        if soft is not None:
            # 0 · −inf is no number; a class that is masked out and not a target counts nothing
            parts += [torch.where(soft == 0, torch.zeros_like(x), soft * x).sum(1), soft.sum(1)]
        else:
            assert at is not None
            assert on is not None
            hit = x.gather(1, at.unsqueeze(1)).squeeze(1) if x.shape[1] else torch.zeros_like(on)
            parts += [torch.where(on == 0, torch.zeros_like(on), hit * on), on]
            if smooth is not None:
                parts[1] = parts[1] + (x @ smooth[0]) * smooth[1]
                parts[2] = parts[2] + smooth[0].sum() * smooth[1]
        total, dot, mass = ranks.all_reduce_(torch.stack(parts)).unbind(0)
        chances = raised.div_(total.unsqueeze(1))
        ctx.save_for_backward(chances, at, on, soft, mass, *(smooth or ()))
        ctx.set_materialize_grads(False)
        ctx.ranks = ranks
        return mass * (top + total.log()) - dot, chances

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        chances, at, on, soft, mass, *smooth = ctx.saved_tensors
        of_loss, of_chances = grads
        found: torch.Tensor | None = None
        if of_loss is not None:
            gradient: Any = Enter.apply(of_loss, ctx.ranks) if torch.is_grad_enabled() else of_loss
            found = chances * (mass * gradient).unsqueeze(1)
            if soft is not None:
                found = found.sub_(soft * gradient.unsqueeze(1))
            else:
                if found.shape[1]:
                    found = found.scatter_add_(1, at.unsqueeze(1), -(on * gradient).unsqueeze(1))
                if smooth:
                    found = found.sub_(smooth[0] * (smooth[1] * gradient).unsqueeze(1))
        if of_chances is not None:  # somebody differentiates gradients
            total = summed((of_chances * chances).sum(1, keepdim=True), ctx.ranks)
            more = chances * (of_chances - total)
            found = more if found is None else found + more
        return found, None, None, None, None, None


@rule("cross_entropy", spaces=(functional,))
def rule_cross_entropy(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    x, target, weight = settle(input), settle(target), whole(weight)
    if size_average is not None or reduce is not None or (weight is not None and differentiable(weight)):
        return NotImplemented
    if not isinstance(x, SplitTensor):
        return func(
            x, whole(target), weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    if x.place != min(1, x.ndim - 1):
        each = functools.partial(func, ignore_index=ignore_index, label_smoothing=label_smoothing)
        return _by_rows(each, x, target, weight, ignore_index, reduction)
    soft = target.is_floating_point()
    if soft and differentiable(target):
        return _soft_written_out(x, target, weight, reduction, label_smoothing)
    target = whole(target, "targets are needed whole")
    loss, count = _by_classes(x, target, weight, ignore_index, label_smoothing)
    loss = loss.to(x.dtype)
    if reduction == "none":
        return loss.view(()) if x.ndim == 1 else loss.view(x.shape[0], *x.shape[2:])
    return loss.sum() / count.to(loss.dtype) if reduction == "mean" else loss.sum()


def _by_classes(
    x: SplitTensor, target: torch.Tensor, weight: Any, ignore_index: int, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of all rows, and what their mean divides by."""
    ranks, cut, classes, local = x.ranks, x.cut, x.cut.size, x.local
    if local.dtype in (torch.float16, torch.bfloat16):
        local = local.float()
    local = local.unsqueeze(0) if x.ndim == 1 else local.movedim(1, -1).reshape(x.numel() // classes, local.shape[1])
    ranks.note("all-reduce", 4 * local.shape[0] * local.element_size(), "cross entropy: max, sum, target")
    weight = None if weight is None else weight.to(local.dtype)
    own = None if weight is None else cut.take(weight, 0, ranks.rank)
    if target.is_floating_point():
        soft = target.unsqueeze(0) if x.ndim == 1 else target.movedim(1, -1).reshape(-1, classes)
        soft = cut.take(soft.to(local.dtype), 1, ranks.rank) * (1 - smoothing) + smoothing / classes
        soft = soft if own is None else soft * own
        found, _ = CrossEntropyCut.apply(local, ranks, None, None, None, soft)
        return found, local.new_tensor(local.shape[0])  # type: ignore[return-value]
    ids = target.reshape(-1)
    live = ids != ignore_index
    if not ranks.plan and ids.device.type == "cpu" and bool(((ids < 0) | (ids >= classes))[live].any()):
        raise IndexError(
            f"Target {int(ids[live].max())} (or {int(ids[live].min())}) is out of bounds for {classes} classes."
        )
    known = ids.clamp(0, classes - 1)
    mine, at = owned(known, cut, ranks)
    rows = live.to(local.dtype) if weight is None else weight[known] * live
    smooth = None
    if smoothing:
        each = torch.ones_like(local[0] if len(local) else local.sum(0)) if own is None else own
        smooth = (each * (smoothing / classes)).detach(), live.to(local.dtype)
    found, _ = CrossEntropyCut.apply(local, ranks, at, rows * mine * (1 - smoothing), smooth, None)
    return found, rows.sum()  # type: ignore[return-value]


def _soft_written_out(x: SplitTensor, target: Any, weight: Any, reduction: str, smoothing: float) -> Any:
    """Soft targets that learn: step by step, so that they get their gradient."""
    dim = min(1, x.ndim - 1)
    soft = target * (1 - smoothing) + smoothing / x.cut.size
    if weight is not None:
        soft = soft * weight.view(-1, *[1] * max(0, x.ndim - 2))
    loss = -(x.log_softmax(dim) * soft).sum(dim)
    if reduction == "none":
        return loss
    rows = x.numel() // x.cut.size
    return loss.sum() / rows if reduction == "mean" else loss.sum()


# ---- rows or pixels --------------------------------------------------------------------------------------------------------------


def _by_rows(each: Any, x: SplitTensor, target: Any, weight: Any, ignore_index: int, reduction: str) -> Any:
    """Every rank the loss of its rows (or pixels); the mean divides by the count of all."""
    soft = target.is_floating_point()
    place = x.place if soft else x.place - (x.place > 1)
    own = block_of(target, place - target.ndim, x.cut, x.ranks, "targets are cut differently from logits")
    loss = each(x.local, own, weight, reduction="none")
    if reduction == "none":
        return shard(loss, x.place - (x.place > 1), x.cut, x.ranks)
    if reduction == "sum":
        return partial(loss.sum(), x.ranks)
    if soft:
        return partial(loss.sum() / (x.numel() // x.shape[1]), x.ranks)
    live = own != ignore_index
    count = (
        live.sum().to(loss.dtype)
        if weight is None
        else weight.to(loss.dtype)[torch.where(live, own, 0)].mul(live).sum()
    )
    x.ranks.note("all-reduce", loss.element_size(), "how many targets count")
    return partial(loss.sum() / x.ranks.all_reduce_(count.detach().clone()), x.ranks)


@rule("nll_loss", spaces=(functional,))
def rule_nll_loss(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    x, target, weight = settle(input), settle(target), whole(weight)
    if size_average is not None or reduce is not None or (weight is not None and differentiable(weight)):
        return NotImplemented
    if not isinstance(x, SplitTensor):
        return func(x, whole(target), weight, ignore_index=ignore_index, reduction=reduction)
    dim = min(1, x.ndim - 1)
    if x.place != dim:
        return _by_rows(functools.partial(func, ignore_index=ignore_index), x, target, weight, ignore_index, reduction)
    target = whole(target)
    live = target != ignore_index
    known = torch.where(live, target, torch.zeros_like(target))
    rows = live.to(x.dtype) if weight is None else weight.to(x.dtype)[known] * live
    picked = whole(x.gather(dim, known.unsqueeze(dim)), "what the targets hit").squeeze(dim)
    loss = -torch.where(rows == 0, torch.zeros_like(picked), picked * rows)
    if reduction == "none":
        return loss
    return loss.sum() / rows.sum() if reduction == "mean" else loss.sum()


# ---- element by element -----------------------------------------------------------------------------------------------------------

_ELEMENTWISE = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
poisson_nll_loss soft_margin_loss
"""
ELEMENTWISE = _ELEMENTWISE.split()
_OVER_WEIGHTS = (
    functional.mse_loss,
    functional.l1_loss,
)  # their mean is over the sum of `weight`; huber_loss divides by the count


@rule(*ELEMENTWISE, spaces=(functional,))
def rule_elementwise(func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs.pop("size_average", None) is not None or kwargs.pop("reduce", None) is not None:
        return NotImplemented  # the old positional forms
    if func is functional.l1_loss and (weight := _torch.weight_of_l1_loss()) is not None:
        kwargs["weight"] = weight
    reduction = kwargs.pop("reduction", "mean")
    x, target = settle(input), settle(target)
    if not is_cut(x) and not is_cut(target):
        return func(x, target, **{name: whole(item) for name, item in kwargs.items()}, reduction=reduction)
    if x.shape != target.shape:  # torch warns, and the cut dim may be spread out
        return NotImplemented
    loss = pointwise(_Each(func), x, target, **kwargs)
    if reduction == "none" or loss is NotImplemented:
        return loss
    if reduction == "batchmean":
        return loss.sum() / x.shape[0]
    if reduction == "mean" and func in _OVER_WEIGHTS and (weight := kwargs.get("weight")) is not None:
        return loss.sum() / weight.sum()
    return loss.mean() if reduction == "mean" else loss.sum()


class _Each:
    """A loss function that gives the loss of each element."""

    def __init__(self, func: Any) -> None:
        self.func, self.__name__ = func, func.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs, reduction="none")


@rule("cosine_similarity")
def rule_cosine_similarity(func: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    first, second = settle(x1), settle(x2)
    lead = next((item for item in (first, second) if isinstance(item, SplitTensor)), None)
    if lead is None:
        return func(first, second, dim, eps)
    if first.shape != second.shape:
        return NotImplemented
    if dim % lead.ndim != lead.place:
        place = lead.place - (dim % lead.ndim < lead.place)
        blocks = [
            block_of(item, lead.from_end, lead.cut, lead.ranks, "values cut differently meet")
            for item in (first, second)
        ]
        return shard(func(*blocks, dim, eps), place, lead.cut, lead.ranks)
    lengths = [item.norm(2, dim).clamp_min(eps) for item in (first, second)]
    return (first * second).sum(dim) / (lengths[0] * lengths[1])
