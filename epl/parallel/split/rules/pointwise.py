"""Element by element: local on the blocks; partial sums stay partial where the function is linear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from epl.graph.spec import swap
from epl.parallel.split.rules.registry import functions_named, rule
from epl.parallel.split.value import (
    SplitTensor,
    addend,
    block_of,
    change_sum,
    changes,
    partial,
    settle,
    shard,
    whole,
)

_POINTWISE = """
add sub subtract mul multiply div divide true_divide neg negative abs absolute exp exp2 expm1 log log2 log10 log1p
sqrt rsqrt square pow sin cos tan asin acos atan arcsin arccos arctan atan2 arctan2 sinh cosh tanh asinh acosh atanh
sigmoid logit erf erfc erfinv lgamma digamma relu relu6 gelu silu mish elu selu celu leaky_relu hardswish hardsigmoid
hardtanh softplus softsign logsigmoid tanhshrink hardshrink softshrink threshold clamp clamp_min clamp_max clip where
masked_fill eq ne not_equal lt less le less_equal gt greater ge greater_equal isclose logical_and logical_or
logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift maximum
minimum fmax fmin sign sgn signbit floor ceil round trunc fix frac lerp addcmul addcdiv reciprocal nan_to_num isnan
isinf isposinf isneginf isfinite hypot logaddexp logaddexp2 heaviside float double half bfloat16 int long short char
byte bool contiguous clone detach fmod remainder floor_divide rsub copysign xlogy sinc positive deg2rad rad2deg conj
conj_physical resolve_conj resolve_neg polar complex cfloat cdouble float_power ldexp expit xlog1py ndtr log_ndtr
gammaln real imag angle __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__
__pow__ __rpow__ __neg__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__
__invert__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __lshift__ __rshift__ __rlshift__ __rrshift__ __abs__ __pos__
__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ zero_ fill_
copy_
"""
POINTWISE = _POINTWISE.split()
ADD = set(functions_named("add", "__add__", "__radd__"))
LINEAR = set(functions_named("neg", "negative", "__neg__", "contiguous", "positive", "__pos__"))
"""Of the sum as of each addend."""
WIDENING = set(functions_named("to", "float", "double", "half", "bfloat16"))
"""Linear while no digit is lost."""
SCALED = set(functions_named("mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__"))
"""Linear beside a number."""


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value


@rule(*POINTWISE, *(f"{name}_" for name in POINTWISE if not name.endswith("_")))
def pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Local on the blocks of whoever is cut; the others give their part of it."""
    if kwargs.get("out") is not None:
        return NotImplemented
    if (
        func.__name__ == "where" and len(args) + len(kwargs) == 1
    ):  # where(mask) is nonzero(mask): indices into the whole
        return NotImplemented
    inplace = changes(func.__name__) or bool(kwargs.get("inplace"))
    tensors = list(tensors_in(args, kwargs))
    if any(isinstance(value, SplitTensor) and value.is_partial for value in tensors):
        return _of_sums(func, args, kwargs, inplace)
    if inplace:
        lead = tensors[0]
        if not isinstance(lead, SplitTensor):  # a plain tensor is changed: whole, like everything it is made of
            return NotImplemented
    else:
        found = _lead(tensors)
        if found is None:
            return NotImplemented
        lead = found
    ranks, cut, place = lead.ranks, lead.cut, lead.from_end

    def block(value: Any) -> Any:
        if value is lead:
            return lead.local
        if isinstance(value, torch.Tensor):
            return block_of(value, place, cut, ranks, "values cut differently meet")
        return value

    local = func(*map(block, args), **{name: block(value) for name, value in kwargs.items()})
    if inplace:
        return lead  # its block was changed
    return shard(local, local.ndim + place, cut, ranks)


def _lead(tensors: list[torch.Tensor]) -> SplitTensor | None:
    """Whose cut the result has: the first of the most dims, if no other tensor is wider where it is cut."""
    shape: torch.Size | None = None
    best: SplitTensor | None = None
    for value in tensors:
        if isinstance(value, SplitTensor) and (best is None or value.ndim > best.ndim):
            if value.cut.size == 1:  # may be spread out by another
                shape = shape or torch.broadcast_shapes(*(other.shape for other in tensors))
                if shape[value.from_end] != 1:
                    continue
            best = value
    return best


