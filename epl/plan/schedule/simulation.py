"""How long a schedule would take, where its devices would idle, and how many micro batches they would hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epl.errors import PlanError
from epl.plan.schedule.action import MAKES_INPUT_GRAD, MAKES_WEIGHT_GRAD, Action, ActionKind
from epl.plan.schedule.replay import Dependencies, replay
from epl.plan.schedule.schedule import Schedule

Durations = float | Sequence[float]
"""Of one micro batch: the same for every stage, or one for each."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action and when it would happen; messages and reductions take no time of the device."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule in time."""

    schedule: Schedule
    devices: tuple[tuple[TimedAction, ...], ...] = field(repr=False)
    """For each device its actions, in order."""
    makespan: float
    """When the last device is done."""
    bubbles: tuple[float, ...]
    """For each device the fraction of the makespan in which it computes nothing."""
    peak_live: tuple[int, ...]
    """For each device how many micro batches it holds at most, counted per stage: from the forward until the weight
    gradient is made."""

    @property
    def bubble(self) -> float:
        """The fraction of all devices' time in which they compute nothing."""
        return sum(self.bubbles) / len(self.bubbles)


def simulate(
    schedule: Schedule,
    *,
    forward: Durations = 1.0,
    backward: Durations = 1.0,
    weight: Durations = 1.0,
    link: float = 0.0,
) -> Simulation:
    """The schedule in time: an action starts when its device is free and what it needs is there.

    `backward` is the time of the input gradients, `weight` that of the weight gradients; a whole backward takes both.
    `link` is how long a value travels between devices, while they compute on.
    """
    seconds = _seconds(schedule, forward, backward, weight)
    run = replay(schedule)
    if run.stopped:
        device, index, awaited = run.stopped[0]
        action = schedule.actions[device][index]
        raise PlanError(
            f"{schedule.name} comes to a stop: device {device}, action {index} ({action}) waits for {awaited}"
        )
    dependencies = Dependencies(schedule)
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.num_devices
    timed: list[list[TimedAction]] = [[] for _ in free]
    for action in run.order:
        device = schedule.device_of(action.stage)
        start = free[device]
        for needed in dependencies.of(action):
            travels = schedule.device_of(needed.stage) != device
            start = max(start, ends[needed] + link if travels else ends[needed])
        end = start + (seconds[action.kind][action.stage] if action.is_compute else 0.0)
        free[device] = ends[action] = end
        timed[device].append(TimedAction(action, start, end))
    makespan = max(free)
    busy = [sum(each.end - each.start for each in actions) for actions in timed]
    bubbles = tuple(1.0 - time / makespan if makespan > 0 else 0.0 for time in busy)
    return Simulation(schedule, tuple(map(tuple, timed)), makespan, bubbles, peak_live(schedule))


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """For each device the most micro batches whose activations it holds at once, counted per stage.

    A forward that no backward follows (evaluation) holds its own only while it runs.
    """
    kept = schedule.has(MAKES_INPUT_GRAD)
    peaks = []
    for actions in schedule.actions:
        live = peak = 0
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                live, peak = live + kept, max(peak, live + 1)
            elif action.kind in MAKES_WEIGHT_GRAD:
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def _seconds(
    schedule: Schedule, forward: Durations, backward: Durations, weight: Durations
) -> dict[ActionKind, list[float]]:
    given = {"forward": forward, "backward": backward, "weight": weight}
    tables: dict[str, list[float]] = {}
    for name, durations in given.items():
        table = [*durations] if isinstance(durations, Sequence) else [durations] * schedule.num_stages
        if len(table) != schedule.num_stages or any(each < 0 for each in table):
            raise PlanError(
                f"{name} is one duration of at least 0, or one for each of {schedule.num_stages} stages; found {durations}"
            )
        tables[name] = table
    return {
        ActionKind.FORWARD: tables["forward"],
        ActionKind.BACKWARD: [i + w for i, w in zip(tables["backward"], tables["weight"], strict=True)],
        ActionKind.INPUT_GRAD: tables["backward"],
        ActionKind.WEIGHT_GRAD: tables["weight"],
    }
