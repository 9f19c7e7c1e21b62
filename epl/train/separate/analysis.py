"""Whether a program separates over the batch, and into which pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from epl.graph.spec import Spec
from epl.train.separate.program import VALUES, Entry, Given, Output, Program, Ref
from epl.train.separate.rules import RULES
from epl.train.separate.state import CONST, Cut, Order, Piece, Rows, State, state_of


class Verdict(NamedTuple):
    """A piece for each entry of the program; or none, and why the whole batch is needed."""

    pieces: tuple[Piece, ...]
    why: str
    lasting: bool
    """Whether it holds for every program of the same key; not if it looked at which rows an index or a mask selects."""


def analyse(program: Program, read: Callable[[int], torch.Tensor | None]) -> Verdict:
    """The pieces of a program. `read(i)` gives the i-th given tensor for the few rules that must know which rows it selects.

    It looks at code, shapes and the number of rows of each micro batch, never at other values, so that every rank and every
    step decides alike.
    """
    a = Analysis(program, read)
    for entry in program.entries:
        try:
            piece = a.piece(entry)
        except Exception:
            piece = None  # arguments in a form the rule does not know
        if piece is None:
            return Verdict((), f"{entry.name} may mix rows of the batch", a.lasting)
        a.pieces.append(piece)
    return Verdict(tuple(a.pieces), "", a.lasting)


class Analysis:
    """The states of the entries so far, and what rules ask about them."""

    def __init__(self, program: Program, read: Callable[[int], torch.Tensor | None]) -> None:
        self.program, self._read = program, read
        self.slots = program.slots
        self.pieces: list[Piece] = []
        self.orders: dict[tuple[Any, ...], Order] = {}
        self.lasting = True

    def state(self, x: Any) -> State:
        """Of an argument."""
        return self.pieces[x.index].state if isinstance(x, Ref) else CONST

    def spec(self, x: Ref | Given) -> Spec:
        """Of an argument that is a tensor."""
        return self.program.entries[x.index].first if isinstance(x, Ref) else self.program.givens[x.index]

    def shape(self, x: Ref | Given) -> torch.Size:
        """Of an argument that is a tensor."""
        return self.spec(x).shape

    def read(self, x: Given) -> torch.Tensor:
        """The numbers of an index or a mask; the verdict then holds for them alone."""
        self.lasting = False
        found = self._read(x.index)
        if found is None:
            raise LookupError("its numbers are not on every rank")
        return found

    def align(self, operands: Sequence[Any]) -> tuple[list[Any], Rows] | None:
        """Broadcast: every operand with its constants cut, and the Rows of the result. None if the rows do not line up."""
        tensors = [x for x in operands if isinstance(x, VALUES)]
        place, kind = 0, None
        for x in tensors:
            s = self.state(x)
            if s is CONST:
                continue
            if not isinstance(s, Rows):
                return None
            here = len(self.shape(x)) - s.dim
            if kind is not None and (here, s.kind) != (place, kind):
                return None
            place, kind = here, s.kind
        if kind is None:
            return None
        out: list[Any] = []
        for x in operands:
            if isinstance(x, VALUES) and self.state(x) is CONST:
                shape = self.shape(x)
                if len(shape) >= place and shape[-place] != 1:
                    if shape[-place] != sum(kind[0]):
                        return None
                    out.append(Cut(x, Rows(len(shape) - place, *kind)))
                    continue
            out.append(x)
        ndim = max(len(self.shape(x)) for x in tensors)
        return out, Rows(ndim - place, *kind)

    def dims(self, x: Ref | Given, dim: Any) -> list[int]:
        """`dim` as torch reads it: none or empty is all of them."""
        n = max(len(self.shape(x)), 1)
        if dim is None or dim == () or dim == []:
            return list(range(n))
        return [d % n for d in (dim if isinstance(dim, (tuple, list)) else [dim])]

    def piece(self, entry: Entry) -> Piece | None:
        """How one entry separates."""
        if isinstance(entry.func, Output):
            output = entry.func
            if len(output.sizes) != self.slots:
                return None
            return Piece(state_of(output.kind, output.sizes), None, (), {})
        if all(self.state(ref) is CONST for ref in entry.refs):
            return Piece(CONST, entry.func, entry.args, entry.kwargs)
        found = RULES.get(entry.func)
        return found(self, entry, *entry.args, **entry.kwargs) if found is not None else None


def check_rows(entry: Entry, piece: Piece) -> Piece | None:
    """The piece, if its result has the batch's rows where it says."""
    rows = piece.state
    return piece if isinstance(rows, Rows) and entry.first.shape[rows.dim] == rows.total else None


def along_dims(a: Analysis, entry: Entry, x: Ref, dims: Sequence[int]) -> Piece | None:
    """An operation along dims other than the rows; whether it keeps them is read off the shape of its result."""
    s = a.state(x)
    if not isinstance(s, Rows) or s.dim in dims or any(a.state(p) is not CONST for p in entry.refs if p != x):
        return None
    keeps = len(entry.first.shape) >= len(a.shape(x))
    return check_rows(entry, Piece(shifted(s, dims, keeps), entry.op, entry.args, entry.kwargs))


def shifted(rows: Rows, dims: Sequence[int], keepdim: bool) -> Rows:
    """Where the rows are after a reduction over these dims."""
    return rows if keepdim else rows._replace(dim=rows.dim - sum(d < rows.dim for d in dims))
