"""Rules of products and look-ups: the batch is a free index (rows), or contracted (a sum), or it is not known."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from epl.train.separate.analysis import Analysis, along_dims, check_rows
from epl.train.separate.program import Entry
from epl.train.separate.rules import rule
from epl.train.separate.state import CONST, SUM, Cut, Piece, Rows


@rule("linear", F)
def linear(a: Analysis, entry: Entry, x: Any, weight: Any, bias: Any = None) -> Piece | None:
    if a.state(weight) is not CONST or a.state(bias) is not CONST:
        return None
    return along_dims(a, entry, x, [len(a.shape(x)) - 1])


@rule("matmul mm bmm __matmul__ mv dot")
def matmul(a: Analysis, entry: Entry, x: Any, y: Any) -> Piece | None:
    s, r = a.state(x), a.state(y)
    nx, ny = len(a.shape(x)), len(a.shape(y))
    if SUM in (s, r):
        return Piece(SUM, entry.op, (x, y), {}) if CONST in (s, r) else None
    if isinstance(s, Rows) and s.dim < nx - 1 and r is CONST and (ny <= 2 or s.dim == nx - 2):
        moved = s._replace(dim=s.dim + ny - nx) if ny > 2 and nx < ny else s
        return check_rows(entry, Piece(moved, entry.op, (x, y), {}))
    batched = (isinstance(s, Rows) and s.dim < nx - 2) or (isinstance(r, Rows) and r.dim < ny - 2)
    if nx >= 3 and nx == ny and batched:
        lined = a.align([x, y])
        return lined and check_rows(entry, Piece(lined[1], entry.op, tuple(lined[0]), {}))
    if isinstance(s, Rows) and isinstance(r, Rows) and s.kind == r.kind:
        contracted = s.dim == nx - 1 and r.dim == max(ny - 2, 0)
        return Piece(SUM, entry.op, (x, y), {}) if contracted else None
    return None


@rule("einsum", torch)
def einsum(a: Analysis, entry: Entry, equation: Any, *operands: Any) -> Piece | None:
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    states = [a.state(t) for t in operands]
    rows = {(term[s.dim], s.kind) for term, s in zip(terms, states, strict=True) if isinstance(s, Rows)}
    if len(rows) != 1 or SUM in states or any(len(set(term)) != len(term) for term in terms):
        return None
    letter, kind = rows.pop()
    args = []
    for term, s, x in zip(terms, states, operands, strict=True):
        if letter in term and a.shape(x)[term.index(letter)] != sum(kind[0]):
            return None
        args.append(Cut(x, Rows(term.index(letter), *kind)) if s is CONST and letter in term else x)
    state = Rows(right.index(letter), *kind) if letter in right else SUM
    return Piece(state, entry.op, (equation, *args), {})


@rule("gather take_along_dim")
def gather(a: Analysis, entry: Entry, x: Any, dim: int, index: Any, **kwargs: Any) -> Piece | None:
    if not isinstance(dim, int):  # take_along_dim(x, indices, dim)
        return None
    s, r = a.state(x), a.state(index)
    rows = s if isinstance(s, Rows) else r
    if not isinstance(rows, Rows) or SUM in (s, r) or dim % len(a.shape(x)) == rows.dim:
        return None
    if a.shape(index)[rows.dim] != rows.total or a.shape(x)[rows.dim] != rows.total:
        return None
    if s is not CONST and r is not CONST and s != r:
        return None
    cut_x, cut_index = (Cut(t, rows) if a.state(t) is CONST else t for t in (x, index))
    return Piece(rows, entry.op, (cut_x, dim, cut_index), kwargs)


@rule("embedding one_hot", F)
def lookup(a: Analysis, entry: Entry, x: Any, *args: Any, **kwargs: Any) -> Piece | None:
    # max_norm rewrites the table in place.
    return along_dims(a, entry, x, []) if kwargs.get("max_norm") is None and len(args) < 3 else None
