"""Norms: local where the cut dim is not among those normalised; statistics over it are summed, or the value is gathered."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

from epl.parallel.split.rules.attention import opened
from epl.parallel.split.rules.common import like
from epl.parallel.split.rules.registry import rule
from epl.parallel.split.value import SplitTensor, block_of, enter, refine, settle, whole

_normalize = opened(functional.normalize)


@rule("normalize", spaces=(functional,))
def rule_normalize(func: Any, input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, p, dim, eps)
    if not isinstance(dim, int):
        return NotImplemented
    if dim % x.ndim == x.place:
        return _normalize(func, x, p, dim, eps)
    return like(x, func(x.local, p, dim, eps))


@rule("layer_norm", spaces=(functional, torch))
def rule_layer_norm(
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return _last_dims(func, settle(input), tuple(normalized_shape), (weight, bias), (eps,))


@rule("rms_norm", spaces=(functional, torch))
def rule_rms_norm(func: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _last_dims(func, settle(input), tuple(normalized_shape), (weight,), (eps,))


def _last_dims(func: Any, x: Any, shape: tuple[int, ...], learned: tuple[Any, ...], eps: tuple[Any, ...]) -> Any:
    if not isinstance(x, SplitTensor) or x.place >= x.ndim - len(shape):
        return func(whole(x, "a norm runs over the cut dim"), shape, *map(whole, learned), *eps)
    return like(x, func(x.local, shape, *(enter(whole(item), x.ranks) for item in learned), *eps))


def _along_channels(item: Any, x: SplitTensor) -> Any:
    """This rank's part of something with one entry per channel (dim 1 of x)."""
    if item is None:
        return None
    if x.place == 1:
        return block_of(item, -1, x.cut, x.ranks, "channels are cut differently")
    return enter(whole(item), x.ranks)


@rule("group_norm", spaces=(functional, torch))
def rule_group_norm(
    func: Any,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, num_groups, whole(weight), whole(bias), eps)
    if x.place > 1 or 0 in x.cut.lengths:
        return NotImplemented
    groups = num_groups
    if x.place == 1:
        each, cut = x.cut.size // num_groups, x.cut
        starts = itertools.accumulate(cut.lengths)
        if len(cut.inners) != 1 or any(start % each for start in starts):
            if -(-num_groups // x.ranks.ways) * x.ranks.ways <= _EVEN * num_groups:
                refine(x.ranks, ("group", cut.axis.name, each))
            return NotImplemented if x.ndim == 2 else _over_borders(x, num_groups, weight, bias, eps)
        groups = x.local.shape[1] // each
    return like(x, func(x.local, groups, _along_channels(weight, x), _along_channels(bias, x), eps))


_EVEN = 1.1
"""Whole groups are dealt out if no rank gets more than so many times its share: statistics over borders are not much to send."""


def _over_borders(x: SplitTensor, groups: int, weight: Any, bias: Any, eps: float) -> Any:
    """Group norm where groups lie on several ranks: only the statistics of channels are gathered, two numbers for each."""
    dims, ones = list(range(2, x.ndim)), [1] * (x.ndim - 2)
    rows, channels = x.shape[:2]

    def of_group(channel: Any) -> Any:
        """The mean of each channel's group, from means of channels."""
        mean = whole(channel, "statistics of groups of channels").view(rows, groups, -1).mean(2, keepdim=True)
        return mean.expand(-1, -1, channels // groups).reshape(rows, channels, *ones)

    wide: Any = x.float() if x.dtype.itemsize < 4 else x
    centred = wide - of_group(wide.mean(dims))
    out = (centred * (of_group(centred.square().mean(dims)) + eps).rsqrt()).to(x.dtype)
    out = out if weight is None else out * weight.view(-1, *ones)
    return out if bias is None else out + bias.view(-1, *ones)


@rule("instance_norm", spaces=(functional,))
def rule_instance_norm(
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    x = settle(input)
    learned = weight, bias
    if not isinstance(x, SplitTensor):
        return func(x, running_mean, running_var, *map(whole, learned), use_input_stats, momentum, eps)
    if x.place > 1 or running_mean is not None or not use_input_stats or 0 in x.cut.lengths:
        return NotImplemented
    return like(x, func(x.local, None, None, *(_along_channels(item, x) for item in learned), True, momentum, eps))


@rule("batch_norm", spaces=(functional,))
def rule_batch_norm(
    func: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, running_mean, running_var, whole(weight), whole(bias), training, momentum, eps)
    if 0 in x.cut.lengths:
        return NotImplemented
    learned = [_along_channels(item, x) for item in (weight, bias)]
    stats = [_along_channels(item, x) for item in (running_mean, running_var)]
    if not training:
        return like(x, func(x.local, *stats, *learned, False, momentum, eps))
    if x.place == 1:  # statistics are per channel; the buffers are whole on every rank
        blocks = [None if item is None else item.clone() for item in stats]
        out = like(x, func(x.local, *blocks, *learned, True, momentum, eps))
        for buffer, block in zip((running_mean, running_var), blocks, strict=True):
            if buffer is not None:
                buffer.copy_(x.cut.join(x.ranks.all_gather(block, x.cut.lengths, 0), 0))  # type: ignore[arg-type]
        return out
    return _over_rows(x, running_mean, running_var, weight, bias, momentum, eps)


def _over_rows(
    x: SplitTensor, running_mean: Any, running_var: Any, weight: Any, bias: Any, momentum: float, eps: float
) -> Any:
    """Batch norm of rows that are spread over ranks: the statistics are those of all rows."""
    dims = [d for d in range(x.ndim) if d != 1]
    shape = (-1, *[1] * (x.ndim - 2))
    mean = whole(x.mean(dims))
    centred = x - mean.view(shape)
    var = whole(centred.square().mean(dims))
    with torch.no_grad():
        count = x.numel() // x.shape[1]
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    out = centred * (var + eps).rsqrt().view(shape)
    out = out if weight is None else out * whole(weight).view(shape)
    return out if bias is None else out + whole(bias).view(shape)
