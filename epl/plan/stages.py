"""Which stage computes what of a recorded forward, and what travels between the stages.

A TaskGraph is a stage after all those that feed it; where that leaves a choice, they come in the order of first execution. What
a scope covers runs in its TaskGraph; for the rest:

    module          to its first consumer, through glue; if none has a stage, to its latest producer; else to the last
    glue            to its latest producer
    ... of inputs   (and constants, nothing else): wherever it is needed, since every rank of a replica has the inputs
    ... that packs  values for a consumer: beside it, since only tensors travel
    ... at random   of inputs only: to its first consumer, from where it travels: all must see the same numbers
    parameter       held wherever it is used: tied, if that is in several stages. Glue of parameters and inputs only runs
                    where their TaskGraph does; if they have none, at its first consumer. All glue of the parameters of a TaskGraph
                    without modules runs there

First and latest are by stage. A value goes directly from the stage that makes it to every stage that uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from epl.errors import PlanError, list_problems
from epl.plan.assignment import Assignment
from epl.plan.nodes import GraphNode
from epl.plan.obstacles import changed_twice, cycles, effects_astray, moved, never_executed

Edge = tuple[int, int]


@dataclass(frozen=True)
class StageCut:
    """A forward cut into stages."""

    order: tuple[str, ...]
    """The TaskGraph of every stage."""
    stages: Mapping[int, tuple[int, ...]] = field(repr=False)
    """For every node the stages that compute it (inputs, constants, parameters: that read it); several for what is
    computed wherever it is needed."""
    edges: Mapping[Edge, tuple[int, ...]]
    """(stage that makes, stage that uses): the nodes whose values travel, in order."""
    holders: Mapping[str, tuple[int, ...]] = field(repr=False)
    """Every parameter and the stages that hold it: several, if it is tied."""
    buffers: Mapping[str, tuple[int, ...]] = field(repr=False)
    """Every buffer that something uses, and the stages that use it."""
    leaves: Mapping[str, int] = field(default_factory=dict, repr=False)
    """The modules that run in one stage only, and that stage."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.order)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several stages hold."""
        return {name: stages for name, stages in self.holders.items() if len(stages) > 1}

    def nodes_of(self, stage: int) -> tuple[int, ...]:
        """The nodes that a stage computes or reads, in order of execution."""
        return tuple(index for index, stages in self.stages.items() if stage in stages)


def cut_stages(
    nodes: Sequence[GraphNode],
    *,
    taskgraphs: Sequence[str],
    parameters: Mapping[str, str | None],
    home: Collection[int] = (),
    earlier: StageCut | None = None,
    num_devices: int | None = None,
) -> StageCut:
    """The stages of these nodes, by the rules on top of this file; PlanError with all that is in the way.

    `taskgraphs` are those the model has, `parameters` all its parameters with their TaskGraphs. `home` are the nodes whose
    values the last stage wants beside what it computes itself. `earlier` is the cut by which the model was placed, for
    another recording of it: its order stands, parameters and modules stay where they are. `num_devices`, if it is smaller than the
    number of stages, is what these go round.
    """
    assert all(before.index < after.index for before, after in pairwise(nodes)), "nodes come in order of execution"
    placed = {**earlier.buffers, **earlier.holders} if earlier is not None else {}
    order = earlier.order if earlier is not None else None
    ran = earlier.leaves if earlier is not None else {}
    assignment = Assignment(nodes, parameters, order, placed, frozenset(home), ran)
    problems = [] if earlier is not None else never_executed(assignment, taskgraphs)
    if not assignment.order:
        raise PlanError(list_problems("no stage can be made", problems or ["the forward executes no TaskGraph"]))
    holders, buffers = _holders(assignment), _buffers(assignment)
    _keep_unused(holders, assignment, placed)
    problems += [
        *(cycles(assignment) or effects_astray(assignment)),
        *moved(assignment, {**buffers, **holders}, placed),
        *changed_twice(assignment, num_devices or len(assignment.order)),
    ]
    if problems:
        raise PlanError(list_problems("the TaskGraphs cannot be stages of a pipeline", problems))
    return StageCut(
        assignment.order, assignment.stages, _edges(assignment), holders, buffers, {**ran, **_leaves(assignment)}
    )


def _edges(assignment: Assignment) -> dict[Edge, tuple[int, ...]]:
    edges: dict[Edge, set[int]] = {}
    for value, stage, _ in assignment.uses():
        made = assignment.stage.get(value, stage)
        if made != stage:
            edges.setdefault((made, stage), set()).add(value)
    return {edge: tuple(sorted(values)) for edge, values in sorted(edges.items())}


def _holders(assignment: Assignment) -> dict[str, tuple[int, ...]]:
    return _by_name(
        (name, assignment.stages[node.index])
        for node in assignment.nodes.values()
        for name in ((node.name,) if node.kind == "parameter" else node.parameters)
    )


def _buffers(assignment: Assignment) -> dict[str, tuple[int, ...]]:
    return _by_name(
        (name, assignment.stages[node.index]) for node in assignment.nodes.values() for name in node.buffers
    )


def _leaves(assignment: Assignment) -> dict[str, int]:
    leaves = (node for node in assignment.nodes.values() if node.kind == "leaf")
    found = _by_name((node.name, assignment.stages[node.index]) for node in leaves)
    return {name: stages[0] for name, stages in found.items() if len(stages) == 1}


def _by_name(found: Iterable[tuple[str, Sequence[int]]]) -> dict[str, tuple[int, ...]]:
    stages: dict[str, set[int]] = {}
    for name, some in found:
        stages.setdefault(name, set()).update(some)
    return {name: tuple(sorted(each)) for name, each in stages.items()}


def _keep_unused(
    holders: dict[str, tuple[int, ...]], assignment: Assignment, placed: Mapping[str, tuple[int, ...]]
) -> None:
    """Parameters that nothing uses stay where they were placed, or go with their TaskGraph, or to the last stage."""
    for name, owner in assignment.owners.items():
        if not holders.get(name):
            stage = assignment.stage_of_taskgraph.get(owner, assignment.last) if owner is not None else assignment.last
            holders[name] = placed.get(name, (stage,))
