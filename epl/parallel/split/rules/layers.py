"""Convolution, pooling, padding, embedding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch.nn import functional

from epl.errors import SplitError
from epl.parallel.split.rules.common import is_cut, like, owned, readable
from epl.parallel.split.rules.indexing import _check_bounds, masked
from epl.parallel.split.rules.products import added_to, local_bias
from epl.parallel.split.rules.registry import rule
from epl.parallel.split.value import SplitTensor, block_of, enter, partial, settle, shard, whole
from epl.plan.split.cut import Cut

# ---- convolution -------------------------------------------------------------------------------------------------------------


def convolved(func: Any, x: Any, weight: Any, bias: Any, more: tuple[Any, ...], groups: int, output_dim: int) -> Any:
    """A convolution whose weight has its output channels along `output_dim` (0, or 1 if it is transposed)."""
    x, weight = settle(x), settle(weight)
    channel = (1 if x.ndim == weight.ndim else 0) - x.ndim
    if not isinstance(weight, SplitTensor):
        if not isinstance(x, SplitTensor):
            return func(x, weight, whole(bias), *more)
        if x.from_end >= channel:
            x = whole(x, "the weight is whole" if x.from_end == channel else "a convolution runs over the cut dim")
            return func(x, weight, whole(bias), *more)
        return like(x, func(x.local, enter(weight, x.ranks), enter(whole(bias), x.ranks), *more))
    ranks, cut = weight.ranks, weight.cut
    if weight.place > 1 or 0 in cut.lengths:  # torch convolves nothing without channels
        return NotImplemented
    if groups != 1:
        return _grouped(func, x, weight, bias, more, groups, channel) if output_dim == 0 else NotImplemented
    if weight.place == output_dim:
        x = whole(x, "output channels of the weight are cut and so is the input")
        out = func(enter(x, ranks), weight.local, local_bias(bias, cut, ranks), *more)
        return shard(out, out.ndim + channel, cut, ranks)
    block = block_of(x, channel, cut, ranks, "input channels are cut in another way than the weight's")
    out = partial(func(block, weight.local, None, *more), ranks, True)
    return out if bias is None else out + added_to(out, whole(bias)).view(-1, *[1] * (weight.ndim - 2))


def _grouped(
    func: Any, x: Any, weight: SplitTensor, bias: Any, more: tuple[Any, ...], groups: int, channel: int
) -> Any:
    """Output channels cut so that every rank has whole groups: their input channels are its part of the input."""
    ranks, cut = weight.ranks, weight.cut
    each = cut.size // groups
    if weight.place != 0 or len(cut.inners) != 1 or any(n % each for n in (*cut.lengths, *_starts(cut))):
        return NotImplemented
    if 0 in cut.lengths or cut.inners[0] * x.shape[channel] % cut.size:
        return NotImplemented
    of_input = Cut(cut.axis, (cut.inners[0] * x.shape[channel] // cut.size,))
    block = block_of(x, channel, of_input, ranks, "groups are cut in another way than the weight's")
    out = func(block, weight.local, local_bias(bias, cut, ranks), *more[:-1], cut.length(ranks.rank) // each)
    return shard(out, out.ndim + channel, cut, ranks)


def _starts(cut: Cut) -> list[int]:
    return [0, *itertools.accumulate(cut.lengths)][:-1]


@rule("conv2d", "conv1d", "conv3d")
def rule_conv(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    return convolved(func, input, weight, bias, (stride, padding, dilation, groups), groups, 0)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def rule_conv_transpose(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    return convolved(func, input, weight, bias, (stride, padding, output_padding, groups, dilation), groups, 1)


# ---- what runs over the last dims -----------------------------------------------------------------------------------------------

POOLS = [
    f"{kind}_pool{n}d"
    for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp", "fractional_max")
    for n in (1, 2, 3)
]


@rule(*POOLS)
def rule_pool(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, *args, **kwargs)
    if x.from_end >= -int(func.__name__[-2]) or "fractional" in func.__name__ or True in args[1:] or 0 in x.cut.lengths:
        return NotImplemented
    if kwargs.get("return_indices"):
        return tuple(like(x, out) for out in func(x.local, *args, **kwargs))
    return like(x, func(x.local, *args, **kwargs))


@rule("interpolate", "upsample", "upsample_nearest", "upsample_bilinear", "pixel_shuffle", "pixel_unshuffle")
def rule_interpolate(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, *args, **kwargs)
    first = x.ndim - 3 if "pixel" in func.__name__ else 2  # of the dims that it looks along
    if x.place >= first or 0 in x.cut.lengths:
        return NotImplemented
    return like(x, func(x.local, *args, **kwargs))


@rule("pad")
def rule_pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, pad, mode, value)
    sides = list(pad)
    from_end = -x.from_end - 1
    if any(sides[2 * from_end : 2 * from_end + 2]) or (mode != "constant" and 0 in x.cut.lengths):
        return NotImplemented
    return like(x, func(x.local, pad, mode, value))


@rule("unfold", spaces=(functional,))
def rule_unfold(func: Any, input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    x = settle(input)
    more = kernel_size, dilation, padding, stride
    if not isinstance(x, SplitTensor):
        return func(x, *more)
    if x.ndim != 4 or x.place > 1 or 0 in x.cut.lengths:
        return NotImplemented
    cut = x.cut
    if x.place == 1:
        window = math.prod(kernel_size) if isinstance(kernel_size, (tuple, list)) else kernel_size**2
        cut = Cut(cut.axis, tuple(inner * window for inner in cut.inners))
    return shard(func(x.local, *more), x.place, cut, x.ranks)


@rule("unfold", spaces=(torch.Tensor,))
def rule_windows(func: Any, input: Any, dimension: int, size: int, step: int) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, dimension, size, step)
    if dimension % x.ndim == x.place:
        return NotImplemented
    return like(x, func(x.local, dimension, size, step))


@rule("triu", "tril", "triu_", "tril_")
def rule_triangle(func: Any, input: Any, diagonal: int = 0) -> Any:
    if not is_cut(input):
        return NotImplemented
    if input.from_end < -2:
        local = func(input.local, diagonal)
        return input if func.__name__.endswith("_") else like(input, local)
    if func.__name__.endswith("_"):
        return NotImplemented
    keep = getattr(torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device), func.__name__)(diagonal)
    return input.masked_fill(~keep, 0)


# ---- embedding -------------------------------------------------------------------------------------------------------------------


@rule("embedding", spaces=(functional,))
def rule_embedding(
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    weight = settle(weight)
    if isinstance(weight, SplitTensor) and max_norm is not None:
        raise SplitError(
            f"max_norm={max_norm} changes the rows of an embedding in place, which a table that is cut over ranks does not "
            "allow: normalise the rows out of place (F.embedding(ids, F.normalize(weight)))"
        )
    if scale_grad_by_freq or max_norm is not None:  # counts ids over all rows
        return NotImplemented
    if not isinstance(weight, SplitTensor):
        if not is_cut(input):
            return func(whole(input), weight, padding_idx, sparse=sparse)
        ranks = input.ranks
        return like(input, func(input.local, enter(weight, ranks), padding_idx, sparse=sparse))
    ranks, cut = weight.ranks, weight.cut
    ids = whole(input, "ids are looked up in a table that is cut")
    if weight.place == 1:
        out = func(ids, weight.local, padding_idx, sparse=sparse)
        return shard(out, out.ndim - 1, cut, ranks)
    _check_bounds(ids, cut.size, ranks.plan)
    mine, at = owned(ids, cut, ranks)
    table = readable(weight.local, 0)
    if padding_idx is None:
        return masked(weight, func(at, table, sparse=sparse), mine.unsqueeze(-1))
    padded = ids == padding_idx % cut.size  # its gradient is dropped, on the rank that has it
    out = func(at, table, sparse=sparse).masked_fill(~(mine & ~padded).unsqueeze(-1), 0)
    row = functional.embedding(at, table.detach()).masked_fill(~(mine & padded).unsqueeze(-1), 0)
    return partial(out + row, ranks)
