"""Rules of operations that only move elements: where has the batch dim gone?"""

from __future__ import annotations

import math
from typing import Any

import torch

from epl.graph.spec import leaves_of
from epl.train.separate import operations
from epl.train.separate.analysis import Analysis, check_rows
from epl.train.separate.indexing import by_tensors, slice_rows
from epl.train.separate.program import VALUES, Entry
from epl.train.separate.rules import rule
from epl.train.separate.state import SUM, Once, Per, Piece, Rows

_STRIDE = 1009  # a prime above any dim's multiplicity: strides of the probe tell its dims apart


@rule("pick", operations)
def pick(a: Analysis, entry: Entry, x: Any, index: int) -> Piece | None:
    return Piece(a.state(x), entry.op, entry.args, {})


@rule("view reshape flatten unflatten view_as reshape_as squeeze unsqueeze")
def reshape(a: Analysis, entry: Entry, x: Any, *args: Any, **kwargs: Any) -> Piece | None:
    """Always as `torch.reshape` to the known shape: squeeze() would drop the only row of a micro batch."""
    s, new = a.state(x), tuple(entry.first.shape)
    if s is SUM:
        return Piece(SUM, torch.reshape, (x, new), {})
    if not isinstance(s, Rows) or any(isinstance(t, torch.dtype) for t in args):
        return None
    before, after = math.prod(a.shape(x)[: s.dim]), math.prod(a.shape(x)[s.dim + 1 :])
    for e, size in enumerate(new):
        if math.prod(new[:e]) != before or (size == 1 and s.total != 1):
            continue
        part = _regrouped(s, size, math.prod(new[e + 1 :]), after)
        if part is None:
            return None
        shapes = tuple((*new[:e], n, *new[e + 1 :]) for n in part)
        return Piece(Rows(e, part, s.order), torch.reshape, (x, Per(shapes)), {})
    return None


def _regrouped(s: Rows, size: int, after: int, after_before: int) -> tuple[int, ...] | None:
    """Rows of each micro batch when the batch dim becomes one of `size` elements."""
    if s.total and size % s.total == 0:  # rows kept, or merged with the dims after them
        factor = size // s.total
        if factor * after != after_before or (factor > 1 and s.order is not None):
            return None
        return tuple(n * factor for n in s.part)
    if s.order is None and size and s.total % size == 0:  # split again
        group = s.total // size
        return tuple(n // group for n in s.part) if all(n % group == 0 for n in s.part) else None
    return None


@rule(
    "transpose permute t T mT H movedim moveaxis swapaxes swapdims select unbind split chunk tensor_split narrow __getitem__"
)
def relayout(a: Analysis, entry: Entry, x: Any, *args: Any, **kwargs: Any) -> Piece | None:
    """Ask a tensor whose strides tell its dims apart."""
    s = a.state(x)
    if leaves_of((args, kwargs), VALUES):
        return by_tensors(a, entry, x, *args) if entry.name == "__getitem__" else None
    if s is SUM:
        return Piece(SUM, entry.op, entry.args, entry.kwargs)
    if not isinstance(s, Rows):
        return None
    shape = a.shape(x)
    probe = torch.empty_strided(shape, [_STRIDE**i for i in range(len(shape), 0, -1)], device="meta")
    mark = _STRIDE ** (len(shape) - s.dim)
    dims = set()
    for o in leaves_of(entry.op(probe, *args, **kwargs), torch.Tensor):
        dims.add(next((d for d in range(o.dim()) if o.stride(d) == mark and o.shape[d] == s.total), None))
    (dim,) = dims if len(dims) == 1 else (None,)
    if dim is None:
        return slice_rows(a, entry, x, *args) if entry.name == "__getitem__" else None
    return Piece(s._replace(dim=dim), entry.op, entry.args, entry.kwargs)


@rule("expand expand_as broadcast_to")
def expand(a: Analysis, entry: Entry, x: Any, *args: Any, **kwargs: Any) -> Piece | None:
    s, new = a.state(x), tuple(entry.first.shape)
    if s is SUM:
        return Piece(SUM, torch.Tensor.expand, (x, new), {})
    if not isinstance(s, Rows):
        return None
    d = s.dim + len(new) - len(a.shape(x))
    shapes = tuple((*new[:d], n, *new[d + 1 :]) for n in s.part)
    return check_rows(entry, Piece(s._replace(dim=d), torch.Tensor.expand, (x, Per(shapes)), {}))


@rule("broadcast_tensors", torch)
def broadcast_tensors(a: Analysis, entry: Entry, *tensors: Any) -> Piece | None:
    lined = a.align(tensors)
    return lined and check_rows(entry, Piece(lined[1], entry.op, tuple(lined[0]), {}))


@rule("cat stack concat", torch)
def joined(a: Analysis, entry: Entry, tensors: Any, dim: int = 0, **kwargs: Any) -> Piece | None:
    states = [a.state(t) for t in tensors]
    if SUM in states:
        if any(isinstance(s, Rows) for s in states):
            return None
        once = [t if s is SUM else Once(t) for t, s in zip(tensors, states, strict=True)]
        return Piece(SUM, entry.op, (once, dim), kwargs)
    lined = a.align(tensors)
    if lined is None:
        return None
    values, rows = lined
    if len({len(a.shape(t)) for t in tensors}) > 1 or any(a.shape(t)[rows.dim] != rows.total for t in tensors):
        return None
    stack = entry.name == "stack"
    dim %= len(a.shape(tensors[0])) + stack
    if dim == rows.dim and not stack:
        return None
    return Piece(rows._replace(dim=rows.dim + (stack and dim <= rows.dim)), entry.op, (values, dim), kwargs)


@rule("copy_then", operations)
def write(a: Analysis, entry: Entry, func: Any, x: Any, index: Any, value: Any) -> Piece | None:
    """x[…] = number, not along the rows."""
    s = a.state(x)
    is_number = isinstance(value, (int, float))
    if func is not torch.Tensor.__setitem__ or not isinstance(s, Rows) or not is_number or leaves_of(index, VALUES):
        return None
    index = index if isinstance(index, tuple) else (index,)
    if any(i is Ellipsis or i is None for i in index) or s.dim >= len(index) or index[s.dim] != slice(None):
        return None
    return Piece(s, entry.op, entry.args, entry.kwargs)
