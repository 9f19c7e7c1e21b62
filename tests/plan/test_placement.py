"""Devices of every TaskGraph: staged, colocated, interleaved, in both orders, and the refusals."""

from __future__ import annotations

import pytest

from epl.errors import PlanError
from epl.plan.placement import device_order, place
from epl.plan.spec import ClusterShape, PlanSettings, TaskGraphSpec


def stages(*counts: int) -> list[TaskGraphSpec]:
    return [TaskGraphSpec(f"stage_{i}", "replicate", count) for i, count in enumerate(counts)]


def devices(specs: list[TaskGraphSpec], cluster: ClusterShape, **settings: object) -> list[tuple[tuple[int, ...], ...]]:
    placement = place(specs, cluster, PlanSettings(**settings))  # type: ignore[arg-type]
    return [t.devices for t in placement.taskgraphs]


def test_both_orders_of_two_nodes_of_two() -> None:
    cluster = ClusterShape.of(2, 2)
    assert devices(stages(1, 1), cluster) == [((0,), (2,)), ((1,), (3,))]
    assert devices(stages(1, 1), cluster, prefer_intra_node=False) == [((0,), (1,)), ((2,), (3,))]


def test_both_orders_of_larger_clusters() -> None:
    cluster = ClusterShape.of(2, 4)
    assert devices(stages(1, 1), cluster, prefer_intra_node=False) == [
        ((0,), (1,), (2,), (3,)),
        ((4,), (5,), (6,), (7,)),
    ]
    assert devices(stages(1, 3), cluster) == [((0,), (4,)), ((1, 2, 3), (5, 6, 7))]
    assert devices(stages(1, 3), cluster, prefer_intra_node=False) == [((0,), (2,)), ((4, 1, 5), (6, 3, 7))]
    assert device_order(ClusterShape.of(3, 2), prefer_intra_node=False) == [0, 2, 4, 1, 3, 5]


def test_nodes_whose_ranks_are_not_neighbours_or_not_equal() -> None:
    round_robin = ClusterShape(4, (0, 1, 0, 1))
    assert device_order(round_robin, prefer_intra_node=True) == [0, 2, 1, 3]
    assert device_order(round_robin, prefer_intra_node=False) == [0, 1, 2, 3]
    uneven = ClusterShape(5, (0, 0, 0, 1, 1))
    assert device_order(uneven, prefer_intra_node=True) == [0, 1, 2, 3, 4]
    assert device_order(uneven, prefer_intra_node=False) == [0, 3, 1, 4, 2]


def test_one_taskgraph_has_its_devices_for_itself() -> None:
    placement = place(stages(2), ClusterShape.of(1, 6), PlanSettings())
    assert placement.layout == "colocated"
    assert placement.taskgraphs[0].devices == ((0, 1), (2, 3), (4, 5))


def test_unequal_stages() -> None:
    placement = place(stages(2, 1), ClusterShape.of(1, 6), PlanSettings())
    assert placement.layout == "staged"
    assert [t.devices for t in placement.taskgraphs] == [((0, 1), (3, 4)), ((2,), (5,))]


def test_colocated_taskgraphs_share_devices() -> None:
    specs = [TaskGraphSpec("body", "replicate", 2), TaskGraphSpec("head", "split", 2)]
    placement = place(specs, ClusterShape.of(2, 2), PlanSettings(colocate=True))
    assert placement.layout == "colocated"
    assert [t.devices for t in placement.taskgraphs] == [((0, 1), (2, 3))] * 2


def test_colocated_counts_must_agree_and_all_offenders_are_named() -> None:
    specs = [*stages(2, 2, 4), TaskGraphSpec("head", "split", 1)]
    with pytest.raises(PlanError) as caught:
        place(specs, ClusterShape.of(1, 4), PlanSettings(colocate=True))
    text = str(caught.value)
    assert "2 of 4 TaskGraphs have 2" in text
    assert "'stage_2' is replicate(4): make it replicate(2)" in text
    assert "'head' is split(1): make it split(2)" in text


def test_one_process_holds_everything_whatever_was_asked_for() -> None:
    specs = [*stages(3, 1), TaskGraphSpec("head", "split", 8)]
    for colocate in (False, True):
        placement = place(specs, ClusterShape.of(1, 1), PlanSettings(colocate=colocate))
        assert placement.layout == "single"
        assert [t.devices for t in placement.taskgraphs] == [((0,),)] * 3
        assert [t.width for t in placement.taskgraphs] == [1, 1, 1]


@pytest.mark.parametrize(
    ("counts", "world", "expected"),
    [
        (
            (1, 2),
            4,
            ["1 (stage_0) + 2 (stage_1) = 3 devices", "4 devices are not a multiple of 3", "start 3 or 6 devices"],
        ),
        ((1, 2), 2, ["2 devices are not a multiple of 3", "start 3 devices"]),
        ((4,), 6, ["takes 4 devices (stage_0)", "start 4 or 8 devices"]),
        ((4,), 9, ["start 8 or 12 devices"]),
    ],
)
def test_what_does_not_divide_is_refused_with_the_arithmetic(
    counts: tuple[int, ...], world: int, expected: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        place(stages(*counts), ClusterShape.of(1, world), PlanSettings())
    for text in expected:
        assert text in str(caught.value)


def test_colocated_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match=r"2 devices \(shared by stage_0, stage_1\).*start 2 or 4"):
        place(stages(2, 2), ClusterShape.of(1, 3), PlanSettings(colocate=True))


def test_interleaved_stages_go_round() -> None:
    assert devices(stages(1, 1, 1, 1), ClusterShape.of(1, 4), num_chunks=2) == [
        ((0,), (2,)),
        ((1,), (3,)),
        ((0,), (2,)),
        ((1,), (3,)),
    ]
    assert devices(stages(2, 2, 2, 2), ClusterShape.of(1, 4), num_chunks=2) == [((0, 1),), ((2, 3),)] * 2


def test_interleaved_refusals_come_all_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        place(stages(1, 1, 2), ClusterShape.of(1, 4), PlanSettings(num_chunks=2))
    text = str(caught.value)
    assert "2 problems" in text
    assert "cut the model into 2 or 4 TaskGraphs" in text
    assert "stage_0: 1, stage_1: 1, stage_2: 2" in text
    with pytest.raises(PlanError, match=r"/ 2 chunks = 2 devices.*start 2 or 4 devices"):
        place(stages(1, 1, 1, 1), ClusterShape.of(1, 3), PlanSettings(num_chunks=2))


@pytest.mark.parametrize(("world", "nodes"), [(0, ()), (2, (0,)), (1, (0, 0))])
def test_a_cluster_needs_a_node_for_each_rank(world: int, nodes: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=f"world_size={world}"):
        ClusterShape(world, nodes)
