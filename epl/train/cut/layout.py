"""A recorded call on its stages: which nodes each stage runs, what travels, and what the loop gets to see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from epl.errors import PlanError
from epl.graph.record import RecordedCall
from epl.parallel.pipeline.route import Layout
from epl.parallel.pipeline.transport import Edge
from epl.plan.stages import StageCut
from epl.train.lazy.protocol import Kind


class CallLayout:
    """What is the same for every call with one signature. Nodes are named by their place in the graph, alike at every size.

    The values of the frontier go to `home_stage`: the last stage of the model, or one of its own after it.
    """

    def __init__(self, recorded: RecordedCall, cut: StageCut, own_stages: Iterable[int], home_stage: int) -> None:
        self.recorded = recorded
        self._nodes = {size: list(recording.graph.nodes) for size, recording in recorded.by_size.items()}
        whole = self._nodes[recorded.rows]
        place = {node: index for index, node in enumerate(whole)}
        self.frontier = tuple(place[node] for node in recorded.frontier)
        self.kinds: tuple[Kind, ...] = tuple(self.kind_of(index) for index in self.frontier)
        self.edges = dict(cut.edges) if home_stage < cut.num_stages else self._edges_to_home(cut, home_stage)
        self.layouts: Mapping[Edge, tuple[Layout, ...]] = {
            edge: tuple(_layout(self.kind_of(index)) for index in nodes) for edge, nodes in self.edges.items()
        }
        body = {place[node] for node in recorded.body}
        self._programs = {
            (stage, size): recorded.by_size[size].program(
                [nodes[i] for i in cut.nodes_of(stage) if i in body], [nodes[i] for i in self.frontier]
            )
            for stage in own_stages
            for size, nodes in self._nodes.items()
        }

    def kind_of(self, index: int) -> Kind:
        """How a value of the graph, by its place, carries the batch."""
        node = self._nodes[self.recorded.rows][index]
        dim = self.recorded.batch_dim(node)
        if dim is not None:
            return dim
        return "coupled" if self.recorded.depends_on_batch(node) else "constant"

    def _edges_to_home(self, cut: StageCut, home_stage: int) -> dict[Edge, tuple[int, ...]]:
        """The edges with a stage of its own after the last one, which then gets only what it uses itself."""
        nodes, last = self._nodes[self.recorded.rows], cut.num_stages - 1
        used = {node for index in cut.nodes_of(last) for node in nodes[index].all_input_nodes}
        edges: dict[Edge, set[int]] = {}
        for edge, travelling in cut.edges.items():
            edges[edge] = {i for i in travelling if edge[1] != last or nodes[i] in used}
        for index in self.frontier:
            edges.setdefault((cut.stages[index][0], home_stage), set()).add(index)
        return {edge: tuple(sorted(found)) for edge, found in sorted(edges.items()) if found}

    def run(
        self,
        stage: int,
        size: int,
        inputs: Sequence[torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        draws: Sequence[torch.Tensor],
    ) -> Values:
        """Carry a stage's nodes out for so many rows."""
        nodes = self._nodes[size]
        env = self.recorded.by_size[size].feed(inputs, draws)
        for index, value in incoming.items():
            env[nodes[index]] = value
        self._programs[stage, size](env)
        return Values(nodes, env)


def _layout(kind: Kind) -> Layout:
    if isinstance(kind, int):
        return kind
    return "average" if kind == "coupled" else "same"


class Values:
    """Values of a micro batch by the places of their nodes."""

    def __init__(self, nodes: list[fx.Node], env: Mapping[fx.Node, Any]) -> None:
        self._nodes, self._env = nodes, env

    def __getitem__(self, index: int) -> torch.Tensor:
        value = self._env[self._nodes[index]]
        if not isinstance(value, torch.Tensor):
            node = self._nodes[index]
            raise PlanError(
                f"{node.name} ({node.meta.get('where', 'unknown place')}) is a {type(value).__name__}: only tensors can go from one "
                "stage to another"
            )
        return value
