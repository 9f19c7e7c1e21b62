"""The plan as a whole: ranks, rows, needs, text, and the way through JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import epl
from epl.errors import PlanError
from epl.plan import ClusterShape, DataShare, Plan, PlanSettings, RankPlace, Rows, TaskGraphSpec, make_plan

BODY = TaskGraphSpec("body", "replicate", 2)
HEAD = TaskGraphSpec("head", "split", 2)
ONE = TaskGraphSpec("model", "replicate", 1)


def plan_of(specs: list[TaskGraphSpec], world: int, **settings: object) -> Plan:
    return make_plan(specs, ClusterShape.of(1, world), PlanSettings(**settings))  # type: ignore[arg-type]


def test_data_parallel() -> None:
    plan = plan_of([ONE], 4)
    assert (plan.layout, plan.num_replicas, plan.devices_per_replica, plan.parts) == ("colocated", 4, 1, 1)
    assert plan.ranks[3] == RankPlace(rank=3, replica=3, taskgraphs=("model",), index=0)
    assert plan.data_shares == tuple(DataShare(r, 0, 1) for r in range(4))
    assert plan.needs() == {"data_parallel"}


def test_one_device_needs_nothing() -> None:
    plan = plan_of([BODY, HEAD], 1)
    assert (plan.layout, plan.num_replicas) == ("single", 1)
    assert plan.ranks == (RankPlace(0, 0, ("body", "head"), 0),)
    assert plan.data_shares == (DataShare(0, 0, 1),)
    assert plan.needs() == frozenset()


def test_replicate_over_several_devices_divides_the_rows() -> None:
    plan = plan_of([BODY], 4)
    assert plan.num_replicas == 2
    assert plan.data_shares == (DataShare(0, 0, 2), DataShare(0, 1, 2), DataShare(1, 0, 2), DataShare(1, 1, 2))
    assert [(r.start, r.stop) for r in plan.rows(8)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert plan.rows(3) == (Rows(0, 1, 1 / 3), Rows(1, 2, 1 / 3), Rows(2, 3, 1 / 3), Rows(2, 3, 0.0))
    assert plan.needs() == {"data_parallel"}
    assert plan_of([BODY], 2).needs() == {"data_parallel"}


def test_split_alone_sees_the_same_rows_on_all_its_ranks() -> None:
    plan = plan_of([HEAD], 4)
    assert plan.data_shares == (DataShare(0, 0, 1), DataShare(0, 0, 1), DataShare(1, 0, 1), DataShare(1, 0, 1))
    assert [(r.start, r.stop) for r in plan.rows(8)] == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert [p.index for p in plan.ranks] == [0, 1, 0, 1]
    assert plan.needs() == {"split", "data_parallel"}
    assert plan_of([HEAD], 2).needs() == {"split"}


def test_replicate_and_split_colocated_divide_the_rows() -> None:
    plan = plan_of([BODY, HEAD], 4, colocate=True)
    assert plan.ranks[1] == RankPlace(1, 0, ("body", "head"), 1)
    assert plan.data_shares[1] == DataShare(0, 1, 2)
    assert plan.needs() == {"data_parallel", "split", "bridge"}


def test_stages_see_the_whole_block_of_their_replica() -> None:
    plan = plan_of([ONE, BODY, HEAD], 10, num_micro_batch=4)
    assert (plan.layout, plan.num_replicas, plan.devices_per_replica) == ("staged", 2, 5)
    assert plan.replica_ranks(1) == (5, 6, 7, 8, 9)
    assert plan.ranks[9] == RankPlace(9, 1, ("head",), 1)
    assert {(s.part, s.parts) for s in plan.data_shares} == {(0, 1)}
    assert plan.needs() == {"data_parallel", "pipeline", "wide_stage", "split", "micro_batches"}


def test_a_plain_pipeline() -> None:
    specs = [TaskGraphSpec("a", "replicate"), TaskGraphSpec("b", "replicate")]
    assert plan_of(specs, 2).needs() == {"pipeline"}
    interleaved = plan_of([TaskGraphSpec(n, "replicate") for n in "abcd"], 2, num_chunks=2)
    assert interleaved.needs() == {"pipeline", "interleaved"}
    assert interleaved.ranks[1] == RankPlace(1, 0, ("b", "d"), 0)


def test_golden_text_of_stages() -> None:
    specs = [TaskGraphSpec("stage_0", "replicate"), TaskGraphSpec("stage_1", "split", 2)]
    assert str(plan_of(specs, 6, micro_batch=8, num_micro_batch=4)) == (
        "plan: staged, 2 model replicas of 3 devices\n"
        "TaskGraph  strategy      devices of each replica\n"
        "---------  ------------  -----------------------\n"
        "stage_0    replicate(1)  0 | 3\n"
        "stage_1    split(2)      1-2 | 4-5\n"
        "global batch = replicas × micro batch × num_micro_batch = 2 × 8 × 4 = 64\n"
        "rows: every rank of a replica sees all of the replica's rows\n"
        "gradients: mean over 2 replicas"
    )


def test_golden_text_of_data_parallelism() -> None:
    assert plan_of([ONE], 12, gradients_reduce_method="sum").describe() == (
        "plan: colocated, 12 model replicas of 1 device\n"
        "TaskGraph  strategy      devices of each replica\n"
        "---------  ------------  ------------------------------\n"
        "model      replicate(1)  0 | 1 | 2 | 3 | 4 | 5 | … | 11\n"
        "global batch = replicas × micro batch × num_micro_batch = 12 × b × 1 = 12·b\n"
        "gradients: sum over 12 replicas"
    )


def test_golden_text_of_one_wide_replica() -> None:
    assert plan_of([BODY], 2, micro_batch=6).describe() == (
        "plan: colocated, 1 model replica of 2 devices\n"
        "TaskGraph  strategy      devices of each replica\n"
        "---------  ------------  -----------------------\n"
        "body       replicate(2)  0-1\n"
        "global batch = replicas × micro batch × num_micro_batch = 1 × 6 × 1 = 6\n"
        "rows: each of the 2 ranks of a replica sees its own share of the replica's rows"
    )


CASES = [
    (counts, kinds, world, colocate, intra)
    for counts in [(1,), (2,), (4,), (1, 1), (2, 2), (1, 3), (1, 1, 2)]
    for kinds in product(["replicate", "split"], repeat=len(counts))
    for world in (1, 4, 8)
    for colocate in (False, True)
    for intra in (False, True)
]


@pytest.mark.parametrize("world", [1, 4, 8])
def test_what_holds_for_every_plan(world: int) -> None:
    made = 0
    for counts, kinds, size, colocate, intra in CASES:
        if size != world or (colocate and len(set(counts)) > 1 and world > 1):
            continue
        specs = [TaskGraphSpec(f"t{i}", k, c) for i, (k, c) in enumerate(zip(kinds, counts, strict=True))]  # type: ignore[arg-type]
        settings = PlanSettings(colocate=colocate, prefer_intra_node=intra)
        cluster = ClusterShape.of(1, 1) if world == 1 else ClusterShape.of(2, world // 2)
        plan = make_plan(specs, cluster, settings)
        made += 1
        assert sorted(r for i in range(plan.num_replicas) for r in plan.replica_ranks(i)) == list(range(world))
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        for place, share in zip(plan.ranks, plan.data_shares, strict=True):
            assert place.replica == share.replica
            for name in place.taskgraphs:
                placed = next(t for t in plan.taskgraphs if t.name == name)
                assert placed.devices[place.replica][place.index] == place.rank
        for n in (1, 5, 64):
            distinct = dict(zip(plan.data_shares, plan.rows(n), strict=True))
            assert math.isclose(sum(r.weight for r in distinct.values()), 1.0)
    assert made >= 50


def test_all_problems_at_once() -> None:
    twice = [TaskGraphSpec("a", "replicate", 0), TaskGraphSpec("a", "replicate")]
    with pytest.raises(PlanError) as caught:
        plan_of(twice, 2, num_micro_batch=0, num_chunks=2, micro_batch=0, colocate=True)
    text = str(caught.value)
    for part in ("5 problems", "called 'a'", "device_count of 'a'", "num_micro_batch", "batch_size", "colocate"):
        assert part in text
    with pytest.raises(PlanError, match="no TaskGraph"):
        plan_of([], 2)


@pytest.mark.parametrize("broken", [{}, {"layout": "single"}, {"layout": "x", "taskgraphs": [{"name": "a"}]}])
def test_what_is_no_plan_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_dict(broken)


def test_planning_needs_no_torch() -> None:
    """The plan is to run anywhere, by the thousand: torch would be seconds and processes."""
    package = str(Path(epl.__file__).parent)
    code = f"import sys, types; epl = types.ModuleType('epl'); epl.__path__ = [{package!r}]; sys.modules['epl'] = epl\n"
    code += "import epl.plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
