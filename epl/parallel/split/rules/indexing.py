"""Indices: local along other dims; along the cut dim each rank gives what it holds, a partial sum of which one addend is not 0."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from epl.graph.spec import leaves_of, swap
from epl.parallel.split.rules.common import is_cut, like, owned, readable
from epl.parallel.split.rules.registry import rule
from epl.parallel.split.rules.shapes import linear, pieces
from epl.parallel.split.value import SplitTensor, block_of, enter, gather_all, partial, shard, view_of, whole

FULL = slice(None)


def masked(value: SplitTensor, got: torch.Tensor, mine: torch.Tensor) -> Any:
    """What one rank holds and the others do not: `got` where it is `mine`. Not a product: infinity times 0 is no number."""
    if got.dtype == torch.bool:
        return whole(partial((got & mine).to(torch.uint8), value.ranks)).bool()
    return partial(got.masked_fill(~mine, 0), value.ranks)


# ---- x[...] --------------------------------------------------------------------------------------------------------------


class Index(NamedTuple):
    """An index into a value of so many dims, spelled out."""

    items: list[Any]
    """One per dim, and None for each new dim; a mask of several dims stands for all of them."""
    at: int
    """Which item is the cut dim's; -1 if it is inside such a mask."""
    place: int
    """Where the cut dim is in the result, if its item is a slice."""
    spread: int
    """Where the dims of index tensors begin in the result."""
    shape: tuple[int, ...]
    """The common shape of the index tensors, if they are of integers."""


def spelled(index: Any, value: torch.Tensor, place: int) -> Index | None:
    """The index spelled out, as torch reads it; None for what is too rare to follow."""
    given = list(index) if isinstance(index, tuple) else [index]
    given = [torch.as_tensor(item) if isinstance(item, (list, range)) and item else item for item in given]
    if any(
        isinstance(item, bool) or not isinstance(item, (int, slice, torch.Tensor, type(None), type(...)))
        for item in given
    ):
        return None
    given = [
        int(i) if isinstance(i, torch.Tensor) and i.ndim == 0 and not i.is_floating_point() and _is_known(i) else i
        for i in given
    ]
    used = sum(_dims(item) for item in given if item is not None and item is not ...)
    missing = [FULL] * (value.ndim - used)
    dots = [n for n, item in enumerate(given) if item is ...]
    if len(dots) > 1 or used > value.ndim:
        return None
    if dots:
        given[dots[0] : dots[0] + 1] = missing
    else:
        given += missing
    dim, at = 0, -1
    kinds: list[str] = []  # of the dims after integers are gone: a slice, the cut dim's slice, an index tensor
    for n, item in enumerate(given):
        here = item is not None and dim <= place < dim + _dims(item)
        if here and _dims(item) == 1:
            at = n
        if isinstance(item, torch.Tensor):
            kinds.append("tensor")
        elif not isinstance(item, int) or item is None:
            kinds.append("cut" if here else "slice")
        dim += 0 if item is None else _dims(item)
    tensors = [n for n, kind in enumerate(kinds) if kind == "tensor"]
    found = [item for item in given if isinstance(item, torch.Tensor)]
    shape: tuple[int, ...] = (0,)
    if all(item.dtype != torch.bool for item in found):
        shape = tuple(torch.broadcast_shapes(*(item.shape for item in found)))
    elif any(item.dtype != torch.bool and item.ndim > 1 for item in found):
        return None
    adjacent = bool(tensors) and tensors[-1] - tensors[0] == len(tensors) - 1
    spread = tensors[0] if adjacent else 0
    order = [kind for kind in kinds if kind != "tensor"]
    if tensors:
        order[spread:spread] = ["tensor"] * len(shape)
    return Index(given, at, order.index("cut") if "cut" in order else -1, spread, shape)


def _is_known(item: torch.Tensor) -> bool:
    """Whether its value may be read: not of a fake tensor."""
    return type(item) is torch.Tensor and item.device.type == "cpu" and item.dtype != torch.bool


def _dims(item: Any) -> int:
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1


@rule("__getitem__")
def rule_getitem(func: Any, input: Any, index: Any) -> Any:
    if leaves_of(index, SplitTensor):
        if not isinstance(input, SplitTensor) and is_cut(index) and index.dtype != torch.bool:
            local = func(
                enter(input, index.ranks), index.local
            )  # rows of a whole table, for ids of which some are here
            return shard(local, index.place, index.cut, index.ranks)
        return func(input, swap(index, SplitTensor, lambda value: whole(value, "indices are needed whole")))
    if input.is_partial:
        return _sum_getitem(func, input, index)
    found = spelled(index, input, input.place)
    if found is None or found.at < 0:
        return NotImplemented
    item = found.items[found.at]
    if isinstance(item, slice):
        if item == FULL:
            return shard(func(input.local, index), found.place, input.cut, input.ranks)
        return _sliced(func, input, found)
    return picked(func, input, found)


