"""What goes from one TaskGraph to another in a recorded call, in bytes for a micro batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from epl.graph.record import RecordedCall
from epl.plan.bridges import LOOP, Crossing
from epl.plan.stages import StageCut


def stage_crossings(recorded: RecordedCall, cut: StageCut, micro_batches: int) -> list[Crossing]:
    """Between the stages of a cut."""
    nodes = recorded.whole.nodes
    return [
        _crossing(recorded, cut.order[maker], cut.order[user], [nodes[i] for i in travelling], micro_batches, 1)
        for (maker, user), travelling in cut.edges.items()
    ]


def module_crossings(recorded: RecordedCall, micro_batches: int, ranks: int) -> list[Crossing]:
    """Between modules of different TaskGraphs on shared devices, and on to the loop; glue belongs with its latest producer.

    `ranks`: how many have rows of their own, of which the recorded call has one's.
    """
    maker: dict[fx.Node, str | None] = {}
    found: dict[tuple[str, str], list[fx.Node]] = {}
    for node in recorded.whole.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_module":
            taskgraph = node.meta.get("taskgraph")
            for value in inputs:
                source = maker.get(value)
                if source is not None and taskgraph is not None and source != taskgraph:
                    found.setdefault((source, taskgraph), []).append(value)
            maker[node] = taskgraph
        else:
            maker[node] = next((maker[value] for value in reversed(inputs) if maker.get(value) is not None), None)
    for value in recorded.frontier:
        source = maker.get(value)
        if source is not None:
            found.setdefault((source, LOOP), []).append(value)
    return [
        _crossing(recorded, source, target, values, micro_batches, ranks) for (source, target), values in found.items()
    ]


def _crossing(
    recorded: RecordedCall, source: str, target: str, values: Iterable[fx.Node], micro_batches: int, ranks: int
) -> Crossing:
    forward = backward = 0
    for value in dict.fromkeys(values):
        for nbytes, has_gradient in _sizes(value):
            if recorded.depends_on_batch(value):
                nbytes = nbytes * ranks // micro_batches
            forward += nbytes
            backward += nbytes * has_gradient
    return Crossing(source, target, forward, backward)


def _sizes(value: fx.Node) -> Iterator[tuple[int, bool]]:
    specs = value.meta.get("specs") or ((value.meta["spec"],) if value.meta.get("spec") is not None else ())
    return ((spec.nbytes, spec.requires_grad) for spec in specs)
