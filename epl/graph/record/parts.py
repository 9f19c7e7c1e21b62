"""Which nodes of a forward are its body, which are its tail, and what the tail needs of the body.

    body        every module that runs as a whole, and the glue that feeds them: run per micro batch, on the stages
    tail        what comes after the last module: replayed on the values of the body, as if the loop had written it
    frontier    the values of the body that the tail or the outputs use

Parameters, constants and packing are listed with everybody who uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from epl.graph.record import steps
from epl.graph.record.recorder import KEPT
from epl.graph.record.recording import Recording


@dataclass(frozen=True)
class Parts:
    """Body, tail and frontier, each in order."""

    body: tuple[fx.Node, ...]
    tail: tuple[fx.Node, ...]
    frontier: tuple[fx.Node, ...]


def parts_of(recording: Recording) -> Parts:
    """The parts of a recorded forward."""
    nodes = recording.nodes
    order = {node: i for i, node in enumerate(nodes)}
    body = {node for node in nodes if _is_bound_to_modules(node)}
    size = -1
    while size != (size := len(body)):
        for node in reversed(nodes):
            if node in body:
                body.update(node.all_input_nodes)
                body.update(_readers_before(node, order))
        for node in nodes:
            if node not in body and _goes_with_source(node) and node.all_input_nodes[0] in body:
                body.add(node)
    computed = [node for node in nodes if node not in body and not _is_source(node)]
    wanted = dict.fromkeys(recording.graph.output_node().all_input_nodes)
    needed: set[fx.Node] = {*wanted, *(value for node in computed for value in node.all_input_nodes)}
    for node in reversed(nodes):
        if node in needed and _is_source(node):
            needed.update(node.all_input_nodes)
    return Parts(
        body=tuple(node for node in nodes if node in body and node.op != "placeholder" and not steps.is_drawn(node)),
        tail=tuple(node for node in nodes if node in set(computed) or (node in needed and _is_repeated(node))),
        frontier=tuple(node for node in nodes if node in needed and node in body and not _is_source(node)),
    )


def _is_bound_to_modules(node: fx.Node) -> bool:
    if node.op == "call_module" or node.target is steps.assign:
        return True
    target = node.meta.get("effect")
    return target is not None and _root(target).op == "get_attr"  # a buffer changes where it is, per micro batch


def _root(node: fx.Node) -> fx.Node:
    while node.meta["views"]:
        node = node.meta["views"][0]
    return node


def _readers_before(effect: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Who has read what this node changes: it must not come to read it afterwards."""
    if "effect" not in effect.meta:
        return []
    aliases = [user.args[0] for user in effect.users if user.target is steps.changed and user.args[1] is effect]
    before = [effect.meta["effect"], *(alias for alias in aliases if isinstance(alias, fx.Node))]
    return [user for value in before for user in value.users if order.get(user, len(order)) < order[effect]]


def _goes_with_source(node: fx.Node) -> bool:
    return steps.is_part(node) or getattr(node.target, "__name__", "") in KEPT


def _is_source(node: fx.Node) -> bool:
    """Whether everybody has it, or makes it for himself."""
    return node.op in ("placeholder", "get_attr") or steps.is_packing(node)


def _is_repeated(node: fx.Node) -> bool:
    return _is_source(node) and node.op != "placeholder" and not steps.is_drawn(node)
