"""Whether a schedule, made here or by hand, would run: complete, in order, its messages matched, free of deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from epl.errors import PlanError, list_problems
from epl.plan.schedule.action import MAKES_INPUT_GRAD, MAKES_WEIGHT_GRAD, MESSAGES, SENDS, Action, ActionKind
from epl.plan.schedule.replay import Sends, replay
from epl.plan.schedule.schedule import Schedule

_SHOWN = 8
Places = Mapping[Action, tuple[int, int]]
"""Where every action stands: device and index."""


def check(schedule: Schedule, sends: Sends = "buffered") -> None:
    """Nothing if the schedule would run to its end; else a PlanError with what is wrong and where.

    `sends` says what a send is taken for: over at once (buffered, or posted and waited for later), or a rendezvous that
    blocks its device until the receive is reached. 1F1B orders block each other under rendezvous; all run under buffered.
    """
    problems = _problems(schedule, sends)
    if problems:
        title = f"the schedule {schedule.name} would not run"
        if len(problems) > _SHOWN:
            title += f" ({len(problems)} reasons, of which the first {_SHOWN})"
        raise PlanError(list_problems(title, problems[:_SHOWN]))


def _problems(schedule: Schedule, sends: Sends) -> list[str]:
    # Each question is asked only of lists that passed the ones before it, so that one mistake is told once.
    if problems := [*_misplaced(schedule)]:
        return problems
    places = {action: (device, index) for device, index, action in _walk(schedule)}
    if problems := [*_incomplete(schedule, places), *_repeated(schedule)]:
        return problems
    if problems := [*_disordered(schedule, places), *_unmatched(schedule, places)]:
        return problems
    return [*_disordered_channels(schedule, places)] or [*_deadlocked(schedule, sends)]


def _walk(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for device, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            yield device, index, action


def _at(device: int, index: int, action: Action) -> str:
    return f"device {device}, action {index} ({action})"


def _misplaced(schedule: Schedule) -> Iterator[str]:
    """Stages and micro batches that do not exist, and actions on the wrong device."""
    stages, micro_batches = range(schedule.num_stages), range(schedule.num_micro_batch)
    for device, index, action in _walk(schedule):
        here = _at(device, index, action)
        if action.stage not in stages or (action.peer is not None and action.peer not in stages):
            yield f"{here}: stages are 0 to {schedule.num_stages - 1}"
        elif action.micro_batch is not None and action.micro_batch not in micro_batches:
            yield f"{here}: micro batches are 0 to {schedule.num_micro_batch - 1}"
        elif schedule.device_of(action.stage) != device:
            yield f"{here}: stage {action.stage} is on device {schedule.device_of(action.stage)}"


def _repeated(schedule: Schedule) -> Iterator[str]:
    first: dict[Action, int] = {}
    for device, index, action in _walk(schedule):
        if action in first:
            yield f"{_at(device, index, action)}: it is there already, as action {first[action]}"
        first.setdefault(action, index)


def _incomplete(schedule: Schedule, places: Places) -> Iterator[str]:
    """A forward for every stage and micro batch; a backward or both its halves, unless nothing goes backward."""
    backward = schedule.has(MAKES_INPUT_GRAD | MAKES_WEIGHT_GRAD)
    for stage, n in product(range(schedule.num_stages), range(schedule.num_micro_batch)):
        device = schedule.device_of(stage)
        whole, inputs, weights = (
            Action(kind, stage, n) for kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
        )
        halves = [half for half in (inputs, weights) if half in places]
        if (forward := Action(ActionKind.FORWARD, stage, n)) not in places:
            yield f"device {device}: {forward} is missing"
        if whole in places and halves:
            yield f"{_at(*places[halves[0]], halves[0])}: {whole} makes these gradients already"
        elif backward and whole not in places and len(halves) < 2:
            missing = {0: f"{whole} (or {inputs} and {weights})", 1: str(weights if inputs in halves else inputs)}
            yield f"device {device}: {missing[len(halves)]} is missing"
    for action, place in places.items():
        if action.kind is ActionKind.REDUCE and not backward:
            yield f"{_at(*place, action)}: without a backward there are no gradients to reduce"
    if schedule.has([ActionKind.REDUCE]):
        for stage in range(schedule.num_stages):
            if (reduction := Action(ActionKind.REDUCE, stage)) not in places:
                yield f"device {schedule.device_of(stage)}: {reduction} is missing, while other stages have theirs"


def _disordered(schedule: Schedule, places: Places) -> Iterator[str]:
    """Actions that stand before one of the same stage on which they build."""
    for device, index, action in _walk(schedule):
        for needed in _builds_on(schedule, action):
            if needed in places and places[needed][1] > index:
                yield f"{_at(device, index, action)}: it stands before {needed} (action {places[needed][1]}), which it needs"


def _builds_on(schedule: Schedule, action: Action) -> list[Action]:
    """The actions that must stand before this one on its device, if they are in the list at all."""
    stage, n = action.stage, action.micro_batch

    def own(*kinds: ActionKind) -> list[Action]:
        return [Action(kind, stage, n) for kind in kinds]

    def receives(kind: ActionKind, peers: Sequence[int]) -> list[Action]:
        return [Action(kind, stage, n, peer) for peer in peers]

    match action.kind:
        case ActionKind.FORWARD:
            return receives(ActionKind.RECEIVE_FORWARD, [made for made, used in schedule.edges if used == stage])
        case ActionKind.BACKWARD | ActionKind.INPUT_GRAD:
            users = [used for made, used in schedule.edges if made == stage]
            return [*own(ActionKind.FORWARD), *receives(ActionKind.RECEIVE_BACKWARD, users)]
        case ActionKind.WEIGHT_GRAD:
            return own(ActionKind.INPUT_GRAD)
        case ActionKind.SEND_FORWARD:
            return own(ActionKind.FORWARD)
        case ActionKind.SEND_BACKWARD:
            return own(ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
        case ActionKind.REDUCE:
            every = product((ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD), range(schedule.num_micro_batch))
            return [Action(kind, stage, each) for kind, each in every]
    return []


def _unmatched(schedule: Schedule, places: Places) -> Iterator[str]:
    """Every edge between devices has its message for every micro batch, at both ends, and there are no others."""
    if not schedule.has(MESSAGES):
        return
    for action, (device, index) in places.items():
        if not action.is_message:
            continue
        forward = action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
        edge = action.channel if forward else action.channel[::-1]
        if edge not in schedule.edges:
            yield f"{_at(device, index, action)}: the schedule has no edge {edge[0]}>{edge[1]}"
        elif not schedule.crosses(edge):
            yield f"{_at(device, index, action)}: both stages are on device {device}, which needs no message"
        elif action.mirror() not in places:
            yield f"{_at(device, index, action)}: {action.mirror()} is missing on device {schedule.device_of(action.mirror().stage)}"
    backward = schedule.has(MAKES_INPUT_GRAD)
    for (made, used), n in product(filter(schedule.crosses, schedule.edges), range(schedule.num_micro_batch)):
        needed = [Action(ActionKind.SEND_FORWARD, made, n, used)]
        needed += [Action(ActionKind.SEND_BACKWARD, used, n, made)] if backward else []
        for send in needed:
            if send not in places and send.mirror() not in places:
                yield f"device {schedule.device_of(send.stage)}: {send} is missing, and so is {send.mirror()}"


def _disordered_channels(schedule: Schedule, places: Places) -> Iterator[str]:
    """Messages from one stage to another that are received in another order than sent."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for _, _, action in _walk(schedule):
        if action.is_message:
            (sent if action.kind in SENDS else received)[action.channel].append(action)
    for channel, sends in sent.items():
        for send, receive in zip(sends, received[channel], strict=True):
            if send.mirror() != receive:
                place = _at(*places[receive], receive)
                yield f"{place}: stage {channel[0]} sends {send} at this point, and messages arrive in order"
                break


def _deadlocked(schedule: Schedule, sends: Sends) -> Iterator[str]:
    """Every device that comes to a stop, and what it waits for."""
    for device, index, awaited in replay(schedule, sends).stopped:
        action = schedule.actions[device][index]
        how = f" ({sends} sends)" if action.is_message or awaited.is_message else ""
        yield f"{_at(device, index, action)}: deadlock, it waits for {awaited} on device {schedule.device_of(awaited.stage)}{how}"