def _of_sums(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inplace: bool) -> Any:
    """Where a partial sum takes part."""
    first = args[0] if args else None
    if inplace and isinstance(first, SplitTensor) and first.is_partial:
        rest, named = swap((args[1:], kwargs), SplitTensor, whole)
        return change_sum(func, first, rest, named)
    lone = first if isinstance(first, SplitTensor) and first.is_partial and first.extra is None else None
    if not inplace and lone is not None and lone.total is None and _is_linear(func, lone, args[1:], kwargs):
        return partial(func(addend(lone), *args[1:], **kwargs), lone.ranks)
    if func in ADD and len(args) == 2 and not kwargs:
        found = _add(*args)
        if found is not None:
            return found
    args, kwargs = swap((args, kwargs), SplitTensor, settle)
    return func(*args, **kwargs)


def _is_linear(func: Any, value: SplitTensor, others: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the function of the sum is the sum of the function of the addends, and nobody has summed yet."""
    if not value.is_partial or value.total is not None or value.extra is not None:
        return False
    if func in LINEAR:
        return True
    if func in SCALED:
        return not kwargs and all(isinstance(other, (int, float, complex)) for other in others)
    if func in WIDENING and value.is_floating_point() and not any(tensors_in(others, kwargs)):
        made = func(torch.empty((), dtype=value.dtype, device=value.device), *others, **kwargs)
        return made.is_floating_point() and made.element_size() >= value.element_size()
    return False


def _add(first: Any, second: Any) -> SplitTensor | None:
    """partial + partial, partial + whole: still partial."""
    open_sums = [
        isinstance(value, SplitTensor) and value.is_partial and value.total is None for value in (first, second)
    ]
    if all(open_sums):
        if first.shape != second.shape or first.ranks is not second.ranks:
            return None
        extra = first.extra if second.extra is None else second.extra
        if first.extra is not None and second.extra is not None:
            extra = first.extra + second.extra
        return partial(first.local + second.local, first.ranks, True, extra)
    if not any(open_sums):
        return None
    value, other = (first, second) if open_sums[0] else (second, first)
    if not isinstance(other, torch.Tensor) or isinstance(other, SplitTensor) or other.dtype != value.local.dtype:
        return None
    dims = other.ndim
    if dims > value.ndim or (dims and other.shape != value.shape[-dims:]):
        return None
    extra = other if value.extra is None else value.extra + other
    return partial(value.local, value.ranks, extra=extra, cell=value.cell)


@rule("to", "type")
def rule_to(func: Any, input: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = swap(
        (args, kwargs), SplitTensor, lambda value: value.seen()
    )  # .to(other): only its dtype and device
    if not isinstance(input, SplitTensor):
        return func(input, *args, **kwargs)
    if func is torch.Tensor.type and not args and not kwargs:
        return input.seen().type()
    if input.is_partial:
        if func is not torch.Tensor.type and _is_linear(torch.Tensor.to, input, args, kwargs):
            return partial(func(addend(input), *args, **kwargs), input.ranks)
        return func(settle(input), *args, **kwargs)
    return shard(func(input.local, *args, **kwargs), input.place, input.cut, input.ranks)


@rule("type_as")
def rule_type_as(func: Any, input: torch.Tensor, other: torch.Tensor) -> Any:
    return input.to(dtype=other.dtype, device=other.device)


@rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
def rule_like(func: Any, input: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    if "rand" in func.__name__:  # whole, from the stream that all ranks share
        blank = torch.empty((1,) * input.ndim, dtype=input.dtype, device=input.device).expand(input.shape)
        return func(blank, *args, **kwargs).contiguous()
    if input.is_partial:
        return func(input.seen(), *args, **kwargs)
    return shard(func(input.local, *args, **kwargs), input.place, input.cut, input.ranks)


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def rule_new(func: Any, input: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = swap((args, kwargs), SplitTensor, whole)
    return func(input.seen() if isinstance(input, SplitTensor) else input, *args, **kwargs)


@rule("detach_", "requires_grad_")
def rule_graph(func: Any, input: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    func(input.seen() if input.total is None else input.total, *args, **kwargs)
    return input


@rule("glu")
def rule_glu(func: Any, input: Any, dim: int = -1) -> Any:
    value = settle(input)
    if not isinstance(value, SplitTensor):
        return func(value, dim)
    if dim % value.ndim != value.place:
        return shard(func(value.local, dim), value.place, value.cut, value.ranks)
    gated, gate = value.chunk(2, dim)
    return gated * gate.sigmoid()


@rule("prelu")
def rule_prelu(func: Any, input: Any, weight: Any) -> Any:
    value = settle(input)
    if not isinstance(value, SplitTensor):
        return func(value, whole(weight))
    if weight.numel() > 1:
        weight = weight.view(-1, *[1] * (value.ndim - 2)) if value.ndim > 1 else weight
    return torch.where(value > 0, value, value * weight)
