"""A rank that calls a split model alone: it and the others are told so at once, wherever the others are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import epl
from epl.errors import RanksDisagreeError
from tests.harness import run_ranks


def _evaluate_on_rank_0(colocated: bool) -> str:
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": colocated, "communication.timeout": 30}))
    torch.manual_seed(0)
    body = nn.Linear(6, 8)
    if colocated:
        epl.annotate(epl.replicate(2), body)
    with epl.split(2):
        head = nn.Linear(8, 10)
    model = epl.parallelize(nn.Sequential(body, head))
    x, y = torch.randn(4, 6), torch.arange(4)
    nn.functional.cross_entropy(model(x), y).backward()

    def evaluate() -> None:
        if epl.Env.get().cluster.rank == 0:
            with torch.no_grad():
                epl.whole(model(x))
        epl.global_mean(torch.zeros(()))

    with pytest.raises(RanksDisagreeError) as told:
        evaluate()
    return str(told.value)


@pytest.mark.parametrize("colocated", [False, True])
def test_every_rank_is_told_both_places(colocated: bool) -> None:
    first, second = run_ranks(_evaluate_on_rank_0, 2, colocated)
    assert first == second
    assert "rank 0: calling Sequential, which is split" in first
    assert "rank 1: epl.global_mean" in first
