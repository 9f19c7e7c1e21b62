"""The stages of a plan: simulated, printed, saved."""

from __future__ import annotations

import json

import pytest

from epl.errors import PlanError
from epl.plan import ClusterShape, Plan, PlanSettings, TaskGraphSpec, make_plan
from epl.plan.schedule import SCHEDULES, make_schedule, simulate
from epl.plan.schedule.simulation import peak_live
from epl.plan.stageplan import StagePlan, live_micro_batches, simulate_stages

STAGES = (
    StagePlan("early", ("embed", "h.0", "h.1"), 12_300, ("embed.weight",), 0.4, 2048),
    StagePlan("late", ("h.2", "head"), 45_600, ("embed.weight",), 0.6, 1024),
)


def staged(world: int = 4, **settings: object) -> Plan:
    specs = [TaskGraphSpec("late", "replicate"), TaskGraphSpec("early", "replicate")]
    more = {"num_micro_batch": 4, "micro_batch": 8, **settings}
    return make_plan(specs, ClusterShape.of(1, world), PlanSettings(**more))  # type: ignore[arg-type]


def test_stages_come_in_order_of_execution_and_so_do_their_devices() -> None:
    plan = staged().with_stages(STAGES)
    assert [t.name for t in plan.taskgraphs] == ["early", "late"]
    assert plan.taskgraphs[0].devices == ((0,), (2,))
    assert plan.stages == STAGES


def test_the_table() -> None:
    assert str(staged().with_stages(STAGES, "because")).splitlines() == [
        "plan: staged, 2 model replicas of 2 devices",
        "stage  TaskGraph  strategy      devices of each replica  modules       parameters  time  activations",
        "-----  ---------  ------------  -----------------------  ------------  ----------  ----  ----------------------",
        "0      early      replicate(1)  0 | 2                    embed, h.0-1      12,300   40%  2 micro batches, 4 KiB",
        "1      late       replicate(1)  1 | 3                    h.2, head         45,600   60%  1 micro batch, 1 KiB",
        "tied: embed.weight is held by stages 0, 1",
        "schedule: PreferBackward, 4 micro batches; devices idle 29% of the time",
        "global batch = replicas × micro batch × num_micro_batch = 2 × 8 × 4 = 64",
        "rows: every rank of a replica sees all of the replica's rows",
        "gradients: mean over 2 replicas",
        "because",
    ]


def test_what_is_not_known_is_left_out() -> None:
    stages = [StagePlan("early", ("a",), 1), StagePlan("late", ("b",), 2)]
    text = str(staged(2).with_stages(stages))
    assert text.count(" -  ") == 2
    assert "1 micro batch\n" in text
    assert f"idle {1 / 5:.0%} of the time" in text  # (stages - 1) / (micro batches + stages - 1)


def test_a_plan_with_stages_goes_through_json() -> None:
    plan = staged().with_stages(STAGES, "because")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_schedule_that_contradicts_the_settings_is_refused() -> None:
    with pytest.raises(PlanError, match="Interleaved needs at least 2 stages per device"):
        staged(strategy="Interleaved").with_stages(STAGES)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 1), (2, 4), (4, 8), (4, 2)])
def test_live_micro_batches_add_up_to_those_of_the_devices(name: str, devices: int, micro_batches: int) -> None:
    schedule = make_schedule(name, devices, micro_batches, 2 if name == "Interleaved" else 1)
    live = live_micro_batches(schedule)
    on_devices = peak_live(schedule)
    for device in range(devices):
        stages = schedule.stages_of(device)
        assert max(live[s] for s in stages) <= on_devices[device] <= sum(live[s] for s in stages)
        assert len(stages) > 1 or live[device] == on_devices[device]


def test_a_stage_without_time_still_has_a_place() -> None:
    schedule = make_schedule("PreferBackward", 2, 4)
    empty = [StagePlan("a", (), 0, time=0.0), StagePlan("b", (), 0, time=1.0)]
    assert simulate_stages(schedule, empty).makespan == pytest.approx(4 * 3, rel=0.01)
    unknown = [StagePlan("a", (), 0, time=0.3), StagePlan("b", (), 0)]
    assert simulate_stages(schedule, unknown).bubble == simulate(schedule).bubble
