"""Process groups on real ranks: who is in which group, batches in the model group, destroying, errors everywhere."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from epl.cluster.axes import Axes
from epl.cluster.cluster import Cluster, make_cluster
from epl.cluster.communication import Job
from epl.cluster.surroundings import discover
from epl.cluster.topology import Topology, setup_process_groups
from epl.errors import TopologyError
from tests.harness import rank_errors, run_ranks

Spec = list[tuple[str, float]]


def start(devices_per_node: int = 0) -> tuple[Cluster, Job]:
    surroundings = discover()
    return make_cluster(surroundings, devices_per_node=devices_per_node), Job(surroundings, torch.device("cpu"), 30)


def begin(axes: Spec, devices_per_node: int = 0) -> Topology:
    cluster, job = start(devices_per_node)
    return setup_process_groups(axes, cluster=cluster, job=job)


def all_answers(axes: Spec, devices_per_node: int) -> dict[str, Any]:
    """Every accessor for every kind, and the sum of ranks over the real group."""
    topology = begin(axes, devices_per_node)
    answers = {}
    for kind in topology.axes.kinds:
        total = torch.tensor([topology.job.rank])
        dist.all_reduce(total, group=topology.group(kind))
        answers[kind] = {
            "sum": int(total),
            "group ranks": tuple(dist.get_process_group_ranks(topology.group(kind))),
            "group rank": dist.get_rank(topology.group(kind)),
            "ranks": topology.ranks(kind),
            "rank": topology.rank(kind),
            "size": topology.size(kind),
            "ends": (topology.is_first(kind), topology.is_last(kind)),
            "around": (topology.previous_rank(kind), topology.next_rank(kind)),
            "not around": (topology.previous_rank(kind, wrap=False), topology.next_rank(kind, wrap=False)),
            "has": topology.has(kind),
            "all": topology.all_groups(kind),
        }
    mesh = topology.mesh
    answers["mesh"] = {name: (mesh.get_local_rank(name), mesh[name].mesh.tolist()) for name in topology.axes.names}
    answers["dump"] = topology.dump()
    return answers


@pytest.mark.parametrize(
    ("axes", "devices_per_node"),
    [
        ([("data", 1)], 0),
        ([("tensor", 2)], 1),
        ([("data", 2), ("tensor", 2.0)], 2),
        ([("pipe", 3), ("data", 1), ("tensor", 2)], 3),
        ([("pipe", 2), ("data", 2), ("tensor", 2)], 2),
    ],
    ids=["1", "2", "2x2", "3x1x2", "2x2x2"],
)
def test_groups_are_those_of_the_arithmetic(axes: Spec, devices_per_node: int) -> None:
    size = int(torch.tensor([s for _, s in axes]).prod())
    nodes = [rank // (devices_per_node or size) for rank in range(size)]
    expected = Axes.parse(axes, size, node_of_rank=nodes)
    for rank, answers in enumerate(run_ranks(all_answers, size, axes, devices_per_node)):
        assert answers.pop("dump") == expected.dump()
        where = expected.coordinates(rank)
        assert answers.pop("mesh") == {n: (where[n], list(expected.ranks(n, rank))) for n in expected.names}
        assert set(answers) == {*expected.names, "model", "node", "global"}
        for kind, found in answers.items():
            ranks = expected.ranks(kind, rank)
            at, last = ranks.index(rank), len(ranks) - 1
            around = (ranks[at - 1], ranks[(at + 1) % len(ranks)])
            assert found == {
                "sum": sum(ranks),
                "group ranks": ranks,
                "group rank": at,
                "ranks": ranks,
                "rank": at,
                "size": len(ranks),
                "ends": (at == 0, at == last),
                "around": around,
                "not around": (around[0] if at > 0 else None, around[1] if at < last else None),
                "has": len(ranks) > 1,
                "all": expected.groups(kind),
            }


def ask_what_is_not_there() -> list[str]:
    topology = begin([("tensor", 2)])
    assert not topology.has("data")
    messages = []
    for ask in (topology.group, topology.size, topology.ranks, topology.next_rank, topology.all_groups):
        with pytest.raises(TopologyError) as error:
            ask("tensr")
        messages.append(str(error.value))
    return messages


def test_unknown_axis_names_the_nearest() -> None:
    for messages in run_ranks(ask_what_is_not_there, 2):
        assert all("no axis 'tensr'; did you mean 'tensor'?" in message for message in messages)
        assert len(messages) == 5


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def broadcast_batches() -> list[Any]:
    """Data in the middle: the model groups are [0, 2] and [1, 3]; each sends its own batch."""
    topology = begin([("pipe", 2), ("data", 2), ("tensor", 1)])
    data = topology.rank("data")
    batch = None
    if topology.is_first("model"):
        batch = {
            "x": torch.arange(6.0).reshape(2, 3).t() + data,
            "pair": Pair(torch.full((3,), data, dtype=torch.int64), f"replica {data}"),
            "mask": [torch.tensor([True, False]), None, 1.5],
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(data, dtype=torch.bfloat16),
            "complex": (torch.tensor([1 + 2j]), collections.OrderedDict(a=torch.ones(1 + data))),
        }
    first = topology.broadcast_in_model_group(batch)
    # Another structure right afterwards, while receivers pass something of their own that must not count.
    second = topology.broadcast_in_model_group([data, torch.ones(5)] if topology.is_first("model") else "mine")
    return [first, second]


def test_a_nested_batch_reaches_its_model_group_only() -> None:
    for rank, (first, second) in enumerate(run_ranks(broadcast_batches, 4)):
        data = rank % 2
        assert torch.equal(first["x"], torch.arange(6.0).reshape(2, 3).t() + data)
        assert isinstance(first["pair"], Pair)
        assert first["pair"].x.tolist() == [data] * 3
        assert first["pair"].name == f"replica {data}"
        assert first["mask"][0].tolist() == [True, False]
        assert first["mask"][1:] == [None, 1.5]
        assert first["empty"].shape == (0, 4)
        assert (first["scalar"].dtype, first["scalar"].item()) == (torch.bfloat16, data)
        assert first["complex"][0].tolist() == [1 + 2j]
        assert first["complex"][1]["a"].tolist() == [1.0] * (1 + data)
        assert second[0] == data
        assert second[1].tolist() == [1.0] * 5


def broadcast_what_cannot_be_sent() -> None:
    topology = begin([("tensor", 2)])
    topology.broadcast_in_model_group([torch.eye(2).to_sparse()] if topology.is_first("model") else None)


def test_a_batch_that_cannot_be_sent_is_an_error_on_every_rank() -> None:
    first, second = rank_errors(broadcast_what_cannot_be_sent, 2)
    assert first == second
    assert first is not None
    assert first[0] == "UsageError"
    assert "torch.sparse_coo" in first[1]


def destroy_and_set_up_again() -> list[int]:
    cluster, job = start()
    first = setup_process_groups([("pipe", 2), ("data", 2)], cluster=cluster, job=job)
    old = first.group("pipe")
    first.destroy()
    first.destroy()
    assert first.ranks("pipe") == first.axes.ranks("pipe", job.rank)  # facts stay
    for ask in (lambda: first.group("pipe"), lambda: first.mesh, lambda: first.broadcast_in_model_group(1)):
        with pytest.raises(TopologyError, match=r"destroyed; call epl\.setup_process_groups again"):
            ask()
    with pytest.raises(KeyError):  # torch has forgotten it
        dist.get_process_group_ranks(old)
    second = setup_process_groups([("tensor", 4)], cluster=cluster, job=job)
    total = torch.tensor([job.rank])
    dist.all_reduce(total, group=second.group("tensor"))
    job.close()
    second.destroy()  # its groups went with the default group; this must not fail
    with pytest.raises(TopologyError, match="destroyed"):
        second.group("tensor")
    return [int(total)]


def test_destroy_and_set_up_again() -> None:
    assert run_ranks(destroy_and_set_up_again, 4) == [[6]] * 4


def wait_for_nobody() -> None:
    cluster, job = start()
    topology = setup_process_groups([("data", 2)], cluster=cluster, job=job, timeout=1)
    if job.rank == 0:
        topology.broadcast_in_model_group(None)  # alone in its model group: no waiting
        dist.all_reduce(torch.ones(1), group=topology.group("data"))
    else:
        dist.barrier()  # waits for rank 0 with the job's own deadline, 30 s


def test_collectives_of_the_groups_have_their_own_deadline() -> None:
    first, _ = rank_errors(wait_for_nobody, 2, timeout=15)
    assert first is not None
    assert "imed out" in first[1]


def wrong_axes(axes_of_rank: list[Spec]) -> None:
    cluster, job = start()
    setup_process_groups(axes_of_rank[cluster.rank], cluster=cluster, job=job)


def test_wrong_axes_are_the_same_error_on_every_rank() -> None:
    errors = rank_errors(wrong_axes, 2, [[("data", 3), ("data", 0)]] * 2)
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "TopologyError"
    assert "2 problems" in errors[0][1]


@pytest.mark.parametrize("other", [[("tensor", 2)], [("data", 5)]], ids=["another axis", "a wrong one"])
def test_ranks_that_ask_for_different_axes_all_hear_of_it(other: Spec) -> None:
    errors = rank_errors(wrong_axes, 2, [[("data", 2)], other])
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "RanksDisagreeError"
    assert "rank 0: data 2 = 2 ranks" in errors[0][1]
    assert f"{other[0][0]} {other[0][1]} = " in errors[0][1]