@linear()
def _sum_getitem(func: Any, input: SplitTensor, index: Any) -> Any:
    raise AssertionError("a partial value")


def _sliced(func: Any, value: SplitTensor, index: Index) -> Any:
    """A slice of the cut dim: local where it is one of its sections."""
    item = index.items[index.at]
    start, stop, step = item.indices(value.cut.size)
    if step != 1 or stop <= start:
        return NotImplemented
    if (start, stop) != (0, value.cut.size):
        found = pieces(value, [n for n in (start, stop - start, value.cut.size - stop) if n])
        if found is None:
            return NotImplemented
        value = found[1 if start else 0]
    items = [FULL if n == index.at else kept for n, kept in enumerate(index.items)]
    return func(value, tuple(items))


def picked(func: Any, value: SplitTensor, index: Index) -> Any:
    """x[rows, classes] and the like, for classes spread over ranks: each rank gives what it has."""
    item, ranks = index.items[index.at], value.ranks
    shape = index.shape
    if isinstance(item, int):
        ids = torch.tensor(item, device=value.device)
    elif item.dtype == torch.bool:
        ids = item.nonzero().squeeze(1)
        if any(isinstance(other, torch.Tensor) and n != index.at for n, other in enumerate(index.items)):
            return NotImplemented
        shape = tuple(ids.shape)
    elif any(isinstance(other, torch.Tensor) and other.dtype == torch.bool for other in index.items):
        return NotImplemented
    else:
        ids = item
    ids = torch.where(ids < 0, ids + value.cut.size, ids)
    _check_bounds(ids, value.cut.size, ranks.plan)
    mine, at = owned(ids, value.cut, ranks)
    local = readable(value.local, value.place)
    items = list(index.items)
    items[index.at] = int(at) if isinstance(item, int) and not ranks.plan else 0 if isinstance(item, int) else at
    got = func(local, tuple(items))
    if not isinstance(item, int):
        mine = mine.expand(shape).reshape(*shape, *[1] * (got.ndim - index.spread - len(shape)))
    if got.dtype == torch.bool or any(isinstance(other, torch.Tensor) for other in items):
        return masked(value, got, mine)
    return view_of(value, got.masked_fill(~mine, 0), lambda base: func(base, tuple(index.items)))


def _check_bounds(ids: torch.Tensor, size: int, plan: bool) -> None:
    """What torch checks on one device, where looking costs nothing."""
    if not plan and ids.device.type == "cpu" and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise IndexError(f"index {int(ids.max())} (or {int(ids.min())}) is out of bounds for a dim of size {size}")


@rule("__setitem__")
def rule_setitem(func: Any, input: Any, index: Any, value: Any) -> Any:
    index = swap(index, SplitTensor, lambda item: whole(item, "indices are needed whole"))
    if not is_cut(input):
        if isinstance(input, SplitTensor):
            return gather_all(func, (input, index, value), {})
        return func(input, index, whole(value, "assigned to a whole value"))
    found = spelled(index, input, input.place)
    if found is None or found.at < 0:
        return NotImplemented
    item = found.items[found.at]
    if isinstance(item, slice) and item == FULL:
        if isinstance(value, torch.Tensor):
            total = len([kept for kept in found.items if not isinstance(kept, (int, torch.Tensor))])
            if any(isinstance(kept, torch.Tensor) for kept in found.items):
                total += len(found.shape)
            value = block_of(value, found.place - total, input.cut, input.ranks, "assigned to a value cut differently")
        func(input.local, index, value)
        return None
    if input.ndim == 2 and input.place == 1 and all(_is_ids(kept) for kept in found.items):
        mine, at = owned(
            torch.where(found.items[1] < 0, found.items[1] + input.cut.size, found.items[1]), input.cut, input.ranks
        )
        value = whole(value)
        if isinstance(value, torch.Tensor) and value.ndim:
            value = enter(value, input.ranks).expand(found.shape)[mine.expand(found.shape)]
        elif isinstance(value, torch.Tensor):
            value = enter(value, input.ranks)
        mine = mine.expand(found.shape)
        func(input.local, (found.items[0].expand(found.shape)[mine], at.expand(found.shape)[mine]), value)
        return None
    return NotImplemented


