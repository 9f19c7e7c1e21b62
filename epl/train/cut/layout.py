"""A recorded call on its stages: which nodes each stage runs, what travels, and what the loop gets to see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from epl.errors import PlanError
from epl.graph.record import RecordedCall
from epl.parallel.pipeline.route import Layout
from epl.parallel.pipeline.transport import Edge
from epl.parallel.split.value import settle, whole
from epl.plan.stages import StageCut
from epl.train.lazy.lane import LaneParameter
from epl.train.lazy.protocol import Kind


class CallLayout:
    """What is the same for every call with one signature. Nodes are named by their place in the graph, alike at every size.

    The values of the frontier go to `home_stage`: the last stage of the model, or one of its own after it (`edges`). Where the lanes of the
    last stage compute what follows, they go to that (`edges_to_lanes`).
    """

    def __init__(
        self,
        recorded: RecordedCall,
        cut: StageCut,
        own_stages: Iterable[int],
        home_stage: int,
        is_direct: Callable[[Edge], bool] = lambda edge: True,
    ) -> None:
        """`is_direct`: whether values pass along an edge as they are, without rows being cut or joined."""
        self.recorded = recorded
        self._nodes = {size: list(recording.graph.nodes) for size, recording in recorded.by_size.items()}
        whole = self._nodes[recorded.rows]
        place = {node: index for index, node in enumerate(whole)}
        self.frontier = tuple(place[node] for node in recorded.frontier)
        self.kinds: tuple[Kind, ...] = tuple(self.kind_of(index) for index in self.frontier)
        self.edges_to_lanes = dict(cut.edges)
        self.edges = self.edges_to_lanes if home_stage < cut.num_stages else self._edges_to_home(cut, home_stage)
        self._is_direct = is_direct
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

    def layouts(self, edge: Edge, nodes: Iterable[int]) -> tuple[Layout, ...]:
        """How each of the values that travel along an edge carries the batch."""
        direct = self._is_direct(edge)
        return tuple(self._layout(index, direct) for index in nodes)

    def _layout(self, index: int, direct: bool) -> Layout:
        if direct and self.recorded.is_flat(self._nodes[self.recorded.rows][index]):
            return "same"  # it is neither cut nor joined: in which order the rows lie in it does not matter
        kind = self.kind_of(index)
        if isinstance(kind, str):
            return "average" if kind == "coupled" else "same"
        return kind

    @cached_property
    def signature(self) -> str:
        """Everything that decides which messages go along which edges, alike on all ranks of a replica.

        A layout itself is this rank's: one rank may record a call again that others know (it has set an attribute, or a
        hook, or cut its parameters), and what is remembered of its messages must not be lost on that rank alone.
        """
        nodes, recorded = self._nodes[self.recorded.rows], self.recorded

        def form(index: int) -> object:  # not the index: another recording may number its nodes differently
            spec = nodes[index].meta.get("spec")
            return spec and (tuple(spec.shape), spec.dtype)

        ways = [self.edges] if self.edges is self.edges_to_lanes else [self.edges, self.edges_to_lanes]
        edges = [
            [(edge, [*map(form, values)], self.layouts(edge, values)) for edge, values in sorted(way.items())]
            for way in ways
        ]
        return repr((recorded.rows, recorded.sizes, [*map(form, self.frontier)], self.kinds, edges))

    def averaged(self) -> list[fx.Node]:
        """The values that leave a stage without a batch dim though they follow from the batch."""
        nodes = self._nodes[self.recorded.rows]
        travelling = (index for values in self.edges.values() for index in values)
        numbers = (i for i in travelling if (spec := nodes[i].meta.get("spec")) is not None and not spec.shape)
        leaving = dict.fromkeys(
            (*self.frontier, *numbers)
        )  # larger ones are tables (of positions), alike for all micro batches
        return [nodes[index] for index in leaving if self.kind_of(index) == "coupled"]

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


class Values:
    """Values of a micro batch by the places of their nodes."""

    def __init__(self, nodes: list[fx.Node], env: Mapping[fx.Node, Any]) -> None:
        self._nodes, self._env = nodes, env

    def __getitem__(self, index: int) -> torch.Tensor:
        """As a plain tensor; what a split part has left cut is gathered."""
        value: torch.Tensor = whole(self.as_left(index))
        return value

    def as_left(self, index: int) -> torch.Tensor:
        """As a split part has left it, maybe cut."""
        value = settle(self._env[self._nodes[index]])
        if isinstance(value, LaneParameter):  # a parameter that the code after the last module uses
            return value.here()
        if not isinstance(value, torch.Tensor):
            node = self._nodes[index]
            raise PlanError(
                f"{node.name} ({node.meta.get('where', 'unknown place')}) is a {type(value).__name__}: only tensors can go from one "
                "stage to another"
            )
        return value
