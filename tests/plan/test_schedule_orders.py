"""The orders against closed forms, and against the lists that torch prints for its own schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.testing._internal.distributed.fake_pg import FakeStore

from epl.errors import PlanError
from epl.plan.schedule import (
    SCHEDULES,
    Schedule,
    forward_only,
    interleaved,
    make_schedule,
    prefer_backward,
    prefer_backward_optimizer,
    prefer_forward,
    simulate,
    zero_bubble,
)
from epl.plan.schedule import chunked as chunked_module
from epl.plan.schedule import orders as orders_module
from epl.report.timeline import timeline_text

SIZES = [(p, m) for p in range(1, 7) for m in range(1, 13)]
SYNCHRONOUS = [prefer_forward, prefer_backward, prefer_backward_optimizer]


@pytest.mark.parametrize("make", SYNCHRONOUS)
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.5), (3.0, 1.0, 0.0)])
def test_bubble_of_the_schedules_with_whole_backwards(make: object, times: tuple[float, float, float]) -> None:
    forward, backward, weight = times
    for p, m in SIZES:
        result = simulate(make(p, m), forward=forward, backward=backward, weight=weight)  # type: ignore[operator]
        assert result.makespan == pytest.approx((m + p - 1) * sum(times))
        assert result.bubbles == pytest.approx([(p - 1) / (m + p - 1)] * p)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_bubble_of_interleaved(chunks: int) -> None:
    """Also when the micro batches do not divide into rounds; with fewer than devices, every chunk costs a whole way."""
    for p, m in SIZES:
        result = simulate(interleaved(p, m, chunks))
        assert result.makespan == 3 * (chunks * m + p - 1 if m >= p else chunks * p + m - 1)
        if m >= p:
            assert result.bubbles == pytest.approx([(p - 1) / (chunks * m + p - 1)] * p)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 2.0, 1.0), (3.0, 2.0, 1.0)])
def test_bubble_of_zero_bubble(times: tuple[float, float, float]) -> None:
    """ZB-H1: each device idles (p − 1)(T_F + T_B − T_W), once there are as many micro batches as devices."""
    forward, backward, weight = times
    for p, m in SIZES:
        result = simulate(zero_bubble(p, m), forward=forward, backward=backward, weight=weight)
        if m >= p:
            assert result.makespan == m * sum(times) + (p - 1) * (forward + backward - weight)
        assert (
            result.makespan
            <= simulate(prefer_backward(p, m), forward=forward, backward=backward, weight=weight).makespan
        )


def test_live_micro_batches() -> None:
    for p, m in SIZES:
        assert simulate(prefer_forward(p, m)).peak_live == (m,) * p
        assert simulate(prefer_backward(p, m)).peak_live == tuple(min(m, p - rank) for rank in range(p))
        optimizer = simulate(prefer_backward_optimizer(p, m)).peak_live
        assert optimizer == tuple(min(m, p - rank + (rank < p - 1)) for rank in range(p))
        assert simulate(zero_bubble(p, m)).peak_live == (min(m, p),) * p
        assert simulate(forward_only(p, m)).peak_live == (1,) * p
        for v in (2, 3):
            if m % p == 0 and m > p:
                assert simulate(interleaved(p, m, v)).peak_live[0] == v * p + p - 1  # v · p(1 + (p−1)/(p·v))


def test_the_numbers_of_epl() -> None:
    """Four stages, eight micro batches; a backward is one slot there."""
    live = {prefer_forward: (8, 8, 8, 8), prefer_backward: (4, 3, 2, 1), prefer_backward_optimizer: (5, 4, 3, 1)}
    for make, expected in live.items():
        result = simulate(make(4, 8), weight=0.0)
        assert result.makespan == 22
        assert result.peak_live == expected


def test_forward_only_is_a_plain_wave() -> None:
    for p, m in SIZES:
        assert simulate(forward_only(p, m)).makespan == m + p - 1
        assert simulate(forward_only(p, m, 2)).makespan == (2 * m + p - 1 if m >= p else 2 * p + m - 1)


def test_the_pictures_in_the_sources_are_true() -> None:
    def rows(schedule: Schedule, weight: float) -> list[str]:
        return timeline_text(simulate(schedule, weight=weight)).splitlines()[1:-1]

    pictured = [row for make in SYNCHRONOUS for row in rows(make(3, 4), 0.0)] + rows(zero_bubble(3, 4), 1.0)
    found = [line[26:] for line in (orders_module.__doc__ or "").splitlines() if " | " in line]
    assert found == pictured
    found = [line.strip() for line in (chunked_module.__doc__ or "").splitlines() if " | " in line]
    assert found == rows(interleaved(2, 4, 2), 0.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_names_in_any_case(name: str) -> None:
    chunks = 2 if name == "Interleaved" else 1
    schedule = make_schedule(name.upper(), 2, 3, chunks)
    assert schedule.name == name
    assert schedule == make_schedule(name.lower(), 2, 3, chunks)


@pytest.mark.parametrize(
    ("name", "chunks", "problem"),
    [
        ("PreferBackwards", 1, r"found 'PreferBackwards': did you mean 'PreferBackward'\?"),
        ("gpipe", 1, "is one of PreferForward, .*Interleaved; found 'gpipe'"),
        ("Interleaved", 1, r"num_chunks = 1: set pipeline\.num_chunks = 2"),
        ("ZeroBubble", 2, r"num_chunks = 2: set pipeline\.strategy = 'Interleaved'"),
    ],
)
def test_schedules_that_do_not_exist(name: str, chunks: int, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        make_schedule(name, 2, 4, chunks)


@pytest.fixture
def fake_group(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of p ranks of which only rank 0 exists."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def stage(index: int, num_stages: int) -> pipelining.PipelineStage:
    return pipelining.PipelineStage(torch.nn.Identity(), index, num_stages, torch.device("cpu"))


def printed(order: dict[int, list[object]]) -> list[list[str]]:
    texts = [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]
    return [[text for text in actions if "REDUCE" not in text] for actions in texts]


def ours(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, actions)) for actions in schedule.actions]


@pytest.mark.parametrize("fake_group", [1, 2, 4, 5], indirect=True)
def test_same_order_as_torch_prints(fake_group: int) -> None:
    p = fake_group
    for m in (1, 2, 4, 7, 8):
        gpipe = pipelining.ScheduleGPipe(stage(0, p), m)
        assert ours(prefer_forward(p, m)) == printed(gpipe.pipeline_order)
        if m >= p:
            one_f_one_b = pipelining.Schedule1F1B(stage(0, p), m)
            # torch counts the forwards of the last rank from 1; it does not run by this list.
            assert ours(prefer_backward(p, m))[:-1] == printed(one_f_one_b.pipeline_order)[:-1]
    for m in range(1, 13):
        rounds = max(1, m // p)
        for v in (2, 3):
            stages = [stage(chunk * p, p * v) for chunk in range(v)]
            if m % rounds:
                with pytest.raises(ValueError, match="multiple of the number of rounds"):
                    pipelining.ScheduleInterleaved1F1B(stages, m)
            else:
                interleaved_1f1b = pipelining.ScheduleInterleaved1F1B(stages, m)
                assert ours(interleaved(p, m, v)) == printed(interleaved_1f1b.pipeline_order)
