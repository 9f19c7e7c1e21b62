"""Cluster facts from surroundings and settings."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epl.cluster.cluster import Cluster, count_cuda_devices, make_cluster, number_nodes
from epl.cluster.surroundings import Surroundings
from epl.errors import ClusterError


def launched(rank: int = 0, workers: int = 2, per_worker: int = 2, nodes: int = 2) -> Surroundings:
    size = workers * per_worker
    local = size // nodes
    return Surroundings(
        "epl-launch", rank, size, rank % local, local, rank // local, nodes,
        rank // per_worker, workers, per_worker, "h", 1,
    )  # fmt: skip


SINGLE = Surroundings("single", 0, 1, 0, 1, 0, 1, 0, 1, 1, "127.0.0.1", 0)


def test_ranks_share_a_worker_index_and_one_is_first() -> None:
    clusters = [make_cluster(launched(rank)) for rank in range(4)]
    assert [c.worker_index for c in clusters] == [0, 0, 1, 1]
    assert [c.is_first_rank for c in clusters] == [True, False, False, False]
    assert {(c.worker_num, c.gpu_num_per_worker, c.total_gpu_num, c.world_size) for c in clusters} == {(2, 2, 4, 4)}
    assert [c.node_index for c in clusters] == [0, 0, 1, 1]
    assert {c.node_of_rank for c in clusters} == {(0, 0, 1, 1)}
    assert {c.node_count for c in clusters} == {2}
    assert {c.device for c in clusters} == {torch.device("cpu")}


def test_a_single_process() -> None:
    cluster = make_cluster(SINGLE, host="desk")
    assert (cluster.world_size, cluster.total_gpu_num, cluster.node_of_rank, cluster.kind) == (1, 1, (0,), "single")
    assert str(cluster) == (
        "1 worker × 1 device = 1 device on 1 node\n"
        "this is rank 0 of 1 on desk (cpu), started by single, worker 0, node 0"
    )


def test_summary_has_two_lines() -> None:
    text = str(make_cluster(launched(3), host="gpu02", cuda_devices=2))
    assert text == (
        "2 workers × 2 devices = 4 devices on 2 nodes\n"
        "this is rank 3 of 4 on gpu02 (cuda:1), started by epl-launch, worker 1, node 1"
    )


def test_is_frozen() -> None:
    cluster = make_cluster(SINGLE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rank", "cuda", "listed", "nodes", "device"),
    [
        (3, 0, "", 2, "cpu"),
        (3, 2, "", 2, "cuda:1"),
        (3, 8, "", 1, "cuda:3"),
        (2, 4, "3,1", 2, "cuda:3"),
        (3, 4, " 3 , 1 ", 2, "cuda:1"),
        (3, 0, "0,1", 2, "cpu"),
        (3, 0, "6,7", 1, "cpu"),
    ],
)
def test_device_of_a_rank(rank: int, cuda: int, listed: str, nodes: int, device: str) -> None:
    cluster = make_cluster(launched(rank, nodes=nodes), cuda_devices=cuda, run_visible_devices=listed)
    assert cluster.device == torch.device(device)


def test_single_process_takes_the_listed_device() -> None:
    assert make_cluster(SINGLE, cuda_devices=4, run_visible_devices="2").device == torch.device("cuda:2")


def test_slurm_that_shows_each_task_its_own_device() -> None:
    around = dataclasses.replace(launched(3), kind="slurm", own_device_only=True)
    assert make_cluster(around, cuda_devices=1).device == torch.device("cuda:0")


def test_devices_per_node_makes_blocks() -> None:
    assert make_cluster(launched(nodes=1), devices_per_node=2).node_of_rank == (0, 0, 1, 1)
    assert make_cluster(launched(nodes=2), devices_per_node=4).node_of_rank == (0, 0, 0, 0)
    assert make_cluster(launched(nodes=2), devices_per_node=1, node_of_rank=[0, 0, 1, 1]).node_of_rank == (0, 1, 2, 3)


def test_nodes_told_by_the_ranks() -> None:
    nodes = number_nodes(["b", "a", "b", "a"])
    assert nodes == (0, 1, 0, 1)
    assert make_cluster(launched(3), node_of_rank=nodes).node_index == 1


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"run_visible_devices": "0,1,2"}, ["lists 3 devices", "2 processes", "--gpu_per_worker 3"]),
        ({"run_visible_devices": "0"}, ["lists 1 device,", "2 processes", "list 2", "--gpu_per_worker 1"]),
        ({"run_visible_devices": "0,x"}, ["device numbers such as '0,1'", "found '0,x'"]),
        ({"run_visible_devices": "0,"}, ["found '0,'"]),
        ({"run_visible_devices": "1,1"}, ["lists [1] more than once"]),
        ({"run_visible_devices": "0,4", "cuda_devices": 4}, ["names [4]", "4 CUDA devices"]),
        ({"cuda_devices": 1}, ["2 processes on this node", "only 1 CUDA device;", "--gpu_per_worker 1"]),
        ({"devices_per_node": 3}, ["= 3 does not divide the 4 ranks", "[1, 2, 4]"]),
        ({"devices_per_node": -1}, ["= -1 does not divide"]),
        ({"node_of_rank": [0, 1]}, ["2 entries for 4 ranks"]),
        ({"run_visible_devices": "0", "devices_per_node": 3}, ["2 problems", "rank 0 on localhost"]),
    ],
)
def test_refused_with_arithmetic_and_remedy(settings: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ClusterError) as error:
        make_cluster(launched(), **settings)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(error.value)


def test_single_process_with_two_listed_devices_is_told_to_launch() -> None:
    with pytest.raises(ClusterError, match=r"lists 2 devices.*1 process,.*epl-launch --gpu_per_worker 2"):
        make_cluster(SINGLE, run_visible_devices="0,1")


def test_two_workers_on_a_node_cannot_be_given_the_same_devices() -> None:
    with pytest.raises(ClusterError, match="same devices to each of the 2 workers on this node"):
        make_cluster(launched(nodes=1), cuda_devices=4, run_visible_devices="0,1")


def test_counts_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert count_cuda_devices() == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert count_cuda_devices() == 0


def test_says_that_workers_are_shared() -> None:
    assert "several ranks share a `worker_index`" in (Cluster.__doc__ or "")
