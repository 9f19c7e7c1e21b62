"""A recorded call as plain data for planning: its nodes, what the last stage wants of them, and the stages they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torch import fx, nn

from epl.graph.cost import Cost
from epl.graph.record import RecordedCall
from epl.graph.record.describe import name_of
from epl.graph.record.steps import assign, changed, is_drawn, is_packing, is_part
from epl.plan.nodes import GraphNode, NodeKind
from epl.plan.stageplan import StagePlan
from epl.plan.stages import StageCut

TaskGraphOfCall = Callable[[str, int], str | None]
"""(path of a module, how often it has been called before): the TaskGraph of this call of it."""


def graph_nodes(
    recorded: RecordedCall, model: nn.Module, taskgraph_of: TaskGraphOfCall | None = None
) -> list[GraphNode]:
    """The body of a recorded call, with all inputs, parameters and constants.

    A node's index is its place in the graph of the whole batch, and so in that of every size. `taskgraph_of`, if given,
    decides for calls of modules instead of the annotations.
    """
    things, calls = _Things(model), dict[str, int]()
    place = _places(recorded)
    body, frontier = set(recorded.body), set(recorded.frontier)
    buffers = {str(node.target): node for node in reversed(place) if node.op == "get_attr"}
    nodes = []
    for node, index in place.items():
        if node not in body and node.op not in ("placeholder", "get_attr") and not is_drawn(node):
            continue
        thing = things.of(node)
        taskgraph = None if _follows_its_producer(node) else node.meta.get("taskgraph")
        if thing.kind == "leaf" and taskgraph_of is not None:
            calls[thing.name] = calls.get(thing.name, -1) + 1
            taskgraph = taskgraph_of(thing.name, calls[thing.name])
        effect = node.meta.get("effect")
        if node.target is assign:
            effect = next((buffers[name] for name in thing.buffers if name in buffers), None)
        nodes.append(
            GraphNode(
                index=index,
                kind=thing.kind,
                name=thing.name,
                taskgraph=taskgraph,
                inputs=tuple(sorted(place[each] for each in node.all_input_nodes)),
                effect_on=place[effect] if effect is not None else None,
                views=tuple(sorted(place[each] for each in node.meta.get("views", ()))),
                random=bool(node.meta.get("random")),
                kept=thing.kind == "glue" and not node.users and node not in frontier,
                parameters=thing.parameters,
                buffers=thing.buffers,
                where=node.meta.get("where") or "",
            )
        )
    return nodes


def wanted_at_home(recorded: RecordedCall) -> list[int]:
    """The nodes that the last stage wants: the frontier, and the parameters and buffers that the tail uses."""
    place = _places(recorded)
    held = (node for node in recorded.tail if node.op == "get_attr")
    return sorted({place[node] for node in (*recorded.frontier, *held)})


def stage_plans(
    recorded: RecordedCall, model: nn.Module, cut: StageCut, costs: Mapping[fx.Node, Cost]
) -> list[StagePlan]:
    """What the plan tells of every stage; `costs` may be empty, if they are not known."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    bare = {node.name: node.index for node in graph_nodes(recorded, model) if node.kind == "parameter"}
    whole = sum(cost.time for cost in costs.values()) or 1.0
    found = []
    for stage, taskgraph in enumerate(cut.order):
        nodes = [recorded.whole.nodes[index] for index in cut.nodes_of(stage)]
        called = [str(node.target) for node in nodes if node.op == "call_module"]
        own = [name for name, index in bare.items() if stage in cut.stages[index]]
        held = [name for name, stages in cut.holders.items() if stage in stages]
        here = [costs[node] for node in nodes if node in costs]
        found.append(
            StagePlan(
                taskgraph,
                tuple(dict.fromkeys((*called, *(n for n in own if not any(n.startswith(f"{c}.") for c in called))))),
                sum(sizes[name] for name in held),
                tuple(name for name in held if name in cut.tied),
                sum(cost.time for cost in here) / whole if costs else None,
                sum(cost.activations for cost in here) if costs else None,
            )
        )
    return found


def _places(recorded: RecordedCall) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(recorded.whole.nodes)}


def _follows_its_producer(node: fx.Node) -> bool:
    """Whether it is no computation: it belongs with what it was taken from, whatever scope it was written in."""
    return is_part(node) or node.target is changed


class _Thing(NamedTuple):
    kind: NodeKind
    name: str
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


class _Things:
    """What nodes are in the words of planning; parameters and buffers that have several names go by the first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = _first_names(model.named_parameters(remove_duplicate=False))
        self._buffers = _first_names(model.named_buffers(remove_duplicate=False))
        self._paths = {module: path for path, module in model.named_modules()}

    def of(self, node: fx.Node) -> _Thing:
        target = str(node.target)
        if node.op == "placeholder" or is_drawn(node):
            return _Thing("input", node.name)
        if node.op == "get_attr":
            if target in self._parameters:
                return _Thing("parameter", self._parameters[target])
            return _Thing("constant", target, buffers=(self._buffers[target],) if target in self._buffers else ())
        if node.op == "call_module":
            module = self._model.get_submodule(target)
            parameters = (self._parameters[f"{target}.{name}"] for name, _ in module.named_parameters())
            buffers = (self._buffers[f"{target}.{name}"] for name, _ in module.named_buffers())
            return _Thing("leaf", target, tuple(dict.fromkeys(parameters)), tuple(dict.fromkeys(buffers)))
        if node.target is assign:
            owner, name = node.args[0], node.args[1]
            assert isinstance(owner, nn.Module)
            path = f"{self._paths[owner]}.{name}".lstrip(".")
            return _Thing("glue", f"{path} = …", buffers=(self._buffers[path],))
        return _Thing("packing" if is_packing(node) else "glue", name_of(node))


def _first_names(named: Iterable[tuple[str, object]]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
