"""Softmax and reductions: local along other dims; along the cut dim a small all-reduce, a partial sum, or a gather."""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from epl.graph.spec import swap
from epl.parallel.split.functions import Enter, Reduce
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.rules.common import Dims, dims_of, like, reduced
from epl.parallel.split.rules.registry import rule
from epl.parallel.split.value import SplitTensor, addend, nbytes, partial, settle, whole


def top_over(local: torch.Tensor, ranks: SplitRanks, dim: int) -> torch.Tensor:
    """The largest along a cut dim, of all ranks; without a gradient."""
    local = local.detach()
    shape = list(local.shape)
    shape[dim] = 1
    top = local.amax(dim, keepdim=True) if local.shape[dim] else local.new_full(shape, -math.inf)
    return ranks.all_reduce_(top.contiguous(), "max")


def summed(local: torch.Tensor, ranks: SplitRanks) -> torch.Tensor:
    """The sum over ranks of something that a backward has made, for its own cut work; differentiable again where gradients are."""
    if not torch.is_grad_enabled():
        return ranks.all_reduce_(local.contiguous())
    return cast("torch.Tensor", Enter.apply(Reduce.apply(local, ranks, False), ranks))


class SoftmaxCut(torch.autograd.Function):
    """softmax or log_softmax over a dim that is spread over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SplitRanks, dim: int, log: bool) -> torch.Tensor:
        top = top_over(x, ranks, dim)
        raised = (x - top).exp_()
        total = ranks.all_reduce_(raised.sum(dim, keepdim=True).contiguous())
        out = x - top - total.log() if log else raised.div_(total)
        ctx.save_for_backward(out)
        ctx.args = ranks, dim, log
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (out,), (gradient,) = ctx.saved_tensors, grads
        ranks, dim, log = ctx.args
        if log:
            total = summed(gradient.sum(dim, keepdim=True), ranks)
            return gradient - out.exp() * total, None, None, None
        total = summed((gradient * out).sum(dim, keepdim=True), ranks)
        return out * (gradient - total), None, None, None


@rule("softmax", "log_softmax")
def rule_softmax(func: Any, input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None) -> Any:
    dtype = _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype  # torch.softmax has it third
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, dim, dtype=dtype)
    if dim is None:
        return NotImplemented
    dim %= x.ndim
    if dim != x.place:
        return like(x, func(x.local, dim, dtype=dtype))
    local = x.local if dtype is None else x.local.to(dtype)
    x.ranks.note("all-reduce", 4 * nbytes(local) // max(1, local.shape[dim]), "softmax over the cut dim")
    return like(x, SoftmaxCut.apply(local, x.ranks, dim, "log" in func.__name__))


# ---- sums ---------------------------------------------------------------------------------------------------------------------


@rule("sum", "mean", "nansum", "nanmean")
def rule_sum(
    func: Any, input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    name = func.__name__
    if isinstance(dim, torch.dtype):
        return NotImplemented
    if input.is_partial:
        if input.total is not None or input.extra is not None or "nan" in name or dtype is not None:
            return func(whole(input), dims_of(input, dim), keepdim, dtype=dtype)
        return partial(func(addend(input), dims_of(input, dim), keepdim), input.ranks)
    dims = dims_of(input, dim)
    if input.place not in dims:
        return reduced(input, func(input.local, dims, keepdim, dtype=dtype), dims, keepdim)
    if name == "mean":
        kind = dtype or input.dtype
        if not kind.is_floating_point and not kind.is_complex:
            return NotImplemented  # torch says what is wrong
        count = math.prod(input.shape[d] for d in dims)
        if count == 0:
            return NotImplemented
        return partial(input.local.sum(dims, keepdim, dtype=dtype) / count, input.ranks)
    if name == "nanmean":
        return NotImplemented
    return partial(func(input.local, dims, keepdim, dtype=dtype), input.ranks)


@rule("var", "var_mean")
def rule_var(
    func: Any, input: Any, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None
) -> Any:
    x = settle(input)
    if isinstance(dim, bool):  # var(unbiased)
        dim, unbiased = None, dim
    correction = (1 if unbiased else 0) if correction is None else correction
    if not isinstance(x, SplitTensor):
        return func(x, dim, correction=correction, keepdim=keepdim)
    dims = dims_of(x, dim)
    if 0 in x.cut.lengths:  # torch warns of nothing's variance
        return NotImplemented
    if x.place not in dims:
        out = func(x.local, dims, correction=correction, keepdim=keepdim)
        return swap(out, torch.Tensor, lambda local: reduced(x, local, dims, keepdim))
    mean = whole(x.mean(dims, True))
    count = math.prod(x.shape[d] for d in dims)
    var = (x - mean).square().sum(dims, keepdim) / max(0, count - correction)
    if func.__name__ == "var":
        return var
    return var, mean if keepdim else mean.reshape([n for d, n in enumerate(x.shape) if d not in dims])


@rule("logsumexp")
def rule_logsumexp(func: Any, input: Any, dim: Dims, keepdim: bool = False) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, dim, keepdim)
    dims = dims_of(x, dim)
    if x.place not in dims:
        return reduced(x, func(x.local, dims, keepdim), dims, keepdim)
    top = top_over(x.local, x.ranks, x.place)
    top = top.amax(dims, keepdim=True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    total = whole((x - top).exp().sum(dims, keepdim), "logsumexp over the cut dim")
    return total.log() + (top if keepdim else top.reshape(total.shape))


class NormCut(torch.autograd.Function):
    """The 2-norm over dims of which one is spread over ranks; its gradient at 0 is 0, as torch has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SplitRanks, dims: list[int]) -> torch.Tensor:
        out = ranks.all_reduce_(
            (x.abs().square() if x.is_complex() else x * x).sum(dims, keepdim=True).contiguous()
        ).sqrt_()
        ctx.save_for_backward(x, out)
        ctx.ranks = ranks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, out = ctx.saved_tensors
        factor = (grads[0] / out).masked_fill_(out == 0, 0)
        if torch.is_grad_enabled():
            factor = cast("torch.Tensor", Enter.apply(factor, ctx.ranks))
        return x * factor, None, None


