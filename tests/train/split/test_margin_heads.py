"""Margin heads (ArcFace, CosFace) under split: their normalised weights stay where they are, whatever way they are written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from epl.parallel.split.ranks import GroupRanks
from tests.harness import run_ranks

CLASSES, FEATURES, ROWS = 50, 8, 6


def _arc(cos: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hot = F.one_hot(y, CLASSES).to(cos.dtype)
    moved = torch.cos(torch.acos(cos.clamp(-1 + 1e-7, 1 - 1e-7)) + 0.5)
    return 8 * (hot * moved + (1 - hot) * cos)


def _cosface(cos: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 8 * cos.scatter(1, y[:, None], cos.gather(1, y[:, None]) - 0.35)


HEADS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "arcface": lambda x, w, y: _arc(F.linear(F.normalize(x), F.normalize(w)), y),
    "cosface": lambda x, w, y: _cosface(F.normalize(x) @ F.normalize(w).t(), y),
    "divided": lambda x, w, y: _cosface(F.linear(F.normalize(x), w / w.norm(dim=1, keepdim=True)), y),
    "torch.norm": lambda x, w, y: _arc(F.normalize(x) @ (w / torch.norm(w, dim=1, keepdim=True).clamp(min=1e-9)).T, y),
}


class Margin(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(CLASSES, FEATURES)), how

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return HEADS[self.how](x, self.weight, y)


class Net(nn.Module):
    def __init__(self, how: str, colocated: bool) -> None:
        super().__init__()
        with epl.replicate(2) if colocated else contextlib.nullcontext():
            self.body = nn.Linear(6, FEATURES)
        with epl.split(2):
            self.head = Margin(how)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.head(self.body(x), y)


def _gathered(how: str, colocated: bool) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """This rank's part of the weight, and what has been gathered in a step that is as large as a block of it or has classes."""
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": colocated, "communication.timeout": 60}))
    torch.manual_seed(0)
    model = Net(how, colocated)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = epl.parallelize(model, optimizer)
    sent: list[tuple[int, ...]] = []
    all_gather = GroupRanks.all_gather

    def note(ranks: GroupRanks, tensor: torch.Tensor, lengths: Sequence[int], dim: int) -> list[torch.Tensor]:
        sent.append(tuple(tensor.shape))
        return all_gather(ranks, tensor, lengths, dim)

    GroupRanks.all_gather = note  # type: ignore[method-assign]
    try:
        for _ in range(3):  # the first has the check of a new loss
            sent.clear()
            y = torch.arange(ROWS)
            F.cross_entropy(model(torch.randn(ROWS, 6), y), y).backward()
            optimizer.step()
    finally:
        GroupRanks.all_gather = all_gather  # type: ignore[method-assign]
    return tuple(model.head.weight.shape), [shape for shape in sent if CLASSES // 2 in shape]


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("how", HEADS)
def test_the_weight_stays_cut_by_classes(how: str, colocated: bool) -> None:
    # F.normalize(w) once gathered the weight on every rank, forward and backward: its rule did not know `out=None`.
    for shape, gathered in run_ranks(_gathered, 2, how, colocated):
        assert shape == (CLASSES // 2, FEATURES)
        assert gathered == []