def _is_ids(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype != torch.bool


# ---- functions -------------------------------------------------------------------------------------------------------------


@rule("select")
@linear()
def rule_select(func: Any, input: SplitTensor, dim: int, index: int) -> Any:
    dim %= input.ndim
    return input[(*[FULL] * dim, index)]  # type: ignore[index]


@rule("narrow")
@linear()
def rule_narrow(func: Any, input: SplitTensor, dim: int, start: int, length: int) -> Any:
    dim %= input.ndim
    if dim != input.place:
        return like(input, input.local.narrow(dim, start, length))
    start = start + input.cut.size if start < 0 else start
    return input[(*[FULL] * dim, slice(start, start + length))]


@rule("index_select")
def rule_index_select(func: Any, input: Any, dim: int, index: Any) -> Any:
    if not isinstance(input, SplitTensor):
        dim %= input.ndim
        if is_cut(index) and index.ndim == 1:
            return shard(func(enter(input, index.ranks), dim, index.local), dim, index.cut, index.ranks)
        return NotImplemented
    index = whole(index)
    if input.is_partial:
        return _sum_index_select(func, input, dim, index)
    dim %= input.ndim
    if dim != input.place:
        return like(input, func(input.local, dim, index))
    return input[(*[FULL] * dim, index.reshape(-1))]


@linear(copies=True)
def _sum_index_select(func: Any, input: SplitTensor, dim: int, index: Any) -> Any:
    raise AssertionError("a partial value")


@rule("gather")
def rule_gather(func: Any, input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    dim %= input.ndim
    if isinstance(input, SplitTensor) and input.is_partial:
        return func(whole(input), dim, index)
    if isinstance(index, SplitTensor) and index.is_partial:
        return func(input, dim, whole(index))
    lead = input if isinstance(input, SplitTensor) else index
    place, cut, ranks = lead.place, lead.cut, lead.ranks
    if lead is input and dim == place:
        ids = whole(index, "indices are needed whole")
        _check_bounds(ids, cut.size, ranks.plan)
        mine, at = owned(ids, cut, ranks)
        return masked(input, readable(input.local, place).gather(dim, at), mine)
    if lead is index and dim == place:
        return shard(enter(input, ranks).gather(dim, index.local), place, cut, ranks)
    if index.shape[place] != input.shape[place]:
        return NotImplemented
    first, second = (
        block_of(value, lead.from_end, cut, ranks, "gathered by indices cut differently") for value in (input, index)
    )
    return shard(first.gather(dim, second), place, cut, ranks)


@rule("scatter", "scatter_", "scatter_add", "scatter_add_")
def rule_scatter(
    func: Any, input: Any, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: Any = None
) -> Any:
    src = value if src is None else src
    if not is_cut(input) or reduce is not None:
        return NotImplemented
    dim %= input.ndim
    place, cut, ranks = input.place, input.cut, input.ranks
    if dim == place:
        index, src = whole(index), whole(src)
        _check_bounds(index, cut.size, ranks.plan)
        mine, at = owned(index, cut, ranks)
        length = input.local.shape[dim]
        shape = list(input.local.shape)
        shape[dim] = 1
        room = torch.cat([input.local, input.local.new_zeros(shape)], dim)  # what is not ours goes into the last place
        if isinstance(src, torch.Tensor):
            src = enter(src, ranks)
        plain = torch.Tensor.scatter_add if "add" in func.__name__ else torch.Tensor.scatter
        local = plain(room, dim, torch.where(mine, at, torch.full_like(at, length)), src).narrow(dim, 0, length)
    else:
        if index.shape[place] != input.shape[place] or (
            isinstance(src, torch.Tensor) and src.shape[place] != input.shape[place]
        ):
            return NotImplemented
        blocks = [
            block_of(item, input.from_end, cut, ranks, "scattered from values cut differently")
            if isinstance(item, torch.Tensor)
            else item
            for item in (index, src)
        ]
        plain = torch.Tensor.scatter_add if "add" in func.__name__ else torch.Tensor.scatter
        local = plain(input.local, dim, *blocks)
    if func.__name__.endswith("_"):
        input.local.copy_(local)
        return input
    return like(input, local)


@rule("index_add", "index_add_", "index_copy", "index_copy_")
def rule_index_add(func: Any, input: Any, dim: int, index: Any, source: Any, *, alpha: Any = None) -> Any:
    if not is_cut(input) or dim % input.ndim == input.place or source.ndim != input.ndim:
        return NotImplemented
    block = block_of(source, input.from_end, input.cut, input.ranks, "added to a value cut differently")
    more = {} if alpha is None else {"alpha": alpha}
    local = func(input.local, dim, whole(index), block, **more)
    return input if func.__name__.endswith("_") else like(input, local)


@rule("index_fill", "index_fill_")
def rule_index_fill(func: Any, input: Any, dim: int, index: Any, value: Any) -> Any:
    if not is_cut(input) or dim % input.ndim == input.place:
        return NotImplemented
    number = enter(whole(value), input.ranks)
    local = func(input.local, dim, whole(index), number)
    return input if func.__name__.endswith("_") else like(input, local)


@rule("one_hot")
def rule_one_hot(func: Any, tensor: Any, num_classes: int = -1) -> Any:
    if not is_cut(tensor) or num_classes < 0:
        return NotImplemented
    return like(tensor, func(tensor.local, num_classes))
