"""Schedules in time."""

from __future__ import annotations

from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epl.errors import PlanError
from epl.plan.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    forward_only,
    make_schedule,
    prefer_backward,
    simulate,
    zero_bubble,
)

K = ActionKind
duration = st.floats(0.0, 10.0, allow_subnormal=False)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULES))
    chunks = draw(st.integers(2, 3)) if name == "Interleaved" else 1
    schedule = make_schedule(name, draw(st.integers(1, 4)), draw(st.integers(1, 6)), chunks)
    return schedule.with_communication().with_reduce() if draw(st.booleans()) else schedule


@st.composite
def timed_schedules(draw: st.DrawFn) -> tuple[Schedule, dict[str, list[float]], float]:
    schedule = draw(schedules())
    per_stage = st.lists(duration, min_size=schedule.num_stages, max_size=schedule.num_stages)
    return schedule, {kind: draw(per_stage) for kind in ("forward", "backward", "weight")}, draw(duration)


def longest_path(schedule: Schedule, times: dict[str, list[float]], link: float) -> float:
    """The end of the longest chain of computations: along a device, and along the model forward and back."""
    lists = schedule.compute_only().actions
    device = {action: number for number, actions in enumerate(lists) for action in actions}
    before: dict[Action, set[Action]] = {action: set() for action in device}
    for actions in lists:
        for earlier, later in pairwise(actions):
            before[later].add(earlier)
    for action in device:
        step = {K.FORWARD: -1, K.BACKWARD: 1, K.INPUT_GRAD: 1}.get(action.kind, 0)
        neighbour = Action(action.kind, action.stage + step, action.micro_batch)
        if step and neighbour in before:
            before[action].add(neighbour)

    def seconds(action: Action) -> float:
        forward, backward, weight = (times[kind][action.stage] for kind in ("forward", "backward", "weight"))
        return {K.FORWARD: forward, K.BACKWARD: backward + weight, K.INPUT_GRAD: backward, K.WEIGHT_GRAD: weight}[
            action.kind
        ]

    end: dict[Action, float] = {}
    for action in TopologicalSorter(before).static_order():
        arrivals = [end[b] + link * (device[b] != device[action]) for b in before[action]]
        end[action] = max(arrivals, default=0.0) + seconds(action)
    return max(end.values())


@settings(max_examples=150)
@given(timed_schedules())
def test_makespan_is_the_longest_path(case: tuple[Schedule, dict[str, list[float]], float]) -> None:
    schedule, times, link = case
    assert simulate(schedule, **times, link=link).makespan == longest_path(schedule, times, link)


@settings(max_examples=100)
@given(timed_schedules(), st.data())
def test_makespan_never_shrinks_when_something_takes_longer(
    case: tuple[Schedule, dict[str, list[float]], float], data: st.DataObject
) -> None:
    schedule, times, link = case
    before = simulate(schedule, **times, link=link).makespan
    kind, stage = data.draw(st.sampled_from(sorted(times))), data.draw(st.integers(0, schedule.num_stages - 1))
    longer = {name: list(values) for name, values in times.items()}
    longer[kind][stage] += data.draw(duration)
    assert simulate(schedule, **longer, link=link).makespan >= before
    assert simulate(schedule, **times, link=link + data.draw(duration)).makespan >= before


@settings(max_examples=100)
@given(timed_schedules())
def test_what_must_hold_for_any_schedule_in_time(case: tuple[Schedule, dict[str, list[float]], float]) -> None:
    schedule, times, link = case
    result = simulate(schedule, **times, link=link)
    assert [tuple(timed.action for timed in actions) for actions in result.devices] == list(schedule.actions)
    for actions, bubble, live in zip(result.devices, result.bubbles, result.peak_live, strict=True):
        assert all(earlier.end <= later.start for earlier, later in pairwise(actions))
        assert all(0 <= timed.start <= timed.end <= result.makespan for timed in actions)
        assert -1e-9 <= bubble <= 1
        assert 1 <= live <= schedule.num_micro_batch * schedule.num_stages // schedule.num_devices


@settings(max_examples=50)
@given(schedules(), duration)
def test_messages_and_reductions_take_no_time_of_a_device(schedule: Schedule, link: float) -> None:
    full, bare = schedule.with_communication().with_reduce(), schedule.compute_only()
    with_messages, without = simulate(full, link=link), simulate(bare, link=link)
    assert with_messages.makespan == without.makespan
    assert with_messages.bubbles == without.bubbles
    assert with_messages.peak_live == without.peak_live


def test_a_small_case_by_hand() -> None:
    """Two devices, two micro batches, a link of half a unit.

    0 | 0F0 0F1 · · · · · 0B0 0B0 · 0B1 …        1F0 starts at 1.5, 1B0 at 2.5, so its gradient is there at 5.0
    """
    result = simulate(prefer_backward(2, 2), link=0.5)
    starts = {str(timed.action): timed.start for actions in result.devices for timed in actions}
    assert starts == {"0F0": 0, "0F1": 1, "1F0": 1.5, "1B0": 2.5, "1F1": 4.5, "0B0": 5.0, "1B1": 5.5, "0B1": 8.0}
    assert result.makespan == 10.0
    assert result.bubbles == (pytest.approx(0.4), pytest.approx(0.4))
    assert result.bubble == pytest.approx(0.4)


def test_a_receive_ends_when_the_value_is_there() -> None:
    result = simulate(prefer_backward(2, 1).with_communication(), link=2.0)
    times = {str(timed.action): (timed.start, timed.end) for actions in result.devices for timed in actions}
    assert times["0SF0>1"] == (1.0, 1.0)
    assert times["1RF0<0"] == (3.0, 3.0)
    assert times["1F0"] == (3.0, 4.0)


def test_a_slow_stage_sets_the_pace() -> None:
    result = simulate(forward_only(3, 10), forward=[1.0, 5.0, 1.0])
    assert result.makespan == 1 + 10 * 5 + 1
    assert result.bubbles[1] == pytest.approx(2 / 52)


def test_no_time_at_all_is_no_bubble() -> None:
    result = simulate(zero_bubble(2, 2), forward=0.0, backward=0.0, weight=0.0)
    assert (result.makespan, result.bubbles) == (0.0, (0.0, 0.0))


@pytest.mark.parametrize("wrong", [[1.0], [1.0, 2.0, 3.0], -1.0, [1.0, -2.0]])
def test_durations_that_do_not_fit(wrong: float | list[float]) -> None:
    with pytest.raises(PlanError, match="weight is one duration of at least 0, or one for each of 2 stages; found"):
        simulate(prefer_backward(2, 2), weight=wrong)


def test_a_schedule_that_stops_is_refused() -> None:
    schedule = Schedule.parse("X: 2 stages on 2 devices, 1 micro batch\n0: 0B0 0F0\n1: 1F0 1B0")
    with pytest.raises(PlanError, match=r"X comes to a stop: device 0, action 0 \(0B0\) waits for 0F0"):
        simulate(schedule)
