"""The schedules with one stage per device. p = 3 devices, m = 4 micro batches; a backward takes one slot here:

PreferForward             0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
all forwards first        1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
                          2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

PreferBackward            0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
a backward as soon as     1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
there is one              2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

PreferBackwardOptimizer   0 | F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
a forward further ahead:  1 | .  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
late links stall it less  2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

ZeroBubble (ZB-H1)        0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
weight gradients fill     1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
the wait for inputs       2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from epl.plan.schedule.action import Action, ActionKind
from epl.plan.schedule.schedule import Schedule, chain


def prefer_forward(num_devices: int, num_micro_batch: int) -> Schedule:
    """All forwards, then all backwards (GPipe): every micro batch is alive at once."""
    micro_batches = range(num_micro_batch)
    lists = (
        [
            *(Action(ActionKind.FORWARD, stage, n) for n in micro_batches),
            *(Action(ActionKind.BACKWARD, stage, n) for n in micro_batches),
        ]
        for stage in range(num_devices)
    )
    return _one_stage_each("PreferForward", num_devices, num_micro_batch, lists)


def prefer_backward(num_devices: int, num_micro_batch: int) -> Schedule:
    """One forward, one backward (1F1B): at most p − rank micro batches are alive."""
    lists = (_ahead(stage, num_micro_batch, num_devices - 1 - stage) for stage in range(num_devices))
    return _one_stage_each("PreferBackward", num_devices, num_micro_batch, lists)


def prefer_backward_optimizer(num_devices: int, num_micro_batch: int) -> Schedule:
    """PreferBackward with one more forward ahead on all but the last device, and one more micro batch alive there."""
    last = num_devices - 1
    lists = (_ahead(stage, num_micro_batch, 0 if stage == last else last - stage + 1) for stage in range(num_devices))
    return _one_stage_each("PreferBackwardOptimizer", num_devices, num_micro_batch, lists)


def zero_bubble(num_devices: int, num_micro_batch: int) -> Schedule:
    """1F1B with halved backwards (ZB-H1): `rank` weight gradients are put off, and fill the wait at the end."""
    lists = (_halved(stage, num_micro_batch, num_devices - stage) for stage in range(num_devices))
    return _one_stage_each("ZeroBubble", num_devices, num_micro_batch, lists)


def _ahead(stage: int, num_micro_batch: int, ahead: int) -> Iterator[Action]:
    """`ahead` forwards, then forward and backward in turn, then the backwards that are left."""
    for n in range(min(ahead, num_micro_batch)):
        yield Action(ActionKind.FORWARD, stage, n)
    for n in range(num_micro_batch):
        if n + ahead < num_micro_batch:
            yield Action(ActionKind.FORWARD, stage, n + ahead)
        yield Action(ActionKind.BACKWARD, stage, n)


def _halved(stage: int, num_micro_batch: int, ahead: int) -> Iterator[Action]:
    """`ahead` forwards, then input gradient, the weight gradient put off longest, and forward in turn."""
    put_off = stage
    for n in range(min(ahead, num_micro_batch)):
        yield Action(ActionKind.FORWARD, stage, n)
    for n in range(num_micro_batch):
        yield Action(ActionKind.INPUT_GRAD, stage, n)
        if n >= put_off:
            yield Action(ActionKind.WEIGHT_GRAD, stage, n - put_off)
        if n + ahead < num_micro_batch:
            yield Action(ActionKind.FORWARD, stage, n + ahead)
    for n in range(max(num_micro_batch - put_off, 0), num_micro_batch):
        yield Action(ActionKind.WEIGHT_GRAD, stage, n)


def _one_stage_each(name: str, num_devices: int, num_micro_batch: int, lists: Iterable[Iterable[Action]]) -> Schedule:
    actions = tuple(tuple(actions) for actions in lists)
    return Schedule(name, num_devices, num_devices, num_micro_batch, actions, chain(num_devices))
