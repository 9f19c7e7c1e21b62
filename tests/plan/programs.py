"""Recorded forwards for tests: a builder, and a small machine that runs them whole and cut, to compare what they see."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from epl.plan.nodes import GraphNode
from epl.plan.stages import StageCut, cut_stages


class Program:
    """Builds the nodes of a forward, one call each; every call gives the node's index."""

    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []
        self.owners: dict[str, str | None] = {}

    def add(self, kind: str, name: str, *inputs: int, **more: object) -> int:
        index = len(self.nodes)
        more.setdefault("where", f"model.py:{index + 1}")
        self.nodes.append(GraphNode(index=index, kind=kind, name=name, inputs=inputs, **more))  # type: ignore[arg-type]
        return index

    def input(self, name: str = "x") -> int:
        return self.add("input", name)

    def constant(self, name: str = "table") -> int:
        return self.add("constant", name, buffers=(name,))

    def parameter(self, name: str, taskgraph: str | None = None) -> int:
        self.owners.setdefault(name, taskgraph)
        return self.add("parameter", name, taskgraph=taskgraph)

    def leaf(
        self, name: str, *inputs: int, tg: str | None = None, weights: Sequence[str] | None = None, **more: object
    ) -> int:
        names = (f"{name}.weight",) if weights is None else tuple(weights)
        for each in names:
            self.owners.setdefault(each, tg)
        return self.add("leaf", name, *inputs, taskgraph=tg, parameters=names, **more)

    def glue(self, name: str, *inputs: int, tg: str | None = None, **more: object) -> int:
        return self.add("glue", name, *inputs, taskgraph=tg, **more)

    def cut(
        self,
        *home: int,
        taskgraphs: Sequence[str] | None = None,
        earlier: StageCut | None = None,
        num_devices: int | None = None,
    ) -> StageCut:
        found = dict.fromkeys(n.taskgraph for n in self.nodes if n.taskgraph is not None and n.kind != "parameter")
        names = list(found) if taskgraphs is None else taskgraphs
        return cut_stages(
            self.nodes, taskgraphs=names, parameters=self.owners, home=home, earlier=earlier, num_devices=num_devices
        )


Content = tuple[object, ...]


@dataclass
class Cell:
    """A piece of memory; values that share it see each other's changes."""

    content: Content


class Machine:
    """Runs nodes symbolically; `seen` tells for each node what its inputs held when it ran."""

    def __init__(self) -> None:
        self.cells: dict[int, Cell] = {}
        self.seen: dict[int, Content] = {}

    def read(self, node: GraphNode) -> Content:
        shares = bool(node.views) or node.effect_on is not None
        content = self.cells[node.index].content
        return ("as", node.index, content) if shares else content

    def run(self, node: GraphNode, nodes: Sequence[GraphNode]) -> None:
        if node.kind in ("input", "constant", "parameter"):
            self.cells.setdefault(node.index, Cell((node.kind, node.name)))
            return
        seen = self.seen[node.index] = tuple(self.read(nodes[i]) for i in node.inputs)
        if node.effect_on is not None:
            self.cells[node.effect_on].content = ("changed by", node.index, seen)
            self.cells[node.index] = self.cells[node.effect_on]
        elif node.views:
            self.cells[node.index] = self.cells[node.views[0]]
        else:
            self.cells[node.index] = Cell(("made by", node.index, seen))


def check(nodes: Sequence[GraphNode], cut: StageCut, home: Collection[int] = ()) -> None:
    """Every stage sees, in every node, what the whole program sees; values only travel forward, and are all there."""
    whole = Machine()
    for node in nodes:
        whole.run(node, nodes)
    stages = [Machine() for _ in cut.order]
    last = cut.num_stages - 1
    ran: dict[int, list[int]] = {node.index: [] for node in nodes}
    for stage, machine in enumerate(stages):
        for (made, used), values in cut.edges.items():
            assert made < used
            if used == stage:  # snapshots: what shared memory no longer does
                machine.cells.update({value: Cell(stages[made].cells[value].content) for value in values})
        for node in nodes:
            if stage in cut.stages[node.index]:
                machine.run(node, nodes)
                ran[node.index].append(stage)
        for index, seen in machine.seen.items():
            assert seen == whole.seen[index], (nodes[index], stage)
    for node in nodes:
        if node.kind in ("leaf", "glue") and (node.random or node.kind == "leaf" or node.taskgraph is not None):
            assert len(ran[node.index]) == 1, node
        if node.kind == "constant":  # what outlives the call is alike wherever it is read
            for stage in cut.stages[node.index]:
                assert stages[stage].cells[node.index].content == whole.cells[node.index].content
        names = (node.name,) if node.kind == "parameter" else node.parameters
        for name in names:
            assert set(ran[node.index]) <= set(cut.holders[name])
    for index in home:
        assert stages[last].read(nodes[index]) == whole.read(nodes[index])
