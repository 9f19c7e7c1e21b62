"""How rows lie in a dim that has several elements of each: all of row 0, then all of row 1; or all rows, and once more.

    h.flatten(0, 1) of [rows, positions, ...]                   (positions,)     row by row
    torch.cat([view, other_view])    h.repeat(2, 1)             (1, 1)           the rows of one view, then those of the other
    h.flatten(0, 1) of [positions, rows, ...]                   (1, 1, 1, ...)   the rows of every position

Rows of all ranks are to lie as they do on one device: what is coupled over rows (a contrastive loss) finds its pairs by place. Sizes do
not tell, so numbers of rows are sent through the recorded operations that move elements, from where the rows were a dim of their
own. All others, and modules, are taken to leave them where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from epl.graph.record import RecordedCall, steps
from epl.graph.spec import Spec

_NAMES = """
view reshape flatten unflatten view_as reshape_as squeeze unsqueeze ravel
transpose permute movedim moveaxis swapaxes swapdims t __getitem__ getitem select narrow
cat concat concatenate stack vstack hstack repeat tile repeat_interleave expand expand_as broadcast_to
chunk split split_with_sizes tensor_split unbind flip flipud roll rot90
"""
_MOVES = frozenset(_NAMES.split())


class RowOrder:
    """Of the values of one recorded call."""

    def __init__(self, recorded: RecordedCall) -> None:
        whole, another = recorded.whole.nodes, recorded.another_size()
        self._rows, self._other = recorded.rows, 0
        self._of = {node: node for node in whole}
        """By the nodes of the recording, those of its size with more rows: the order of a single row could be any."""
        self._beside = self._of
        """By the latter, those of the other size."""
        if another is not None:
            self._other = another[0]
            self._beside = dict(zip(whole, another[1].nodes, strict=True))
            if self._other > self._rows:
                self._of, self._beside = self._beside, {other: node for node, other in self._beside.items()}
                self._rows, self._other = self._other, self._rows
        self._marks: dict[fx.Node, torch.Tensor | None] = {}

    def sections(self, node: fx.Node, inner: int) -> tuple[int, ...]:
        """The sections of the dim with rows of a node's value that has so many elements of each, as a `Cut` has them."""
        if inner == 1:
            return (1,)
        marks = self._marks_of(self._of[node])
        found = None if marks is None or len(marks) != self._rows * inner else _sections(marks, self._rows)
        return found or (inner,)

    def _marks_of(self, node: fx.Node) -> torch.Tensor | None:
        """The number of its row for every element along the dim with rows; None if that is not known."""
        if node not in self._marks:
            self._marks[node] = None
            with contextlib.suppress(Exception):  # whatever it is that it cannot be run with
                self._marks[node] = self._find(node)
        return self._marks[node]

    def _find(self, node: fx.Node) -> torch.Tensor | None:
        if steps.is_part(node) and isinstance(node.args[0], fx.Node):
            made = node.args[0]
            if made.op != "call_function" or not _moves(made):
                return self._kept(made, self._place(node))
            return self._along(steps.part(self._run(made), int(str(node.args[1]))), node)
        place = self._place(node)
        if place is None:
            return None
        if place[1] == 1:
            return torch.arange(self._rows, dtype=torch.int32)
        if node.op == "call_function" and _moves(node):
            return self._along(self._run(node), node)
        return self._kept(node, place)

    def _kept(self, node: fx.Node, place: tuple[int, int] | None) -> torch.Tensor | None:
        """Those of the first source that has as many elements of each row."""
        for source in _sources(node):
            found = self._place(source)
            if found is not None and place is not None and found[1] == place[1]:
                return self._marks_of(source)
        return None

    def _run(self, node: fx.Node) -> Any:
        def marked(source: fx.Node) -> Any:
            if "spec" not in source.meta:  # a container
                return self._run(source)
            marks, place = self._marks_of(source), self._place(source)
            assert marks is not None
            assert place is not None
            shape = _spec(source).shape
            return marks.view([-1 if d == place[0] else 1 for d in range(len(shape))]).expand(shape)

        assert callable(node.target)
        return node.target(*fx.map_arg(node.args, marked), **fx.map_arg(node.kwargs, marked))

    def _along(self, found: torch.Tensor, node: fx.Node) -> torch.Tensor | None:
        place = self._place(node)
        if place is None:
            return None
        rest = [d for d in range(found.ndim) if d != place[0]]
        marks = found.movedim(place[0], 0).flatten(1)[:, 0] if rest else found
        return marks if bool((found.movedim(place[0], -1) == marks).all()) else None

    def _place(self, node: fx.Node) -> tuple[int, int] | None:
        """The dim with rows, and how many elements of each it has."""
        if "spec" not in node.meta or not self._other:
            return None
        shape, other = _spec(node).shape, _spec(self._beside[node]).shape
        changed = [d for d in range(len(shape)) if shape[d] != other[d]] if len(shape) == len(other) else []
        if len(changed) != 1:
            return None
        inner, rest = divmod(shape[changed[0]], self._rows)
        return (changed[0], inner) if not rest and other[changed[0]] == inner * self._other else None


def _moves(node: fx.Node) -> bool:
    return str(getattr(node.target, "__name__", node.target)) in _MOVES


def _spec(node: fx.Node) -> Spec:
    spec: Spec = node.meta["spec"]
    return spec


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that it is made from; of a container that is put together from others, those."""
    for source in node.all_input_nodes:
        if "spec" in source.meta:
            yield source
        elif not source.meta.get("specs"):
            yield from _sources(source)


def _sections(marks: torch.Tensor, rows: int) -> tuple[int, ...] | None:
    found, at = [], 0
    while at < len(marks):
        others = (marks[at:] != 0).nonzero()
        inner = int(others[0]) if len(others) else 0
        section = torch.arange(rows, dtype=marks.dtype).repeat_interleave(inner)
        if not inner or not torch.equal(marks[at : at + len(section)], section):
            return None
        found.append(inner)
        at += len(section)
    return tuple(found)
