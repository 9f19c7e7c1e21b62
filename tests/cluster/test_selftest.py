"""The self-test of communication finds nothing on sound groups and names the group where a number is wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from epl.cluster.selftest import check_communication
from tests.cluster.test_topology import Spec, begin
from tests.harness import rank_errors, run_ranks


def check(axes: Spec, devices_per_node: int) -> list[tuple[str, tuple[int, ...], bool, float, str]]:
    report = check_communication(begin(axes, devices_per_node))
    return [(c.axis, c.ranks, c.ok, c.milliseconds, str(report)) for c in report.checks]


# TorchDistPackage's self-test deadlocks with three stages: the first sends to the second, only the last receives.
@pytest.mark.parametrize(
    "axes", [[("data", 1)], [("pipe", 3)], [("pipe", 2), ("data", 2)], [("pipe", 3), ("tensor", 2)]], ids=str
)
def test_sound_groups(axes: Spec) -> None:
    size = 1
    for _, count in axes:
        size *= int(count)
    reports = run_ranks(check, size, axes, 1)
    assert all(report == reports[0] for report in reports)
    seen = {}
    for axis, ranks, ok, milliseconds, text in reports[0]:
        assert ok
        assert milliseconds > 0
        assert f"group {axis}, ranks: {list(ranks)}: ok, " in text
        seen.setdefault(axis, []).extend(ranks)
    assert list(seen) == [*(name for name, _ in axes), "model", "node", "global"]
    assert all(sorted(ranks) == list(range(size)) for ranks in seen.values())


def check_with_a_broken_rank() -> None:
    topology = begin([("pipe", 2), ("tensor", 2)])
    honest = dist.all_reduce

    def broken(tensor: torch.Tensor, **options: object) -> None:
        honest(tensor, **options)  # type: ignore[arg-type]
        if options["group"] is topology.group("tensor") and topology.job.rank == 3:
            tensor += 1

    dist.all_reduce = broken
    check_communication(topology)


def test_a_wrong_number_names_group_and_ranks_on_every_rank() -> None:
    errors = rank_errors(check_with_a_broken_rank, 4)
    assert all(error == errors[0] for error in errors)
    assert errors[0] is not None
    assert errors[0] == (
        "CommunicationError",
        "wrong numbers arrived; check the network and its drivers: group tensor, ranks [2, 3]: all-reduce on rank 3 "
        "expected 7, found 8",
    )
