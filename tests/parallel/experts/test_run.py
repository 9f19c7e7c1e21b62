"""Experts over ranks: forward and gradients against one device, where ranks have the same rows and where each has its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import epl.parallel.split.rules  # noqa: F401  (registers them)
from epl.nn import MoE
from epl.parallel.split.value import SplitTensor, shard
from tests.nn.reference import Small, close
from tests.parallel.experts.cutting import by_expert, cut_module, left, rows_cut, running
from tests.parallel.split.threads import ThreadRanks, run_threads

OPTIONS: dict[str, dict[str, Any]] = {
    "top 2": {},
    "switch": {"top_k": 1},
    "dropless": {"capacity_factor": None},
    "drops": {"capacity_factor": 0.6},
    "top 3, drops": {"capacity_factor": 0.8, "top_k": 3},
    "gated": {"gated": True, "activation": functional.silu, "bias": False},
    "own experts": {"expert": Small, "capacity_factor": 0.7},
    "not normalized": {"normalize": False},
    "own gate": {"gate": lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5))},
    "shared": {"shared_experts": 2},
    "own experts, shared": {"expert": Small, "shared_experts": 1},
}
ROWS = 7


def make(**options: Any) -> MoE:
    torch.manual_seed(0)
    options = dict(options)
    if "gate" in options:
        options["gate"] = options["gate"]()
    return MoE(6, 8, 5, **options).double()


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 3, 6, dtype=torch.float64), torch.randn(rows, 3, 6, dtype=torch.float64)


def on_one_device(moe: MoE, x: torch.Tensor, direction: torch.Tensor) -> tuple[Any, Any, torch.Tensor]:
    x = x.clone().requires_grad_()
    y, aux = moe(x)
    ((y * direction).sum() + 0.3 * aux.balance_loss + 0.2 * aux.z_loss).backward()
    assert x.grad is not None
    return y, aux, x.grad


def check_parameters(ranks: ThreadRanks, moe: MoE, one: MoE, choose: Any) -> None:
    for (name, parameter), (_, same) in zip(moe.named_parameters(), one.named_parameters(), strict=True):
        found = choose(name, same)
        expected = same.grad if found is None else found[1].take(same.grad, found[0], ranks.rank)
        if expected.numel() or parameter.grad is not None:
            close(parameter.grad, expected)


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_ranks_with_the_same_rows(options: dict[str, Any], ways: int) -> None:
    one = make(**options)
    x, direction = batch()
    start = copy.deepcopy(one)
    y, aux, gradient = on_one_device(one, x, direction)

    def rank(ranks: ThreadRanks) -> None:
        moe, choose = copy.deepcopy(start), by_expert(5, ways)
        cut_module(moe, ranks, choose)
        own = x.clone().requires_grad_()
        with running():
            made, told = moe(own)
            assert isinstance(made, SplitTensor)
            made = left(made)
        for found, expected in zip((made, *told), (y, *aux), strict=True):
            close(found, expected)
        ((made * direction).sum() + 0.3 * told.balance_loss + 0.2 * told.z_loss).backward()
        close(own.grad, gradient)
        check_parameters(ranks, moe, one, choose)
        assert ranks.calls == ["all-reduce"] * 3  # the sum; backward: of the weights, of the rows
        assert moe.statistics() == one.statistics()

    run_threads(rank, ways)


@pytest.mark.parametrize("counts", [[4, 3], [7, 0], [1, 6], [3, 2, 2], [0, 7, 0], [2, 0, 5]], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_ranks_with_rows_of_their_own(options: dict[str, Any], counts: list[int]) -> None:
    ways = len(counts)
    one = make(**options)
    x, direction = batch()
    start = copy.deepcopy(one)
    y, aux, gradient = on_one_device(one, x, direction)

    def rank(ranks: ThreadRanks) -> None:
        moe, choose, cut = copy.deepcopy(start), by_expert(5, ways), rows_cut(ROWS, ways, counts)
        cut_module(moe, ranks, choose)
        own = cut.take(x, 0, ranks.rank).clone().requires_grad_()
        with running():
            made, told = moe(shard(own, 0, cut, ranks))
        assert isinstance(made, SplitTensor)
        assert made.shape == y.shape
        close(made.local, cut.take(y, 0, ranks.rank))
        for found, expected in zip(told, aux, strict=True):
            close(found, expected)
        # A value without rows is whole, and so is its gradient: every rank has the whole of it.
        mine = (made.local * cut.take(direction, 0, ranks.rank)).sum()
        (mine + 0.3 * told.balance_loss + 0.2 * told.z_loss).backward()
        close(own.grad, cut.take(gradient, 0, ranks.rank))
        check_parameters(ranks, moe, one, choose)
        if not options.get("shared_experts"):
            assert [call for call in ranks.calls if call != "all-reduce"] == ["all-gather"] + ["all-to-all"] * 4
        assert moe.statistics() == one.statistics()

    run_threads(rank, ways)
