"""Gradient hooks on cut parameters: given the whole gradient of the replica, once per backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from tests.harness import run_ranks


def train(kind: str, after: bool) -> tuple[list[tuple[tuple[int, ...], float]], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7)).double()
    if kind != "one device":
        settings: dict[str, Any] = {"pipeline.num_micro_batch": 2} if kind in ("micro batches", "stage") else {}
        epl.init(epl.Config({"communication.timeout": 30, **settings}))
        if kind == "stage":
            epl.annotate(epl.split(2), model[:2])
            epl.annotate(epl.replicate(1), model[2])
        else:
            epl.annotate(epl.split(2), model)
    seen: list[tuple[tuple[int, ...], float]] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(gradient.shape), gradient.norm().item()))
        return gradient / (gradient.norm() + 0.1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind != "one device":
        epl.parallelize(model, optimizer)
    removed = model[0].bias.register_hook(hook)
    if not after:
        model[0].weight.register_hook(hook)
    x, y = torch.randn(6, 6).double(), torch.randint(0, 7, (6,))
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if after:
            model[0].weight.register_hook(hook)
            after = False
        removed.remove()
    state = model.state_dict() if kind == "one device" else epl.full_state_dict(model)
    return seen, {name: entry.clone() for name, entry in state.items()}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("kind", "ranks"), [("same rows", 2), ("micro batches", 2), ("stage", 3)])
def test_a_hook_sees_the_whole_gradient(kind: str, ranks: int, after: bool) -> None:
    # It was given the rank's block: one that uses a norm, or a shape, trained another model without a word.
    expected, weights = train("one device", after)
    found = run_ranks(train, ranks, kind, after)
    for seen, state in found:
        for name, entry in weights.items():
            torch.testing.assert_close(state[name], entry, rtol=1e-9, atol=1e-12)
        if kind != "stage":
            assert sorted(shape for shape, _ in seen) == sorted(shape for shape, _ in expected)
            assert sorted(norm for _, norm in seen) == pytest.approx(sorted(norm for _, norm in expected))
