"""An order in which the actions of a schedule can happen, or where they come to a stop."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from epl.plan.schedule.action import MAKES_INPUT_GRAD, RECEIVES, SENDS, Action, ActionKind
from epl.plan.schedule.schedule import Schedule

Sends = Literal["buffered", "rendezvous"]
"""When a send is over: at once (buffered or asynchronous), or only when its receive has been reached (rendezvous)."""


class Dependencies:
    """What must have happened before an action can, beyond the actions before it on its own device."""

    def __init__(self, schedule: Schedule) -> None:
        self._makers: dict[int, list[int]] = defaultdict(list)
        self._users: dict[int, list[int]] = defaultdict(list)
        for made, used in schedule.edges:
            self._makers[used].append(made)
            self._users[made].append(used)
        self._input_grads = {(a.stage, a.micro_batch): a for a in schedule if a.kind in MAKES_INPUT_GRAD}

    def of(self, action: Action) -> list[Action]:
        """The actions whose results it uses; one that the schedule lacks never happens."""
        stage, n = action.stage, action.micro_batch
        if action.kind is ActionKind.FORWARD:
            return [Action(ActionKind.FORWARD, maker, n) for maker in self._makers[stage]]
        if action.kind in MAKES_INPUT_GRAD:
            return [Action(ActionKind.FORWARD, stage, n), *(self._input_grad(user, n) for user in self._users[stage])]
        if action.kind is ActionKind.WEIGHT_GRAD:
            return [Action(ActionKind.INPUT_GRAD, stage, n)]
        if action.kind is ActionKind.SEND_FORWARD:
            return [Action(ActionKind.FORWARD, stage, n)]
        if action.kind is ActionKind.SEND_BACKWARD:
            return [self._input_grad(stage, n)]
        return [action.mirror()] if action.kind in RECEIVES else []

    def _input_grad(self, stage: int, micro_batch: int | None) -> Action:
        return self._input_grads.get((stage, micro_batch)) or Action(ActionKind.BACKWARD, stage, micro_batch)


@dataclass(frozen=True)
class Replay:
    """How far a schedule can run."""

    order: tuple[Action, ...]
    """The actions that happen, in an order that respects devices and dependencies."""
    stopped: tuple[tuple[int, int, Action], ...]
    """Where it can go no further: device, index of the action it stands at, and what that waits for. Empty if it ends."""


def replay(schedule: Schedule, sends: Sends = "buffered") -> Replay:
    """Let every device act as far as it can, again and again, until all is done or nobody can go on."""
    dependencies = Dependencies(schedule)
    order: list[Action] = []
    done: set[Action] = set()
    position = [0] * schedule.num_devices

    def stands_at(device: int) -> Action | None:
        actions = schedule.actions[device]
        return actions[position[device]] if position[device] < len(actions) else None

    def waits_for(action: Action) -> Action | None:
        for needed in dependencies.of(action):
            if needed not in done:
                return needed
        if sends == "rendezvous" and action.kind in SENDS:
            receive = action.mirror()
            return None if stands_at(schedule.device_of(receive.stage)) == receive else receive
        return None

    moved = True
    while moved:
        moved = False
        for device in range(schedule.num_devices):
            while (action := stands_at(device)) is not None and waits_for(action) is None:
                order.append(action)
                done.add(action)
                position[device] += 1
                moved = True
    stopped = [
        (device, position[device], waiting)
        for device in range(schedule.num_devices)
        if (action := stands_at(device)) is not None and (waiting := waits_for(action)) is not None
    ]
    return Replay(tuple(order), tuple(stopped))
