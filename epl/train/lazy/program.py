"""The recorded operations under a loss, as a program for the separability analysis, and what that found; remembered by structure."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from epl.graph.spec import Spec, swap
from epl.train.lazy.node import Node, name_of, output_of, topological
from epl.train.separate import Entry, Given, Output, Program, Ref, Verdict, analyse

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Call

_MOST = 500  # structures remembered


class Recorded(NamedTuple):
    """A program with what stands for its entries, given tensors and calls in this step."""

    program: Program
    nodes: list[Node]
    givens: list[torch.Tensor | Node]
    calls: list[Call]

    def read(self, index: int) -> torch.Tensor | None:
        """The numbers of a given tensor, if every rank has them."""
        given = self.givens[index]
        if isinstance(given, Node):
            found: torch.Tensor | None = given.value if given.everywhere else None
            return found
        return given


class Structure(NamedTuple):
    """What is known of all programs of one key."""

    verdict: Verdict
    checksum: int
    """The same on every rank for the same code."""
    checked: list[bool]
    """Whether a step of it was once compared with the whole batch."""


_structures: dict[Hashable, Structure] = {}


def write_down(root: Node, is_given: Callable[[Node], bool]) -> Recorded:
    """The operations under `root`; what is computed, or made without any model call, is given."""

    def stop(node: Node) -> bool:
        return node.done or node.carrier is None or is_given(node)

    nodes = [node for node in topological([root], stop) if not stop(node)]
    index = {node: i for i, node in enumerate(nodes)}
    givens: list[torch.Tensor | Node] = []
    places: dict[int, Given] = {}
    calls: list[Call] = []

    def name(x: torch.Tensor | Node) -> Ref | Given:
        if isinstance(x, Node) and x in index:
            return Ref(index[x])
        if id(x) not in places:
            places[id(x)] = Given(len(givens))
            givens.append(x)
        return places[id(x)]

    entries = []
    for node in nodes:
        if node.func is output_of:
            call, i = node.args
            if call not in calls:
                calls.append(call)
            output = Output(calls.index(call), call.kinds[i], call.sizes)
            entries.append(Entry(output, (), {}, node.context, node.spec))
        else:
            assert node.func is not None
            args, kwargs = swap((node.args, node.kwargs), (Node, torch.Tensor), name)
            entries.append(Entry(node.func, args, kwargs, node.context, node.spec))
    specs = tuple(x.spec if isinstance(x, Node) else Spec.of(x) for x in givens)
    return Recorded(Program(tuple(entries), specs), nodes, givens, calls)


def structure_of(recorded: Recorded) -> Structure:
    """The verdict on a program, from memory if it was seen before."""
    key = recorded.program.key()
    known = _structures.get(key) if key is not None else None
    if known is None:
        known = Structure(analyse(recorded.program, recorded.read), _checksum(recorded.program), [False])
        if key is not None:
            if len(_structures) >= _MOST:
                _structures.clear()
            _structures[key] = known
    elif not known.verdict.lasting:
        known = known._replace(verdict=analyse(recorded.program, recorded.read))
    return known


def _checksum(program: Program) -> int:
    total = 0
    for entry in program.entries:
        if isinstance(entry.func, Output):
            text = repr(entry.func)
        else:
            text = f"{name_of(entry.func)} {_text(entry.args)} {_text(entry.kwargs)}"
        total = zlib.crc32(f"{text} {tuple(entry.first.shape)} {entry.context}".encode(), total)
    for spec in program.givens:
        total = zlib.crc32(f"{tuple(spec.shape)} {spec.dtype}".encode(), total)
    return total


def _text(tree: Any) -> str:
    """Arguments as text that does not depend on the process (addresses, hashes)."""
    if isinstance(tree, (list, tuple)) and not isinstance(tree, (Ref, Given)):
        return f"[{', '.join(map(_text, tree))}]"
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{k}: {_text(v)}' for k, v in tree.items())}}}"
    if isinstance(tree, (Ref, Given, int, float, complex, str, bool, slice, torch.dtype, torch.device)) or tree is None:
        return repr(tree)
    return name_of(type(tree))


def depends_on(nodes: Collection[Node]) -> list[Call]:
    """The calls that these nodes are outputs of, earliest first; those whose graphs are gone are not looked for."""
    found = dict.fromkeys(node.args[0] for node in nodes if node.func is output_of and node.args)
    return sorted(found, key=lambda call: call.nodes[0].serial)
