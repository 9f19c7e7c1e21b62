"""Where messages and reductions belong in a device's list of computations."""

from __future__ import annotations

from collections.abc import Sequence

from epl.plan.schedule.action import MAKES_INPUT_GRAD, MAKES_WEIGHT_GRAD, SENDS, Action, ActionKind


def insert_messages(actions: Sequence[Action], edges: Sequence[tuple[int, int]]) -> tuple[Action, ...]:
    """The actions with a receive before every computation that needs a value of another device and a send after every
    one that makes one; the edges are (making stage, using stage), those between devices only."""
    result: list[Action] = []
    for action in actions:
        stage, micro_batch = action.stage, action.micro_batch
        makers = [made for made, used in edges if used == stage]
        users = [used for made, used in edges if made == stage]
        if action.kind is ActionKind.FORWARD:
            before = [Action(ActionKind.RECEIVE_FORWARD, stage, micro_batch, maker) for maker in makers]
            after = [Action(ActionKind.SEND_FORWARD, stage, micro_batch, user) for user in users]
        elif action.kind in MAKES_INPUT_GRAD:
            before = [Action(ActionKind.RECEIVE_BACKWARD, stage, micro_batch, user) for user in users]
            after = [Action(ActionKind.SEND_BACKWARD, stage, micro_batch, maker) for maker in makers]
        else:
            before = after = []
        result += [*before, action, *after]
    return tuple(result)


def insert_reductions(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The actions with one reduction per stage: after its last weight gradient and the sends that follow it, since
    another stage waits for those."""
    bare = [action for action in actions if action.kind is not ActionKind.REDUCE]
    last = {action.stage: index for index, action in enumerate(bare) if action.kind in MAKES_WEIGHT_GRAD}
    due: dict[int, list[Action]] = {}
    for stage, index in last.items():
        while index + 1 < len(bare) and bare[index + 1].kind in SENDS:
            index += 1
        due.setdefault(index, []).append(Action(ActionKind.REDUCE, stage))
    return tuple(step for index, action in enumerate(bare) for step in [action, *due.get(index, [])])
