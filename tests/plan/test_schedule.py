"""Actions and schedules as data: their text, their edges, and where messages and reductions go."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epl.errors import PlanError
from epl.plan.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    check,
    forward_only,
    interleaved,
    make_schedule,
    prefer_backward,
    prefer_forward,
    zero_bubble,
)
from epl.plan.schedule.action import MESSAGES
from epl.plan.schedule.schedule import chain

K = ActionKind
GOLDEN = Path(__file__).parent / "golden"
number = st.integers(0, 999)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(K.FORWARD, 2, 3), "2F3"),
        (Action(K.BACKWARD, 2, 3), "2B3"),
        (Action(K.INPUT_GRAD, 2, 3), "2I3"),
        (Action(K.WEIGHT_GRAD, 2, 3), "2W3"),
        (Action(K.SEND_FORWARD, 2, 3, 3), "2SF3>3"),
        (Action(K.RECEIVE_FORWARD, 3, 3, 2), "3RF3<2"),
        (Action(K.SEND_BACKWARD, 3, 3, 2), "3SB3>2"),
        (Action(K.RECEIVE_BACKWARD, 2, 3, 3), "2RB3<3"),
        (Action(K.REDUCE, 2), "2R"),
    ],
)
def test_text_of_an_action(action: Action, text: str) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@given(st.sampled_from(ActionKind), number, number, number)
def test_every_action_survives_its_text(kind: ActionKind, stage: int, micro_batch: int, peer: int) -> None:
    action = Action(kind, stage, None if kind is K.REDUCE else micro_batch, peer if kind in MESSAGES else None)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F3", "2X3", "2F", "2R3", "2F3>1", "2SF3", "2SF3<3", "3RF3>2", "2SF>3", "02F3", "2F3 ", "-1F3"]
)
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Action.parse(text)


def test_an_impossible_action_says_what_it_lacks() -> None:
    with pytest.raises(PlanError, match=r"SEND_FORWARD needs a micro batch and needs a peer stage; found .*peer=None"):
        Action(K.SEND_FORWARD, 1, 0)
    with pytest.raises(PlanError, match="REDUCE has no micro batch and has no peer stage; found micro_batch=4"):
        Action(K.REDUCE, 1, 4)


def test_a_message_knows_its_channel_and_its_other_end() -> None:
    send = Action.parse("2SF3>5")
    assert send.channel == (2, 5)
    assert send.mirror() == Action.parse("5RF3<2")
    assert send.mirror().channel == (2, 5)
    assert send.mirror().mirror() == send
    assert Action.parse("5SB3>2").mirror() == Action.parse("2RB3<5")
    assert Action.parse("2RB3<5").channel == (5, 2)


def test_stages_go_round_the_devices() -> None:
    schedule = interleaved(3, 4, 2)
    assert [schedule.device_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [schedule.stages_of(device) for device in range(3)] == [(0, 3), (1, 4), (2, 5)]


SCHEDULE_TEXT = """\
PreferBackward: 2 stages on 2 devices, 2 micro batches
0: 0F0 0F1 0B0 0B1
1: 1F0 1B0 1F1 1B1"""


def test_text_of_a_schedule() -> None:
    assert str(prefer_backward(2, 2)) == SCHEDULE_TEXT
    assert Schedule.parse(SCHEDULE_TEXT) == prefer_backward(2, 2)
    assert Schedule.parse(f"\n  {SCHEDULE_TEXT}\n\n") == prefer_backward(2, 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 1), (2, 3), (4, 2)])
def test_every_schedule_survives_its_text(name: str, devices: int, micro_batches: int) -> None:
    schedule = make_schedule(name, devices, micro_batches, 2 if name == "Interleaved" else 1)
    for each in (schedule, schedule.with_communication().with_reduce(), schedule.with_communication([])):
        assert Schedule.parse(str(each)) == each


def test_edges_are_written_when_they_are_no_chain() -> None:
    schedule = prefer_forward(3, 1).with_communication([(1, 2), (0, 2), (0, 2)])
    assert str(schedule).splitlines()[0] == "PreferForward: 3 stages on 3 devices, 1 micro batch; edges 0>2 1>2"
    assert Schedule.parse(str(schedule)).edges == ((0, 2), (1, 2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a heading"),
        ("0: 0F0", "expected a heading"),
        ("X: 1 stage on 1 device, 1 micro batch\n1: 0F0", "expected the actions of device 0"),
        ("X: 1 stage on 1 device, 1 micro batch\n0: 0Q0", "found '0Q0'"),
        ("X: 2 stages on 2 devices, 1 micro batch\n0: 0F0", "each of 2 devices; found 1 lists"),
        ("X: 1 stage on 2 devices, 1 micro batch\n0:\n1:", "a stage for every device"),
        ("X: 2 stages on 1 device, 1 micro batch; edges 1>0\n0: 0F0 1F0", "edge 1>0: a value goes to a later stage"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        Schedule.parse(text)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (2, -1)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int]) -> None:
    for name in SCHEDULES:
        with pytest.raises(PlanError, match="at least one device"):
            make_schedule(name, *sizes, num_chunks=2 if name == "Interleaved" else 1)
    with pytest.raises(PlanError, match="at least one device"):
        forward_only(*sizes)


def test_messages_stand_beside_what_needs_and_makes_them() -> None:
    schedule = prefer_backward(3, 1).with_communication()
    assert [" ".join(map(str, actions)) for actions in schedule.actions] == [
        "0F0 0SF0>1 0RB0<1 0B0",
        "1RF0<0 1F0 1SF0>2 1RB0<2 1B0 1SB0>0",
        "2RF0<1 2F0 2B0 2SB0>1",
    ]


def test_halved_backwards_send_before_the_weight_gradient() -> None:
    schedule = zero_bubble(2, 1).with_communication().with_reduce()
    assert [" ".join(map(str, actions)) for actions in schedule.actions] == [
        "0F0 0SF0>1 0RB0<1 0I0 0W0 0R",
        "1RF0<0 1F0 1I0 1SB0>0 1W0 1R",
    ]


def test_a_skip_edge_goes_straight_to_its_stage() -> None:
    schedule = prefer_forward(4, 1).with_communication([*chain(4), (0, 3)])
    assert [" ".join(map(str, actions)) for actions in schedule.actions] == [
        "0F0 0SF0>1 0SF0>3 0RB0<1 0RB0<3 0B0",
        "1RF0<0 1F0 1SF0>2 1RB0<2 1B0 1SB0>0",
        "2RF0<1 2F0 2SF0>3 2RB0<3 2B0 2SB0>1",
        "3RF0<0 3RF0<2 3F0 3B0 3SB0>0 3SB0>2",
    ]
    check(schedule)


def test_stages_on_one_device_need_no_messages() -> None:
    assert interleaved(1, 3, 3).with_communication() == interleaved(1, 3, 3)
    schedule = interleaved(2, 2, 2).with_communication([(0, 1), (0, 2), (1, 2), (2, 3)])
    assert {action.channel for action in schedule if action.is_message} == {
        *{(0, 1), (1, 2), (2, 3)},
        *{(1, 0), (2, 1), (3, 2)},
    }
    check(schedule)


def test_forward_lists_get_forward_messages_only() -> None:
    schedule = forward_only(2, 2).with_communication().with_reduce()
    assert [str(action) for action in schedule] == [
        *["0F0", "0SF0>1", "0F1", "0SF1>1"],
        *["1RF0<0", "1F0", "1RF1<0", "1F1"],
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_and_reductions_can_be_added_in_any_order_and_again(name: str) -> None:
    schedule = make_schedule(name, 3, 4, 2 if name == "Interleaved" else 1)
    full = schedule.with_communication().with_reduce()
    assert full == schedule.with_reduce().with_communication()
    assert full == full.with_communication().with_reduce()
    assert full.compute_only() == schedule
    assert full.has([K.REDUCE])
    assert not schedule.has(MESSAGES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_is_reduced_once_right_after_its_last_weight_gradient(name: str) -> None:
    schedule = make_schedule(name, 3, 4, 2 if name == "Interleaved" else 1).with_reduce()
    for device, actions in enumerate(schedule.actions):
        assert sorted(a.stage for a in actions if a.kind is K.REDUCE) == list(schedule.stages_of(device))
        for index, action in enumerate(actions):
            if action.kind is K.REDUCE:
                assert actions[index - 1].kind in (K.BACKWARD, K.WEIGHT_GRAD)
                assert actions[index - 1].stage == action.stage
                assert all(later.stage != action.stage for later in actions[index + 1 :])


@pytest.mark.parametrize("edges", [[(1, 1)], [(2, 1)], [(0, 3)], [(-1, 0)]])
def test_edges_that_cannot_be_are_refused(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(PlanError, match=f"edge {edges[0][0]}>{edges[0][1]}"):
        prefer_backward(3, 2).with_communication(edges)


GOLDEN_SIZES = [("PreferForward", 3, 4, 1), ("PreferBackward", 4, 8, 1), ("PreferBackward", 4, 2, 1)]
GOLDEN_SIZES += [("PreferBackwardOptimizer", 4, 8, 1), ("ZeroBubble", 4, 8, 1), ("ZeroBubble", 4, 3, 1)]
GOLDEN_SIZES += [("Interleaved", 2, 4, 2), ("Interleaved", 4, 8, 2), ("Interleaved", 2, 5, 3)]


@pytest.mark.parametrize(("name", "devices", "micro_batches", "chunks"), GOLDEN_SIZES)
def test_golden_files(name: str, devices: int, micro_batches: int, chunks: int) -> None:
    """To accept a change, write `str(schedule) + "\\n"` into the file, and say in the commit why the order is better."""
    schedule = make_schedule(name, devices, micro_batches, chunks).with_communication().with_reduce()
    golden = (GOLDEN / f"{name}-{devices}x{micro_batches}x{chunks}.txt").read_text()
    assert f"{schedule}\n" == golden
    assert Schedule.parse(golden) == schedule


def test_golden_files_are_all_used() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(
        f"{name}-{devices}x{micro_batches}x{chunks}.txt" for name, devices, micro_batches, chunks in GOLDEN_SIZES
    )


def test_the_room_imports_no_torch() -> None:
    room = Path(__file__).parents[2] / "epl" / "plan" / "schedule"
    importing = re.compile(r"^\s*(from|import) torch\b", re.MULTILINE)
    assert [path.name for path in room.glob("*.py") if importing.search(path.read_text())] == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_home_computes_beside_the_last_stage(name: str) -> None:
    chunks = 2 if name == "Interleaved" else 1
    plain = make_schedule(name, 2, 3, chunks)
    last, home = plain.num_stages - 1, plain.num_stages
    schedule = plain.with_home().with_communication(bridged=[(last, home)]).with_reduce()
    check(schedule)
    assert Schedule.parse(str(schedule)) == schedule
    assert schedule.device_of(home) == schedule.device_of(last) == 1
    assert [schedule.stages_of(device) for device in range(2)] == [(0, 2), (1, 3, 4)] if chunks == 2 else [(0,), (1, 2)]
    words = [str(action) for action in schedule.actions[1]]
    for n in range(3):
        at = words.index(f"{last}F{n}")
        assert words[at + 1 : at + 4] == [f"{last}SF{n}>{home}", f"{home}RF{n}<{last}", f"{home}F{n}"]
        at = words.index(f"{home}B{n}")
        after = [word for word in words[at + 1 :] if word != f"{home}R"]
        assert after[:2] == [f"{home}SB{n}>{last}", f"{last}RB{n}<{home}"]
    assert [a for a in schedule.compute_only() if a.stage != home] == list(plain)


def test_a_home_on_the_only_rank_of_a_device_is_handed_values_over() -> None:
    schedule = make_schedule("PreferBackward", 2, 2).with_home().with_communication()
    check(schedule)
    assert schedule.crosses((0, 1))
    assert not schedule.crosses((1, 2))
    assert "home" in str(schedule)
    assert "bridged" not in str(schedule)
