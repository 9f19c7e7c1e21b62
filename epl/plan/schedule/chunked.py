"""The schedules with several stages (chunks of the model) per device, which take turns.

Micro batches go through the chunks in rounds: the first chunk for all of the round, then the second, and so on; backwards
the chunks come in reverse. p = 2 devices, 2 chunks, m = 4 micro batches in rounds of 2; device d has stages d and d + 2:

    0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epl.plan.batch import cut_evenly
from epl.plan.schedule.action import Action, ActionKind
from epl.plan.schedule.schedule import Schedule, chain


def interleaved(num_devices: int, num_micro_batch: int, num_chunks: int) -> Schedule:
    """1F1B with several stages per device: the bubble shrinks by `num_chunks`, the messages grow by it."""
    rounds = _rounds(num_devices, num_micro_batch)
    lists = (_one_in_one_out(device, num_devices, num_chunks, rounds) for device in range(num_devices))
    return _schedule("Interleaved", num_devices, num_micro_batch, num_chunks, lists)


def forward_only(num_devices: int, num_micro_batch: int, num_chunks: int = 1) -> Schedule:
    """All forwards and nothing else, for evaluation."""
    rounds = _rounds(num_devices, num_micro_batch)
    lists = (_forwards(_stages(device, num_devices, num_chunks), rounds) for device in range(num_devices))
    return _schedule("ForwardOnly", num_devices, num_micro_batch, num_chunks, lists)


def backward_only(num_devices: int, num_micro_batch: int, num_chunks: int = 1) -> Schedule:
    """All backwards of what `forward_only` has computed."""
    rounds = _rounds(num_devices, num_micro_batch)
    lists = (_backwards(_stages(device, num_devices, num_chunks), rounds) for device in range(num_devices))
    return _schedule("BackwardOnly", num_devices, num_micro_batch, num_chunks, lists)


def _one_in_one_out(device: int, num_devices: int, num_chunks: int, rounds: Sequence[range]) -> list[Action]:
    """Forwards ahead, then forward and backward in turn, then the backwards that are left.

    The last device starts its first backward once the first round has reached the last chunk; every device before it is
    two forwards further ahead, one for the way there and one for the way back. The first round is the longest, so in no
    round does a backward come before its forward.
    """
    stages = _stages(device, num_devices, num_chunks)
    forwards, backwards = _forwards(stages, rounds), _backwards(stages, rounds)
    ahead = (num_chunks - 1) * len(rounds[0]) + 2 * (num_devices - 1 - device)
    in_turn = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return [*forwards[:ahead], *in_turn, *backwards[max(len(forwards) - ahead, 0) :]]


def _rounds(num_devices: int, num_micro_batch: int) -> list[range]:
    """The micro batches of each round: as many rounds of at least `num_devices` as there can be, longer ones first."""
    count = max(1, num_micro_batch // max(num_devices, 1))
    return [range(start, stop) for start, stop in cut_evenly(0, max(num_micro_batch, 0), count)]


def _forwards(stages: Sequence[int], rounds: Sequence[range]) -> list[Action]:
    return [Action(ActionKind.FORWARD, stage, n) for part in rounds for stage in stages for n in part]


def _backwards(stages: Sequence[int], rounds: Sequence[range]) -> list[Action]:
    return [Action(ActionKind.BACKWARD, stage, n) for part in rounds for stage in reversed(stages) for n in part]


def _stages(device: int, num_devices: int, num_chunks: int) -> range:
    return range(device, num_devices * num_chunks, num_devices)


def _schedule(
    name: str, num_devices: int, num_micro_batch: int, num_chunks: int, lists: Iterable[Iterable[Action]]
) -> Schedule:
    num_stages = num_devices * num_chunks
    actions = tuple(tuple(actions) for actions in lists)
    return Schedule(name, num_devices, num_stages, num_micro_batch, actions, chain(num_stages))
