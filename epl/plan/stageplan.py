"""The stages of a plan as a table: what each computes, holds and waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epl.plan.schedule import ActionKind, Schedule, Simulation, simulate
from epl.plan.schedule.action import MAKES_INPUT_GRAD, MAKES_WEIGHT_GRAD
from epl.plan.table import compact_names, size, table

_SMALLEST_SHARE = 1e-3
"""Of the time: a stage that takes none would have no place in a schedule."""


@dataclass(frozen=True)
class StagePlan:
    """What is known of one stage before it runs."""

    taskgraph: str
    modules: tuple[str, ...]
    """The modules it calls, and parameters that it uses outside of them."""
    parameters: int
    """Elements of the parameters it holds; a tied one counts in each of its stages."""
    tied: tuple[str, ...] = ()
    """Those of its parameters that other stages hold too."""
    time: float | None = None
    """Its share of the time of a forward pass, estimated."""
    activations: int | None = None
    """Bytes it keeps of one micro batch until its backward, estimated."""


def live_micro_batches(schedule: Schedule) -> tuple[int, ...]:
    """For each stage the most micro batches whose activations it keeps at once."""
    kept = schedule.has(MAKES_INPUT_GRAD)
    live, peaks = [0] * schedule.num_stages, [0] * schedule.num_stages
    for action in schedule:
        if action.kind is ActionKind.FORWARD:
            peaks[action.stage] = max(peaks[action.stage], live[action.stage] + 1)
            live[action.stage] += kept
        elif action.kind in MAKES_WEIGHT_GRAD:
            live[action.stage] -= 1
    return tuple(peaks)


def simulate_stages(schedule: Schedule, stages: Sequence[StagePlan]) -> Simulation:
    """The schedule in time, a backward taking twice its forward; stages of unknown time are taken as equally long."""
    times = [stage.time for stage in stages]
    known = [max(time, _SMALLEST_SHARE) for time in times if time is not None]
    seconds = known if len(known) == len(times) else [1.0] * len(times)
    return simulate(schedule, forward=seconds, backward=seconds, weight=seconds)


def describe_stages(
    stages: Sequence[StagePlan], schedule: Schedule, strategies: Sequence[str], devices: Sequence[str]
) -> str:
    """The table of the stages, and a line about the schedule."""
    live = live_micro_batches(schedule)
    heading = (
        "stage",
        "TaskGraph",
        "strategy",
        "devices of each replica",
        "modules",
        "parameters",
        "time",
        "activations",
    )
    rows = [heading]
    for number, stage in enumerate(stages):
        time = "-" if stage.time is None else f"{stage.time:.0%}"
        cells = (str(number), stage.taskgraph, strategies[number], devices[number], compact_names(stage.modules))
        rows.append((*cells, f"{stage.parameters:,}", time, _activations(live[number], stage.activations)))
    lines = [table(rows, right=(5, 6))]
    lines += [
        f"tied: {name} is held by stages {', '.join(str(n) for n, stage in enumerate(stages) if name in stage.tied)}"
        for name in dict.fromkeys(name for stage in stages for name in stage.tied)
    ]
    bubble = simulate_stages(schedule, stages).bubble
    micro_batches = f"{schedule.num_micro_batch} micro batch{'es' * (schedule.num_micro_batch != 1)}"
    return "\n".join([*lines, f"schedule: {schedule.name}, {micro_batches}; devices idle {bubble:.0%} of the time"])


def _activations(live: int, each: int | None) -> str:
    count = f"{live} micro batch{'es' * (live != 1)}"
    return count if each is None else f"{count}, {size(live * each)}"
