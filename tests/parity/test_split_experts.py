"""Experts over the ranks of a split equal the same experts on one device: losses, norms and weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_ranks
from tests.parity.compare import assert_same
from tests.parity.split_experts import ExpertCase, on_one_device, under_epl

SWITCH: dict[str, Any] = {"top_k": 1, "capacity_factor": 0.6}
TABLE = [
    ExpertCase(options=SWITCH),
    ExpertCase(options={"top_k": 2, "shared_experts": 1}, optimizer="sgd", micro_batches=2),
    ExpertCase(options={"capacity_factor": None, "listed": True}, ranks=4),
    ExpertCase("pieces", {"top_k": 1, "capacity_factor": 0.6}, "rows"),
    ExpertCase("pieces", {"top_k": 2}, "rows", micro_batches=2, optimizer="sgd"),
    ExpertCase("pieces", {"top_k": 2, "capacity_factor": None, "gated": True}, "rows", ranks=4, micro_batches=2),
    ExpertCase(options={"capacity_factor": 0.7, "shared_experts": 1}, mode="rows"),
    ExpertCase(options={"top_k": 1, "listed": True}, mode="rows", micro_batches=2),
    ExpertCase("stacked", mode="rows", optimizer="sgd", micro_batches=2),
    ExpertCase("dispatched", mode="rows"),
    ExpertCase("listed", mode="rows", ranks=4, optimizer="sgd"),
    ExpertCase("listed", micro_batches=2),
    # A rank without rows of its own is kept in step by another's: that counted in capacity and balance.
    ExpertCase(options={"capacity_factor": 0.7}, mode="rows", rows=1),
    # It was tried on numbers that sent each row to one expert twice, and failed: counts by row and expert were too few.
    ExpertCase("sorted", mode="rows"),
    ExpertCase(options={"capacity_factor": 0.8}, mode="stages", ranks=4, micro_batches=2),
    ExpertCase(options=SWITCH, mode="stages", ranks=8, micro_batches=2, optimizer="sgd"),
]


@pytest.mark.parametrize(
    "case", TABLE, ids=lambda c: f"{c.model}-{c.mode}-{c.ranks}-{c.optimizer}-m{c.micro_batches}-{len(c.options)}"
)
def test_equals_one_device(case: ExpertCase) -> None:
    expected = on_one_device(case)
    for found in run_ranks(under_epl, case.ranks, case):
        assert_same(found, expected)
