"""Experts planned by the chooser and carried out by a split part, as a user's model is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from epl.errors import SplitError
from epl.parallel.split.choose import choose
from epl.parallel.split.part import SplitPart
from tests.nn.reference import Small, close
from tests.parallel.experts.own_rows import OwnRows
from tests.parallel.experts.test_run import ROWS, batch, make, on_one_device
from tests.parallel.split.threads import ThreadRanks, run_threads

STACKED = ["experts.b1", "experts.b2", "experts.w1", "experts.w2"]


@pytest.mark.parametrize("own_rows", [False, True], ids=["same rows", "own rows"])
@pytest.mark.parametrize(
    "options", [{}, {"shared_experts": 2}, {"expert": Small}], ids=["stacked", "shared", "own experts"]
)
def test_planned_and_carried_out(options: dict[str, Any], own_rows: bool) -> None:
    one = make(capacity_factor=0.8, **options)
    x, direction = batch()
    start = copy.deepcopy(one)
    y, aux, gradient = on_one_device(one, x, direction)
    boundary = OwnRows((4, ROWS - 4)) if own_rows else None
    plan = choose(start, 2, (x[:4] if own_rows else x,), boundary=boundary)
    if "expert" not in options:
        assert [name for name, choice in plan.choices.items() if choice and choice.dim == 0 and "experts." in name] == [
            name for name in plan.choices if name in STACKED
        ]
        assert len({plan.choices[name].axis for name in STACKED}) == 1
    assert plan.choices["gate.weight"] is None
    assert start.statistics().calls == 0  # planning counts nothing

    def rank(ranks: ThreadRanks) -> None:
        moe = copy.deepcopy(start)
        part = SplitPart(moe, plan, ranks, boundary=boundary)
        rows = slice(None) if not own_rows else slice(0, 4) if ranks.rank == 0 else slice(4, None)
        own = x[rows].clone().requires_grad_()
        made, told = moe(own)
        close(made, y[rows])
        for found, expected in zip(told, aux, strict=True):
            close(found, expected)
        ((made * direction[rows]).sum() + 0.3 * told.balance_loss + 0.2 * told.z_loss).backward()
        close(own.grad, gradient[rows])
        for (name, parameter), (_, same) in zip(moe.named_parameters(), one.named_parameters(), strict=True):
            layout = part.layouts.get(name)
            close(parameter.grad, same.grad if layout is None else layout.take(same.grad, ranks.rank))

    run_threads(rank, 2)


def test_fewer_experts_than_ranks_are_refused() -> None:
    with pytest.raises(SplitError, match="w1: 5"):
        choose(make(), 6, (torch.randn(4, 6, dtype=torch.float64),))
