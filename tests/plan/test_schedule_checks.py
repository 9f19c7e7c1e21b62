"""The checker: what it lets through, and what it refuses, with place and reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epl.errors import PlanError
from epl.plan.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    Sends,
    check,
    forward_only,
    interleaved,
    make_schedule,
    prefer_backward,
    prefer_backward_optimizer,
    prefer_forward,
    zero_bubble,
)
from epl.plan.schedule.schedule import chain


@pytest.mark.parametrize("p", range(1, 7))
def test_every_generated_list_passes(p: int) -> None:
    for m in range(1, 13):
        schedules = [prefer_forward(p, m), prefer_backward(p, m), prefer_backward_optimizer(p, m), zero_bubble(p, m)]
        schedules += [make(p, m, v) for make in (interleaved, forward_only) for v in (1, 2, 3)]
        for schedule in schedules:
            check(schedule.with_communication().with_reduce())
            if m in (1, 5, 12):
                check(schedule)


@settings(max_examples=60)
@given(st.data())
def test_every_generated_list_passes_with_any_edges(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SCHEDULES))
    schedule = make_schedule(
        name, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), 1 + (name == "Interleaved")
    )
    every = [(made, used) for used in range(schedule.num_stages) for made in range(used)]
    edges = data.draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    check(schedule.with_communication(edges).with_reduce())


def test_blocking_sends_suit_prefer_forward_and_no_1f1b() -> None:
    for p, m in [(1, 3), (2, 1), (2, 2), (4, 8), (5, 3)]:
        check(prefer_forward(p, m).with_communication(), sends="rendezvous")
        check(forward_only(p, m, 1).with_communication(), sends="rendezvous")
    with pytest.raises(PlanError) as error:
        check(prefer_backward(2, 2).with_communication(), sends="rendezvous")
    assert str(error.value).splitlines() == [
        "the schedule PreferBackward would not run: 2 problems",
        "  1. device 0, action 3 (0SF1>1): deadlock, it waits for 1RF1<0 on device 1 (rendezvous sends)",
        "  2. device 1, action 3 (1SB0>0): deadlock, it waits for 0RB0<1 on device 0 (rendezvous sends)",
    ]


def test_halves_and_wholes_may_be_mixed() -> None:
    """Say, when only some stages can split their backward."""
    check(Schedule.parse("X: 2 stages on 2 devices, 1 micro batch\n0: 0F0 0B0\n1: 1F0 1I0 1W0"))


def swap(schedule: Schedule, first: str, second: str) -> Schedule:
    names = {Action.parse(first): Action.parse(second), Action.parse(second): Action.parse(first)}
    assert names.keys() <= set(schedule)
    return replace(schedule, actions=tuple(tuple(names.get(a, a) for a in actions) for actions in schedule.actions))


def drop(schedule: Schedule, *texts: str) -> Schedule:
    dropped = {Action.parse(text) for text in texts}
    assert dropped <= set(schedule)
    return replace(
        schedule, actions=tuple(tuple(a for a in actions if a not in dropped) for actions in schedule.actions)
    )


def insert(schedule: Schedule, device: int, index: int, text: str) -> Schedule:
    lists = [list(actions) for actions in schedule.actions]
    lists[device].insert(index, Action.parse(text))
    return replace(schedule, actions=tuple(map(tuple, lists)))


plain = prefer_backward(2, 2)
halved = zero_bubble(2, 2)
full = plain.with_communication().with_reduce()
skipping = prefer_backward(3, 1).with_communication([*chain(3), (0, 2)])
looped = interleaved(2, 2, 2).with_communication([*chain(4), (0, 2)])
# full: 0: 0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0RB1<1 0B1 0R
#       1: 1RF0<0 1F0 1B0 1SB0>0 1RF1<0 1F1 1B1 1SB1>0 1R

MUTILATED: dict[str, tuple[Callable[[], Schedule], list[str]]] = {
    "a forward is missing": (lambda: drop(plain, "1F1"), ["device 1: 1F1 is missing"]),
    "a backward is missing": (lambda: drop(plain, "0B1"), ["device 0: 0B1 (or 0I1 and 0W1) is missing"]),
    "a weight gradient is missing": (lambda: drop(halved, "1W1"), ["device 1: 1W1 is missing"]),
    "an input gradient is missing": (lambda: drop(halved, "1I0"), ["device 1: 1I0 is missing"]),
    "a whole device is missing": (
        lambda: replace(plain, actions=(plain.actions[0], ())),
        ["1F0 is missing", "1B0 (or 1I0 and 1W0) is missing", "1F1 is missing", "1B1 (or 1I1 and 1W1) is missing"],
    ),
    "a forward twice": (
        lambda: insert(plain, 1, 2, "1F0"),
        ["device 1, action 2 (1F0): it is there already, as action 0"],
    ),
    "a backward whole and halved": (
        lambda: insert(plain, 0, 3, "0W0"),
        ["device 0, action 3 (0W0): 0B0 makes these gradients already"],
    ),
    "a backward before its forward": (
        lambda: swap(plain, "1F1", "1B1"),
        ["device 1, action 2 (1B1): it stands before 1F1 (action 3), which it needs"],
    ),
    "a weight gradient before the input gradient": (
        lambda: swap(halved, "1I1", "1W1"),
        ["(1W1): it stands before 1I1"],
    ),
    "another device's action": (
        lambda: insert(plain, 0, 0, "1F0"),
        ["device 0, action 0 (1F0): stage 1 is on device 1"],
    ),
    "a stage that does not exist": (
        lambda: insert(plain, 0, 4, "2F0"),
        ["device 0, action 4 (2F0): stages are 0 to 1"],
    ),
    "a peer that does not exist": (lambda: insert(full, 0, 1, "0SF0>7"), ["(0SF0>7): stages are 0 to 1"]),
    "a micro batch that does not exist": (lambda: insert(plain, 0, 4, "0F2"), ["(0F2): micro batches are 0 to 1"]),
    "a send is missing": (lambda: drop(full, "0SF1>1"), ["device 1, action 4 (1RF1<0): 0SF1>1 is missing on device 0"]),
    "a receive is missing": (
        lambda: drop(full, "0RB0<1"),
        ["device 1, action 3 (1SB0>0): 0RB0<1 is missing on device 0"],
    ),
    "a message is missing at both ends": (
        lambda: drop(full, "1SB1>0", "0RB1<1"),
        ["device 1: 1SB1>0 is missing, and so is 0RB1<1"],
    ),
    "a skip's message is missing at both ends": (
        lambda: drop(skipping, "0SF0>2", "2RF0<0"),
        ["device 0: 0SF0>2 is missing, and so is 2RF0<0"],
    ),
    "a send before its value": (
        lambda: swap(full, "0F1", "0SF1>1"),
        ["device 0, action 2 (0SF1>1): it stands before 0F1"],
    ),
    "a receive after its use": (
        lambda: swap(full, "1RF1<0", "1F1"),
        ["device 1, action 4 (1F1): it stands before 1RF1<0"],
    ),
    "a gradient received after its use": (lambda: swap(full, "0RB0<1", "0B0"), ["(0B0): it stands before 0RB0<1"]),
    "a gradient sent before it is made": (lambda: swap(full, "1B0", "1SB0>0"), ["(1SB0>0): it stands before 1B0"]),
    "a message along no edge": (
        lambda: insert(insert(prefer_backward(3, 1).with_communication(), 0, 1, "0SF0>2"), 2, 0, "2RF0<0"),
        ["device 0, action 1 (0SF0>2): the schedule has no edge 0>2", "device 2, action 0 (2RF0<0)"],
    ),
    "a message the wrong way": (
        lambda: insert(insert(full, 1, 2, "1SF0>0"), 0, 4, "0RF0<1"),
        ["(0RF0<1): the schedule has no edge 1>0", "(1SF0>0): the schedule has no edge 1>0"],
    ),
    "a message on one device": (
        lambda: insert(insert(looped, 0, 1, "0SF0>2"), 0, 2, "2RF0<0"),
        ["device 0, action 1 (0SF0>2): both stages are on device 0, which needs no message", "(2RF0<0)"],
    ),
    "messages in another order": (
        lambda: Schedule.parse(
            "X: 2 stages on 2 devices, 2 micro batches\n"
            "0: 0F0 0F1 0SF1>1 0SF0>1 0RB0<1 0RB1<1 0B0 0B1\n1: 1RF0<0 1RF1<0 1F0 1F1 1B0 1B1 1SB0>0 1SB1>0"
        ),
        ["device 1, action 0 (1RF0<0): stage 0 sends 0SF1>1 at this point, and messages arrive in order"],
    ),
    "a reduction too early": (
        lambda: swap(full, "0B1", "0R"),
        ["device 0, action 7 (0R): it stands before 0B1 (action 8), which it needs"],
    ),
    "a reduction twice": (
        lambda: insert(full, 0, 9, "0R"),
        ["device 0, action 9 (0R): it is there already, as action 8"],
    ),
    "a reduction for some": (lambda: drop(full, "1R"), ["device 1: 1R is missing, while other stages have theirs"]),
    "a reduction of nothing": (
        lambda: insert(forward_only(1, 1), 0, 1, "0R"),
        ["device 0, action 1 (0R): without a backward there are no gradients to reduce"],
    ),
    "devices wait for each other": (
        lambda: Schedule.parse(
            "X: 2 stages on 2 devices, 2 micro batches\n0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1",
        ),
        [
            "device 0, action 1 (0B0): deadlock, it waits for 1B0 on device 1",
            "device 1, action 1 (1F1): deadlock, it waits for 0F1 on device 0",
        ],
    ),
    "a device waits for itself": (
        lambda: Schedule.parse("X: 2 stages on 1 device, 1 micro batch\n0: 1F0 0F0 1B0 0B0"),
        ["device 0, action 0 (1F0): deadlock, it waits for 0F0 on device 0"],
    ),
    "messages wait for each other": (
        lambda: Schedule.parse(
            "X: 2 stages on 2 devices, 2 micro batches\n"
            "0: 0F0 0SF0>1 0RB0<1 0B0 0F1 0SF1>1 0RB1<1 0B1\n1: 1RF0<0 1F0 1RF1<0 1F1 1B0 1SB0>0 1B1 1SB1>0"
        ),
        [
            "device 0, action 2 (0RB0<1): deadlock, it waits for 1SB0>0 on device 1 (buffered sends)",
            "device 1, action 2 (1RF1<0): deadlock, it waits for 0SF1>1 on device 0 (buffered sends)",
        ],
    ),
}


def told(schedule: Schedule, sends: Sends = "buffered") -> list[str]:
    with pytest.raises(PlanError) as error:
        check(schedule, sends)
    title, *lines = str(error.value).splitlines()
    name = f"the schedule {schedule.name} would not run: "
    assert title.startswith(name)
    return [line.partition(". ")[2] for line in lines] or [title.removeprefix(name)]


@pytest.mark.parametrize("how", MUTILATED)
def test_mutilated_lists_are_refused_with_place_and_reason(how: str) -> None:
    make, expected = MUTILATED[how]
    problems = told(make())
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_many_problems_are_cut_short() -> None:
    with pytest.raises(PlanError, match=r"would not run \(20 reasons, of which the first 8\): 8 problems\n") as error:
        check(replace(prefer_forward(2, 10), actions=((), prefer_forward(2, 10).actions[1])))
    assert len(str(error.value).splitlines()) == 9


@settings(max_examples=150)
@given(st.data())
def test_no_list_loses_or_repeats_an_action_unnoticed(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SCHEDULES))
    schedule = make_schedule(
        name, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), 1 + (name == "Interleaved")
    )
    schedule = schedule.with_communication().with_reduce()
    device = data.draw(st.integers(0, schedule.num_devices - 1))
    actions = list(schedule.actions[device])
    index = data.draw(st.integers(0, len(actions) - 1))
    if data.draw(st.booleans()):
        actions.insert(data.draw(st.integers(0, len(actions))), actions[index])
    else:
        # A lone stage may go without its reduction: then nothing is to be reduced.
        if schedule.num_stages == 1 and actions[index] == Action.parse("0R"):
            return
        del actions[index]
    with pytest.raises(PlanError):
        check(replace(schedule, actions=(*schedule.actions[:device], tuple(actions), *schedule.actions[device + 1 :])))


@settings(max_examples=150)
@given(st.data())
def test_what_passes_runs_to_its_end(data: st.DataObject) -> None:
    """Any order of one device's list is either refused, or an eager walk over all lists takes every action once."""
    name = data.draw(st.sampled_from(SCHEDULES))
    schedule = make_schedule(
        name, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), 1 + (name == "Interleaved")
    )
    schedule = schedule.with_communication()
    device = data.draw(st.integers(0, schedule.num_devices - 1))
    actions = list(schedule.actions[device])
    here, there = data.draw(st.integers(0, len(actions) - 1)), data.draw(st.integers(0, len(actions) - 1))
    actions.insert(there, actions.pop(here))
    changed = replace(schedule, actions=(*schedule.actions[:device], tuple(actions), *schedule.actions[device + 1 :]))
    try:
        check(changed)
    except PlanError:
        assert changed != schedule
        return
    assert walk(changed)


def walk(schedule: Schedule) -> bool:
    """Whether queues of values, kept per pair of stages, let every device come to the end of its list with right values."""
    lists = [list(actions) for actions in schedule.actions]
    queues: dict[tuple[int, int], list[int | None]] = {}
    have: set[str] = set()
    moved = True
    while moved:
        moved = False
        for actions in lists:
            while actions:
                action = actions[0]
                if action.kind in ("RF", "RB"):
                    queue = queues.get(action.channel, [])
                    if not queue:
                        break
                    assert queue.pop(0) == action.micro_batch
                elif action.kind in ("SF", "SB"):
                    queues.setdefault(action.channel, []).append(action.micro_batch)
                have.add(str(actions.pop(0)))
                moved = True
    return not any(lists) and not any(queues.values()) and len(have) == sum(map(len, schedule.actions))
