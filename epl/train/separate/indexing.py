"""Rules of indexing along the rows: slices, index tensors and boolean masks that every rank has."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from epl.train.separate import operations
from epl.train.separate.analysis import Analysis
from epl.train.separate.program import Entry, Given
from epl.train.separate.rules import rule
from epl.train.separate.state import Cut, Order, Per, Piece, Rows


def slice_rows(a: Analysis, entry: Entry, x: Any, index: Any) -> Piece | None:
    """x[i:j], rows first: each micro batch gives what it has of i..j."""
    s = a.state(x)
    first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    if not isinstance(s, Rows) or s.dim != 0 or s.order is not None:
        return None
    if not isinstance(first, slice) or first.step not in (None, 1) or rest:
        return None
    start, stop, _ = first.indices(s.total)
    part, spans, at = [], [], 0
    for n in s.part:
        low, high = min(max(start - at, 0), n), min(max(stop - at, 0), n)
        part.append(max(high - low, 0))
        spans.append(slice(low, max(high, low)))
        at += n
    return Piece(Rows(0, tuple(part)), torch.Tensor.__getitem__, (x, Per(tuple(spans))), {})


def by_tensors(a: Analysis, entry: Entry, x: Any, index: Any) -> Piece | None:
    """x[i] or x[i, j, …] with given 1-d index tensors, rows first: micro batch m gives the results whose row it has."""
    s = a.state(x)
    if not isinstance(s, Rows) or s.dim != 0 or s.order is not None:
        return None
    index = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(t, Given) and len(a.shape(t)) == 1 and a.spec(t).dtype is torch.int64 for t in index):
        return None
    if len({a.shape(t) for t in index}) != 1:
        return None
    tensors = [a.read(t) for t in index]
    if len(tensors[0]) and not bool(((tensors[0] >= -s.total) & (tensors[0] < s.total)).all()):
        return None  # the whole batch will say so
    rows, key = tensors[0] % s.total, ("index", index[0], s.part)
    if key not in a.orders:
        ends = torch.tensor(s.part, device=rows.device).cumsum(0)
        owner = torch.bucketize(rows, ends, right=True)
        a.orders[key] = Order([torch.nonzero(owner == m).squeeze(1) for m in range(len(s.part))])
    order = a.orders[key]
    starts = [sum(s.part[:m]) for m in range(len(s.part))]
    local = tuple((rows[j] - start, *[t[j] for t in tensors[1:]]) for start, j in zip(starts, order.lists, strict=True))
    return Piece(Rows(0, tuple(map(len, order.lists)), order), torch.Tensor.__getitem__, (x, Per(local)), {})


@rule("rows_where", operations)
def where_rows(a: Analysis, entry: Entry, x: Any, mask: Any) -> Piece | None:
    s = a.state(x)
    if not isinstance(s, Rows) or s.dim != 0 or s.order is not None or not isinstance(mask, Given):
        return None
    key = ("mask", mask, s.part)
    if key not in a.orders:  # by identity, as for index tensors: equal counts by chance must not decide anything
        counts = [int(t.sum()) for t in torch.split_with_sizes(a.read(mask), list(s.part))]
        ends = [sum(counts[:m]) for m in range(len(counts) + 1)]
        a.orders[key] = Order([torch.arange(low, high) for low, high in pairwise(ends)])
    order = a.orders[key]
    return Piece(Rows(0, tuple(map(len, order.lists)), order), operations.rows_where, (x, Cut(mask, s)), {})
