"""Which devices each TaskGraph gets, replica by replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from epl.errors import PlanError, list_problems
from epl.plan.spec import ClusterShape, Kind, PlanSettings, TaskGraphSpec

Layout = Literal["single", "colocated", "staged"]
"""How the TaskGraphs of a model replica share its devices:

single      there is one process, and everything is on its device
colocated   all TaskGraphs share the same k devices; also the case of one TaskGraph, which has its k for itself
staged      every TaskGraph has devices of its own (several take turns on them when interleaved)
"""


@dataclass(frozen=True)
class PlacedTaskGraph:
    """A TaskGraph and its ranks in every model replica."""

    name: str
    kind: Kind
    device_count: int
    devices: tuple[tuple[int, ...], ...]
    """For each replica the ranks that compute it, in order."""

    @property
    def strategy(self) -> str:
        """Its strategy, as in `replicate(2)`."""
        return f"{self.kind}({self.device_count})"

    @property
    def width(self) -> int:
        """How many ranks compute it in one replica; on a single process 1, whatever was asked for."""
        return len(self.devices[0])


@dataclass(frozen=True)
class Placement:
    """The layout and the devices of all TaskGraphs."""

    layout: Layout
    taskgraphs: tuple[PlacedTaskGraph, ...]


def device_order(cluster: ClusterShape, prefer_intra_node: bool) -> list[int]:
    """The ranks in the order in which devices are dealt out, replica by replica and TaskGraph by TaskGraph.

    Node by node keeps a model replica inside a node. By the index within the node, first of every node first, a replica
    spans nodes and the replicas of one TaskGraph, which exchange gradients, sit together:

        2 nodes × 2 devices, 2 stages     node by node: 0 1 2 3     stage_0 on 0, 2    stage_1 on 1, 3
                                          by index:     0 2 1 3     stage_0 on 0, 1    stage_1 on 2, 3
    """
    seen: Counter[int] = Counter()
    place: list[tuple[int, int]] = []
    for node in cluster.node_of_rank:
        place.append((node, seen[node]))
        seen[node] += 1
    ranks = range(cluster.world_size)
    if prefer_intra_node:
        return sorted(ranks, key=lambda rank: place[rank])
    return sorted(ranks, key=lambda rank: (place[rank][1], place[rank][0]))


def place(specs: Sequence[TaskGraphSpec], cluster: ClusterShape, settings: PlanSettings) -> Placement:
    """The devices of every TaskGraph; PlanError with the arithmetic when they do not come out even."""
    if cluster.world_size == 1:
        return Placement("single", tuple(_placed(spec, ((0,),)) for spec in specs))
    if settings.num_chunks > 1:
        _check_interleaved(specs, settings.num_chunks)
    colocated = settings.colocate or len(specs) == 1
    slots = _shared_slots(specs) if colocated else _own_slots(specs, settings.num_chunks)
    size = max(stop for _, stop in slots)
    if cluster.world_size % size:
        raise PlanError(_does_not_divide(specs, size, cluster.world_size, colocated, settings.num_chunks))
    order = device_order(cluster, settings.prefer_intra_node)
    replicas = [order[start : start + size] for start in range(0, cluster.world_size, size)]
    placed = tuple(
        _placed(spec, tuple(tuple(ranks[start:stop]) for ranks in replicas))
        for spec, (start, stop) in zip(specs, slots, strict=True)
    )
    return Placement("colocated" if colocated else "staged", placed)


def _placed(spec: TaskGraphSpec, devices: tuple[tuple[int, ...], ...]) -> PlacedTaskGraph:
    return PlacedTaskGraph(spec.name, spec.kind, spec.device_count, devices)


def _shared_slots(specs: Sequence[TaskGraphSpec]) -> list[tuple[int, int]]:
    """Positions [start, stop) among a replica's devices when all TaskGraphs share all of them."""
    counts = Counter(spec.device_count for spec in specs)
    k, agreeing = counts.most_common(1)[0]
    others = [spec for spec in specs if spec.device_count != k]
    if others:
        title = (
            "with cluster.colocate_split_and_replicate all TaskGraphs share the same devices, so every device_count "
            f"must be the same; {agreeing} of {len(specs)} TaskGraphs have {k}, but"
        )
        problems = [f"{spec.name!r} is {spec.strategy}: make it {spec.kind}({k})" for spec in others]
        raise PlanError(list_problems(title, problems))
    return [(0, k) for _ in specs]


def _own_slots(specs: Sequence[TaskGraphSpec], num_chunks: int) -> list[tuple[int, int]]:
    """Positions [start, stop) among a replica's devices when each TaskGraph has its own; interleaved, the TaskGraphs
    go round the devices `num_chunks` times."""
    distinct = len(specs) // num_chunks
    starts = [sum(spec.device_count for spec in specs[:i]) for i in range(distinct)]
    return [(starts[i % distinct], starts[i % distinct] + spec.device_count) for i, spec in enumerate(specs)]


def _check_interleaved(specs: Sequence[TaskGraphSpec], num_chunks: int) -> None:
    problems = []
    if len(specs) % num_chunks:
        problems.append(
            f"the {len(specs)} TaskGraphs must be a multiple of pipeline.num_chunks = {num_chunks}: "
            f"cut the model into {_nearest(len(specs), num_chunks)} TaskGraphs"
        )
    if len({spec.device_count for spec in specs}) > 1:
        found = ", ".join(f"{spec.name}: {spec.device_count}" for spec in specs)
        problems.append(f"all TaskGraphs must have the same device_count, since they take turns; found {found}")
    if problems:
        raise PlanError(list_problems(f"interleaved stages (pipeline.num_chunks = {num_chunks})", problems))


def _does_not_divide(
    specs: Sequence[TaskGraphSpec], size: int, world_size: int, colocated: bool, num_chunks: int
) -> str:
    if colocated:
        names = ", ".join(spec.name for spec in specs)
        arithmetic = f"{size} device{'s' * (size > 1)} ({'shared by ' if len(specs) > 1 else ''}{names})"
    else:
        terms = " + ".join(f"{spec.device_count} ({spec.name})" for spec in specs)
        if num_chunks > 1:
            arithmetic = f"({terms}) / {num_chunks} chunks = {size} devices"
        else:
            arithmetic = f"{terms} = {size} devices"
    return (
        f"one model replica takes {arithmetic}, and {world_size} devices are not a multiple of {size}: "
        f"start {_nearest(world_size, size)} devices, or change device_count"
    )


def _nearest(total: int, unit: int) -> str:
    """The multiples of unit on both sides of total, which is not one itself."""
    below = total // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
