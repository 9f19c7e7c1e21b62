"""What is asked of a value, rather than computed from it: nothing is sent."""

from __future__ import annotations

from typing import Any

import torch

from epl.errors import SplitError
from epl.graph.spec import swap
from epl.parallel.split.rules.common import like
from epl.parallel.split.rules.registry import RULES, rule
from epl.parallel.split.value import SplitTensor, block_of, shard, take, view_copy, whole


@rule(
    "is_floating_point",
    "is_complex",
    "is_nonzero_type",
    "is_signed",
    "element_size",
    "is_inference",
    "is_conj",
    "is_neg",
)
def rule_kind(func: Any, input: SplitTensor) -> Any:
    return func(input.seen())


@rule("numel")
def rule_numel(func: Any, input: SplitTensor) -> int:
    return input.shape.numel()


@rule("is_same_size")
def rule_is_same_size(func: Any, input: torch.Tensor, other: torch.Tensor) -> bool:
    return input.shape == other.shape


@rule("result_type")
def rule_result_type(func: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = swap((args, kwargs), SplitTensor, _dims_and_kind)
    return func(*args, **kwargs)


def _dims_and_kind(value: SplitTensor) -> torch.Tensor:
    return torch.empty([0] * value.ndim, dtype=value.dtype, device="meta") if value.ndim else value.seen().to("meta")


@rule("stride", "storage_offset", "data_ptr")
def rule_memory(func: Any, input: SplitTensor, dim: int | None = None) -> Any:
    if func.__name__ == "storage_offset" and not input.is_partial:
        return 0  # of the whole, which has memory of its own
    if func.__name__ != "stride":
        return func(input.seen())
    strides, step = [0] * input.ndim, 1
    for d in _order(input):
        strides[d], step = step, step * max(1, input.shape[d])
    return tuple(strides) if dim is None else strides[dim]


def _order(input: SplitTensor) -> list[int]:
    """The dims from the nearest in memory to the farthest: the whole is said to lie as what is here."""
    return sorted(range(input.ndim), key=lambda d: (input.local.stride(d), -d))


@rule("as_strided", "as_strided_copy", "as_strided_scatter")
def rule_as_strided(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Of the whole, in memory as `stride()` has told: a gathered value lies row by row, whatever the block does."""
    args, kwargs = swap((args, kwargs), SplitTensor, whole)
    if not isinstance(input, SplitTensor):
        return func(input, *args, **kwargs)
    far_first = _order(input)[::-1]
    back = [far_first.index(d) for d in range(input.ndim)]

    def read(total: torch.Tensor) -> Any:
        return func(total.permute(far_first).contiguous().permute(back), *args, **kwargs)

    def seen_through(total: torch.Tensor) -> Any:
        if not total.permute(far_first).is_contiguous():
            raise SplitError(
                f"as_strided of {input!r} is a copy, as that is transposed, and cannot follow a change in place: call .contiguous() "
                "before as_strided, or make the change out of place"
            )
        return read(total)

    out = read(whole(input, f"{func.__name__} reads it in memory"))
    return view_copy(input, out, seen_through) if func.__name__ == "as_strided" else out


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


def rule_data(func: Any, input: SplitTensor) -> Any:
    """The same memory without the graph; what is done to it in place is done to the value."""
    if input.is_partial:
        raise SplitError(f"{input!r}.data would be the sum, and a change of it would not be seen: use .detach()")
    return like(input, input.local.data)


def rule_grad(func: Any, input: SplitTensor) -> Any:
    found = input.seen().grad
    if found is None or input.is_partial:
        return found
    return like(input, found)


def rule_set_data(func: Any, input: Any, value: Any) -> None:
    """`p.data = p.data * 0.9 + q.data * 0.1`, as encoders that follow others by momentum have it in their forward."""
    if not isinstance(input, SplitTensor):
        return func(input, whole(value))  # type: ignore[no-any-return]
    if input.is_partial or value.shape != input.shape:
        return NotImplemented  # refused
    with torch.no_grad():
        block = block_of(value, input.from_end, input.cut, input.ranks, "it becomes the data of a value that is cut")
        input.local.data = block.detach().clone()
    return None


RULES[_getter("data")] = rule_data
RULES[getattr(torch.Tensor, "data").__set__] = rule_set_data  # noqa: B009  not typed
RULES[_getter("grad")] = rule_grad


@rule("retain_grad")
def rule_retain_grad(func: Any, input: SplitTensor) -> None:
    input.seen().retain_grad()


@rule("register_hook")
def rule_register_hook(func: Any, input: SplitTensor, hook: Any) -> Any:
    """The hook sees the gradient as a split value; every rank's backward calls it."""
    if input.is_partial:  # the gradient of an addend is that of the sum
        return input.seen().register_hook(hook)

    def on_block(gradient: torch.Tensor) -> Any:
        found = hook(shard(gradient, input.place, input.cut, input.ranks))
        if not isinstance(found, SplitTensor) or (found.place, found.cut) != (input.place, input.cut):
            found = whole(found)
            return None if found is None else take(found, input.place, input.cut, input.ranks)
        return found.local

    return input.local.register_hook(on_block)


@rule("grad", spaces=(torch.autograd,))
def rule_autograd_grad(func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Gradients of split inputs are split as they are; everything else is whole."""
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if any(isinstance(value, SplitTensor) and value.is_partial for value in given):
        raise SplitError("torch.autograd.grad with respect to a partial sum: ask for what it is computed from")
    outputs, args, kwargs = swap((outputs, args, kwargs), SplitTensor, whole)
    found = func(
        outputs, [value.local if isinstance(value, SplitTensor) else value for value in given], *args, **kwargs
    )
    return tuple(
        like(value, gradient) if isinstance(value, SplitTensor) and gradient is not None else gradient
        for value, gradient in zip(given, found, strict=True)
    )