@rule("norm", "linalg_vector_norm", "vector_norm")
def rule_norm(
    func: Any, input: Any, p: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, ord: Any = None
) -> Any:
    x = settle(input)
    if dtype is not None or not isinstance(p, (int, float, str, type(None))):
        return NotImplemented
    order = 2.0 if p in (None, "fro") and ord is None else p if ord is None else ord
    if not isinstance(x, SplitTensor):
        return func(x, order, dim, keepdim)
    if not isinstance(order, (int, float)):
        return NotImplemented
    dims = dims_of(x, dim)
    if x.place not in dims:
        return reduced(x, func(x.local, order, dims, keepdim), dims, keepdim)
    shape = [n for d, n in enumerate(x.shape) if d not in dims]
    if order == 2:
        x.ranks.note("all-reduce", x.element_size() * math.prod(shape), "norm over the cut dim")
        out = NormCut.apply(x.local, x.ranks, dims)
        return out if keepdim else out.reshape(shape)
    if order == 1:
        return whole(x.abs().sum(dims, keepdim))
    return NotImplemented


rule("vector_norm", spaces=(torch.linalg,))(rule_norm)


@rule("norm", spaces=(torch.linalg,))
def rule_linalg_norm(
    func: Any, input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    of_vectors = ord is None or (dim is not None and len(dims_of(input, dim)) == 1)
    if not of_vectors or isinstance(ord, str):
        return NotImplemented
    return torch.linalg.vector_norm(input, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


@rule("any", "all")
def rule_any(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x) if dim is None else func(x, dim, keepdim)
    dims = dims_of(x, dim)
    if x.place not in dims:
        return reduced(x, func(x.local, dims, keepdim), dims, keepdim)
    hits = (x != 0 if func.__name__ == "any" else x == 0).sum(dims, keepdim)
    return whole(hits) != 0 if func.__name__ == "any" else whole(hits) == 0


# ---- functions along one dim, or gather --------------------------------------------------------------------------------------

_KEEPING = """
cumsum cumprod cummax cummin logcumsumexp sort argsort msort flip roll softmin rot90 renorm
"""
KEEPING = _KEEPING.split()
"""Results have all dims."""
_REDUCING = """
amax amin std prod argmin median nanmedian mode kthvalue quantile nanquantile count_nonzero std_mean aminmax
"""
REDUCING = _REDUCING.split()
_OF_SOME = ("std", "std_mean", "quantile", "nanquantile")
"""They refuse, or answer otherwise, where a rank has nothing."""


def _dim_given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """The dims that a function was given, and where they are among its other arguments."""
    at = 1 if name in ("roll", "kthvalue", "quantile", "nanquantile", "renorm", "rot90") else 0
    known = kwargs.get("dim", kwargs.get("dims"))
    return (args[at] if len(args) > at else None) if known is None else known, at


@rule(*KEEPING, *REDUCING)
def rule_over_other_dims(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, *args, **kwargs)
    name = func.__name__
    if name in ("renorm", "rot90", "msort"):
        return NotImplemented
    if name == "flip" and args and isinstance(args[0], int):
        args = (args,)
    dim, at = _dim_given(name, args, kwargs)
    if name in ("sort", "argsort") and dim is None and "stable" not in kwargs:
        dim = -1
    if isinstance(dim, bool) or dim is None or (name in ("sort", "argsort") and args and isinstance(args[0], bool)):
        return NotImplemented
    dims = dims_of(x, dim)
    if x.place in dims or (name in _OF_SOME and 0 in x.cut.lengths):
        return NotImplemented
    several = args[0] if args else kwargs.get("q")
    if "quantile" in name and isinstance(several, torch.Tensor) and several.ndim:
        return NotImplemented  # the result has a dim more, before all others
    if name in KEEPING:
        keepdim = True
    else:
        after = at + (2 if name == "std" and len(args) > at + 1 and "correction" not in kwargs and len(args) > 2 else 1)
        keepdim = kwargs.get("keepdim", args[after] if len(args) > after else False)
        if name in ("std", "std_mean"):
            keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        if name == "count_nonzero":
            keepdim = False
    out = func(x.local, *args, **kwargs)
    return swap(out, torch.Tensor, lambda local: reduced(x, local, dims, bool(keepdim)))
