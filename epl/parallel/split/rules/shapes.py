"""Shapes: where the cut goes when a value is seen in another shape. Local, also for partial sums."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from epl.graph.spec import swap
from epl.parallel.split.rules.common import is_cut, like, numbers
from epl.parallel.split.rules.registry import RULES, rule
from epl.parallel.split.value import (
    PARTIAL,
    SplitTensor,
    Wish,
    addend,
    block_of,
    partial,
    refine,
    shard,
    view_copy,
    view_of,
    whole,
)
from epl.plan.split.cut import Cut

Found = tuple[int, Cut] | list[Wish]


def linear(copies: bool = False) -> Callable[[Any], Any]:
    """For rules of functions that treat every addend as the sum: on a partial value they act on the addend.

    `copies`: the result is no view of the argument.
    """

    def of(function: Any) -> Any:
        @functools.wraps(function)
        def both(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(input, SplitTensor):
                return NotImplemented
            if input.place != PARTIAL:
                return function(func, input, *args, **kwargs)
            if input.total is not None or input.extra is not None:
                return _of_known(func, input, args, kwargs, copies)
            out = func(addend(input), *args, **kwargs)
            if copies:
                return swap(out, torch.Tensor, lambda local: partial(local, input.ranks))
            if isinstance(out, torch.Tensor):
                return view_of(input, out, lambda base: func(base, *args, **kwargs))
            return type(out)(
                view_of(input, local, lambda base, n=n: func(base, *args, **kwargs)[n])  # type: ignore[misc]
                for n, local in enumerate(out)  # type: ignore[misc]
            )

        return both

    return of


def _of_known(func: Any, input: SplitTensor, args: Any, kwargs: Any, copies: bool) -> Any:
    out = func(whole(input), *args, **kwargs)
    if copies or "source" not in input.__dict__:
        return out
    if isinstance(out, torch.Tensor):
        return view_copy(input, out, lambda base: func(base, *args, **kwargs))
    return tuple(view_copy(input, part, lambda base, n=n: func(base, *args, **kwargs)[n]) for n, part in enumerate(out))  # type: ignore[misc]


def _getter(name: str) -> Any:
    """What an attribute of a tensor dispatches as."""
    return getattr(torch.Tensor, name).__get__


# ---- one shape as another --------------------------------------------------------------------------------------------


def reshape_cut(shape: Sequence[int], place: int, cut: Cut, new: Sequence[int]) -> Found:
    """Where the cut goes when `shape` is viewed as `new`: (place, cut), or wishes that would make it possible."""
    old_dims, new_dims = _group(shape, place, new)
    if not old_dims:
        return []
    outer = math.prod(shape[d] for d in old_dims if d < place)
    after = math.prod(shape[d] for d in old_dims if d > place)
    sections = tuple(inner * after for inner in cut.inners) * outer
    wishes: list[Wish] = []
    for n, dim in enumerate(new_dims):
        before = math.prod(new[d] for d in new_dims[:n])
        rest = math.prod(new[d] for d in new_dims[n + 1 :])
        if new[dim] == 1 and any(new[d] != 1 for d in new_dims):
            continue
        if len(sections) % before == 0 and sections == sections[: len(sections) // before] * before:
            period = sections[: len(sections) // before]
            if all(section % rest == 0 for section in period):
                return dim, Cut(cut.axis, tuple(section // rest for section in period))
            how = math.lcm(*(rest // math.gcd(section, rest) for section in period))
            wishes.append(("coarsen", cut.axis.name, how))
        elif len(sections) == 1:
            wishes.append(("section", cut.axis.name, (1,) * before))
    return wishes


def _group(shape: Sequence[int], place: int, new: Sequence[int]) -> tuple[list[int], list[int]]:
    """The smallest groups of old and new dims of the same product, of which the old one holds `place`."""
    if math.prod(shape) != math.prod(new) or 0 in shape:
        return [], []
    i = j = 0
    while i < len(shape):
        old, fresh = [i], [j] if j < len(new) else []
        size, other = shape[i], new[j] if j < len(new) else 1
        i, j = i + 1, j + 1
        while size != other:
            if size < other:
                size *= shape[i]
                old.append(i)
                i += 1
            else:
                other *= new[j]
                fresh.append(j)
                j += 1
        if place in old:
            return old, fresh
    return [], []


@functools.lru_cache(4096)
def _placed(
    shape: torch.Size, place: int, cut: Cut, new: tuple[int, ...], rank: int
) -> tuple[tuple[int, ...], int, Cut] | list[Wish]:
    """Local shape, place and cut of a view to the global shape `new`."""
    if -1 in new:
        known = -math.prod(new)
        new = tuple(shape.numel() // known if known and n == -1 else n for n in new)
    found = reshape_cut(shape, place, cut, new)
    if isinstance(found, list):
        return found
    place, cut = found
    return (*new[:place], cut.length(rank), *new[place + 1 :]), place, cut


def reshaped(func: Any, value: SplitTensor, new: tuple[int, ...]) -> Any:
    """The value in another global shape; NotImplemented where no cut of that shape is this one."""
    found = _placed(value.shape, value.place, value.cut, new, value.ranks.rank)
    if isinstance(found, list):
        refine(value.ranks, *found)
        return NotImplemented
    shape, place, cut = found
    try:
        local = func(value.local, shape)
    except RuntimeError:  # a block may lie in memory otherwise than the whole would
        local = value.local.reshape(shape)
    return shard(local, place, cut, value.ranks)


@rule("view", "reshape")
@linear()
def rule_view(func: Any, input: SplitTensor, *shape: Any, **kwargs: Any) -> Any:
    if kwargs:
        shape = tuple(kwargs.values())
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        return like(input, input.local.view(shape[0])) if shape[0].itemsize == input.dtype.itemsize else NotImplemented
    return reshaped(func, input, numbers(shape))


@rule("view_as", "reshape_as")
def rule_view_as(func: Any, input: Any, other: Any) -> Any:
    return input.reshape(other.shape)


@rule("flatten", "ravel")
@linear()
def rule_flatten(func: Any, input: SplitTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % input.ndim, end_dim % input.ndim
    return input.reshape(*input.shape[:start], math.prod(input.shape[start : end + 1]), *input.shape[end + 1 :])


@rule("unflatten")
@linear()
def rule_unflatten(func: Any, input: SplitTensor, dim: int, sizes: Sequence[int]) -> Any:
    dim %= input.ndim
    sizes = tuple(sizes)
    if -1 in sizes:
        sizes = tuple(input.shape[dim] // -math.prod(sizes) if n == -1 else n for n in sizes)
    return input.view(*input.shape[:dim], *sizes, *input.shape[dim + 1 :])


# ---- complex numbers as pairs (rotary positions, as Meta's Llama has them) ----------------------------------------------


@rule("view_as_complex")
@linear()
def rule_view_as_complex(func: Any, input: SplitTensor) -> Any:
    if input.place == input.ndim - 1:
        return NotImplemented  # a number in two pieces
    try:
        local = func(input.local)
    except RuntimeError:  # a block may lie in memory otherwise than the whole would
        local = func(input.local.contiguous())
    return shard(local, input.place, input.cut, input.ranks)


@linear()
def rule_same_places(func: Any, input: SplitTensor) -> Any:
    return shard(func(input.local), input.place, input.cut, input.ranks)


RULES[torch.view_as_real] = RULES[_getter("real")] = RULES[_getter("imag")] = rule_same_places


# ---- dims in another order, more or fewer of them ----------------------------------------------------------------------


@rule("transpose", "swapaxes", "swapdims")
@linear()
def rule_transpose(func: Any, input: SplitTensor, dim0: int, dim1: int) -> Any:
    order = list(range(input.ndim))
    dim0, dim1 = dim0 % input.ndim, dim1 % input.ndim
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return shard(input.local.transpose(dim0, dim1), order.index(input.place), input.cut, input.ranks)


@rule("t")
@linear()
def rule_t(func: Any, input: SplitTensor) -> Any:
    return input if input.ndim < 2 else input.transpose(0, 1)


@linear()
def rule_reversed(func: Any, input: SplitTensor) -> Any:
    return input.permute(*reversed(range(input.ndim)))


@linear()
def rule_matrix_transposed(func: Any, input: SplitTensor) -> Any:
    return input.transpose(-2, -1)


@linear()
def rule_adjoint(func: Any, input: SplitTensor) -> Any:
    turned = input.transpose(-2, -1)
    return turned.conj() if input.is_complex() else turned


RULES[_getter("T")] = rule_reversed
RULES[_getter("mT")] = rule_matrix_transposed
RULES[_getter("H")] = RULES[_getter("mH")] = rule("adjoint")(rule_adjoint)


@rule("permute")
@linear()
def rule_permute(func: Any, input: SplitTensor, *dims: Any, **kwargs: Any) -> Any:
    order = [d % input.ndim for d in numbers(dims or (kwargs["dims"],))]
    return shard(input.local.permute(order), order.index(input.place), input.cut, input.ranks)


@rule("movedim", "moveaxis")
@linear()
def rule_movedim(func: Any, input: SplitTensor, source: Any, destination: Any) -> Any:
    order = (
        torch.empty([1 + d for d in range(input.ndim)], device="meta").movedim(source, destination).shape
    )  # torch says how
    return input.permute([n - 1 for n in order])


@rule("unsqueeze")
@linear()
def rule_unsqueeze(func: Any, input: SplitTensor, dim: int) -> Any:
    dim %= input.ndim + 1
    return shard(input.local.unsqueeze(dim), input.place + (dim <= input.place), input.cut, input.ranks)


@rule("squeeze")
@linear()
def rule_squeeze(func: Any, input: SplitTensor, *dims: Any, **kwargs: Any) -> Any:
    dims = dims or tuple(kwargs.values())
    given = range(input.ndim) if not dims else [d % input.ndim for d in numbers(dims)]
    gone = sorted(d for d in given if input.shape[d] == 1)
    if input.place in gone:
        return NotImplemented
    local = input.local.squeeze(tuple(gone)) if gone else input.local
    return shard(local, input.place - sum(d < input.place for d in gone), input.cut, input.ranks)


@rule("expand", "broadcast_to")
@linear()
def rule_expand(func: Any, input: SplitTensor, *size: Any, **kwargs: Any) -> Any:
    kwargs.pop("implicit", None)
    sizes = list(numbers(size or tuple(kwargs.values())))
    place = input.place + len(sizes) - input.ndim
    if sizes[place] not in (-1, input.cut.size):
        return NotImplemented
    sizes[place] = input.local.shape[input.place]
    return shard(input.local.expand(sizes), place, input.cut, input.ranks)


@rule("expand_as")
def rule_expand_as(func: Any, input: Any, other: Any) -> Any:
    return input.expand(other.shape)


# ---- pieces and repetitions --------------------------------------------------------------------------------------------


@rule("repeat_interleave")
@linear(copies=True)
def rule_repeat_interleave(func: Any, input: SplitTensor, repeats: Any, dim: Any = None, **kwargs: Any) -> Any:
    if dim is None or not isinstance(repeats, int):
        return NotImplemented
    dim %= input.ndim
    cut = Cut(input.cut.axis, tuple(n * repeats for n in input.cut.inners)) if dim == input.place else input.cut
    return shard(input.local.repeat_interleave(repeats, dim), input.place, cut, input.ranks)


@rule("repeat")
@linear(copies=True)
def rule_repeat(func: Any, input: SplitTensor, *repeats: Any, **kwargs: Any) -> Any:
    times = numbers(repeats or tuple(kwargs.values()))
    place = input.place + len(times) - input.ndim
    cut = Cut(input.cut.axis, input.cut.inners * times[place])
    return shard(input.local.repeat(times), place, cut, input.ranks)


@rule("tile")
@linear(copies=True)
def rule_tile(func: Any, input: SplitTensor, *dims: Any, **kwargs: Any) -> Any:
    times = numbers(dims or tuple(kwargs.values()))
    return input.repeat(*[1] * (input.ndim - len(times)), *times)


def _piece_sizes(name: str, size: int, how: Any) -> list[int]:
    """The sizes that torch's function of this name cuts a dim into."""
    if name == "tensor_split":
        if isinstance(how, int):
            return [size // how + (n < size % how) for n in range(how)]
        ends = [slice(0, end).indices(size)[1] for end in how]
        return [max(0, stop - start) for start, stop in itertools.pairwise((0, *ends, size))]
    if isinstance(how, int):
        step = how if "split" in name else -(-size // how)
        return [min(step, size - start) for start in range(0, size, step)]
    return list(how)


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
@linear()
def rule_split(func: Any, input: SplitTensor, how: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    if kwargs:
        how = next(iter(kwargs.values()))
    dim %= input.ndim
    if isinstance(how, torch.Tensor):
        return NotImplemented
    if dim != input.place:
        return tuple(like(input, local) for local in func(input.local, how, dim))
    sizes = _piece_sizes(func.__name__, input.shape[dim], how)
    found = pieces(input, sizes)
    return NotImplemented if found is None else found


def pieces(value: SplitTensor, sizes: Sequence[int]) -> tuple[SplitTensor, ...] | None:
    """Pieces of these sizes along the cut dim, where the borders are borders of its sections; otherwise wishes."""
    cut, size = value.cut, value.cut.size
    bounds = [0, *itertools.accumulate(inner * cut.axis.granules for inner in cut.inners)]
    ends = [0, *itertools.accumulate(sizes)]
    if ends[-1] != size or 0 in sizes:
        return None
    if any(end not in bounds for end in ends):
        unit = math.gcd(*sizes)
        wishes: list[Wish] = []
        if len(cut.inners) == 1:
            wishes.append(("section", cut.axis.name, tuple(n // unit for n in sizes)))
            if len(set(sizes)) > 1:
                wishes.append(("section", cut.axis.name, (1,) * (size // unit)))
        else:  # one more border in a dim that has sections already: a fused q | k | v sliced piece by piece
            borders = sorted({*bounds, *ends})
            lengths = tuple(stop - start for start, stop in itertools.pairwise(borders))
            wishes.append(("resize", cut.axis.name, (cut.inners, lengths)))
        refine(value.ranks, *wishes)
        return None
    groups = [cut.inners[bounds.index(start) : bounds.index(stop)] for start, stop in itertools.pairwise(ends)]
    here = cut.axis.counts[value.ranks.rank]
    lengths = [here * sum(group) for group in groups]  # type: ignore[assignment]
    return tuple(  # not by split: its results may not be changed in place
        shard(value.local.narrow(value.place, start, length), value.place, Cut(cut.axis, group), value.ranks)
        for start, length, group in zip(itertools.accumulate((0, *lengths)), lengths, groups, strict=False)
    )


@rule("unbind")
@linear()
def rule_unbind(func: Any, input: SplitTensor, dim: int = 0) -> Any:
    dim %= input.ndim
    if dim == input.place:
        return NotImplemented
    place = input.place - (dim < input.place)
    return tuple(shard(local, place, input.cut, input.ranks) for local in input.local.unbind(dim))


@rule("__iter__")
def rule_iter(func: Any, input: SplitTensor) -> Any:
    return iter(input.unbind(0))


# ---- several into one ---------------------------------------------------------------------------------------------------


@rule("cat", "concat", "concatenate", "stack", spaces=(torch,))
def rule_cat(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    sums = [value for value in tensors if isinstance(value, SplitTensor) and value.is_partial]
    if sums and len(sums) == len(tensors) and all(value.total is None and value.extra is None for value in sums):
        return partial(func([addend(value) for value in sums], dim), sums[0].ranks)
    if sums:
        return func([value if is_cut(value) else whole(value) for value in tensors], dim)
    stacked = func is torch.stack
    lead = max((value for value in tensors if isinstance(value, SplitTensor)), key=lambda value: value.ndim)
    if not stacked:
        tensors = [value for value in tensors if value.shape != (0,) or lead.ndim == 1]  # torch's old empty tensor
    dim %= lead.ndim + stacked
    ranks = lead.ranks
    if dim != lead.place or stacked:
        blocks = [_beside(value, lead) for value in tensors]
        return shard(func(blocks, dim), lead.place + (stacked and dim <= lead.place), lead.cut, ranks)
    alike = [is_cut(value) and value.place == dim and value.cut.axis is lead.cut.axis for value in tensors]  # type: ignore[attr-defined]
    if not all(alike):
        return NotImplemented
    inners: tuple[int, ...] = sum((value.cut.inners for value in tensors), ())  # type: ignore[attr-defined]
    return shard(func([value.local for value in tensors], dim), dim, Cut(lead.cut.axis, inners), ranks)  # type: ignore[attr-defined]


def _beside(value: torch.Tensor, lead: SplitTensor) -> Any:
    return block_of(value, lead.from_end, lead.cut, lead.ranks, "values cut differently are put together")
