"""Which nodes of a forward are its body, which are its tail, and what the tail needs of the body.

    body        every module that runs as a whole, and the glue that feeds them: run per micro batch, on the stages
    tail        what comes after the last module: replayed on the values of the body, as if the loop had written it
    frontier    the values of the body that the tail or the outputs use

Parameters, constants and packing are listed with everybody who uses them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from torch import fx

from epl.errors import RecordingError
from epl.graph.record import steps
from epl.graph.record.describe import describe
from epl.graph.record.recorder import KEPT
from epl.graph.record.recording import Recording


@dataclass(frozen=True)
class Parts:
    """Body, tail and frontier, each in order."""

    body: tuple[fx.Node, ...]
    tail: tuple[fx.Node, ...]
    frontier: tuple[fx.Node, ...]


def parts_of(recording: Recording, bound: Container[str] = frozenset()) -> Parts:
    """The parts of a recorded forward. `bound`: parameters that code can compute with in stages only, as they are cut over ranks."""
    nodes = recording.nodes
    order = {node: i for i, node in enumerate(nodes)}
    body = {node for node in nodes if _is_bound_to_modules(node)} | _using(nodes, bound)
    size = -1
    while size != (size := len(body)):
        for node in reversed(nodes):
            if node in body:
                body.update(node.all_input_nodes)
                body.update(_readers_before(node, order))
        for node in nodes:
            if node not in body and (source := _source(node)) is not None and source in body:
                body.add(node)
    computed = [node for node in nodes if node not in body and not _is_source(node)]
    wanted = dict.fromkeys(recording.graph.output_node().all_input_nodes)
    needed: set[fx.Node] = {*wanted, *(value for node in computed for value in node.all_input_nodes)}
    for node in reversed(nodes):
        if node in needed and _is_source(node):
            needed.update(node.all_input_nodes)
    parts = Parts(
        body=tuple(node for node in nodes if node in body and node.op != "placeholder" and not steps.is_drawn(node)),
        tail=tuple(node for node in nodes if node in set(computed) or (node in needed and _is_repeated(node))),
        frontier=tuple(node for node in nodes if node in needed and node in body and not _is_source(node)),
    )
    _refuse_torn(parts)
    return parts


def _refuse_torn(parts: Parts) -> None:
    """The tail gets every value of the frontier in memory of its own: none sees it if another is changed in place."""
    frontier = set(parts.frontier)

    def owner(node: fx.Node) -> fx.Node:
        while node not in frontier and node.meta["views"]:
            node = node.meta["views"][0]
        return node

    tail = set(parts.tail)
    for node in parts.tail:
        target = node.meta.get("target")  # what the change was made through
        if target is not None and node.args[1] in tail and owner(node) is not owner(target):
            raise RecordingError(
                f"{describe(node.all_input_nodes[0])} shares memory with {describe(target)}, which the code after the last "
                f"module changes in place ({node.all_input_nodes[1].meta['where']}). There each is joined from its micro "
                "batches by itself, and the one would not see the change of the other. Write it without changing the value "
                "(`x = x + y` for `x += y`), or take the one from the other after the last module"
            )


def _is_bound_to_modules(node: fx.Node) -> bool:
    if node.op == "call_module" or node.target is steps.assign:
        return True
    target = node.meta.get("effect")
    return target is not None and _root(target).op == "get_attr"  # a buffer changes where it is, per micro batch


def _using(nodes: Sequence[fx.Node], bound: Container[str]) -> set[fx.Node]:
    """The glue that computes with these parameters, up to where inputs come in: logits are a value of the body, a loss is not."""
    parameters: set[fx.Node] = set()
    from_inputs: set[fx.Node] = set()
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder" or not from_inputs.isdisjoint(node.all_input_nodes):
            from_inputs.add(node)
        if node.op == "get_attr" and str(node.target) in bound:
            parameters.add(node)
        elif not parameters.isdisjoint(node.all_input_nodes):
            found.add(node)
            if node not in from_inputs:
                parameters.add(node)
    return found


def _root(node: fx.Node) -> fx.Node:
    while node.meta["views"]:
        node = node.meta["views"][0]
    return node


def _readers_before(effect: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Who has read what this node changes: it must not come to read it afterwards."""
    before = effect.meta.get("changes", ())
    return [user for value in before for user in value.users if order.get(user, len(order)) < order[effect]]


def _source(node: fx.Node) -> fx.Node | None:
    """What a node has to be with: a part with the whole, a changed value with the change."""
    if node.target is steps.changed:
        by = node.args[1]
        assert isinstance(by, fx.Node)
        return by
    goes_with = steps.is_part(node) or getattr(node.target, "__name__", "") in KEPT
    return node.all_input_nodes[0] if goes_with else None


def _is_source(node: fx.Node) -> bool:
    """Whether everybody has it, or makes it for himself."""
    return node.op in ("placeholder", "get_attr") or steps.is_packing(node)


def _is_repeated(node: fx.Node) -> bool:
    return _is_source(node) and node.op != "placeholder" and not steps.is_drawn(node)
