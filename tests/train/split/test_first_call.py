"""What is done with parameters before the first call of the model, which cuts them."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

import epl
from epl.errors import UsageError
from tests.harness import run_ranks


def _model(split: bool) -> nn.Module:
    torch.manual_seed(3)
    with epl.split(2) if split else contextlib.nullcontext():
        return nn.Sequential(nn.Linear(6, 18), nn.Tanh(), nn.Linear(18, 7)).double()


def _ready() -> tuple[nn.Module, torch.Tensor]:
    epl.init(epl.Config({"communication.timeout": 30}))
    return epl.parallelize(_model(True)), torch.randn(5, 6, dtype=torch.float64)


def _penalty_before() -> None:
    """Its gradient went to what had accumulated that of the whole parameter, and nobody saw it again."""
    model, x = _ready()
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    loss = model(x).square().mean() + penalty
    with pytest.raises(UsageError, match=r"that was whole when .* after model\(x\)"):
        loss.backward()


def _copy_before() -> None:
    model, x = _ready()
    average = copy.deepcopy(model)
    model(x)
    mean, weight = next(average.parameters()), next(model.parameters())
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        mean.lerp_(weight, 0.1)
    assert any("after that call" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("check", [_penalty_before, _copy_before])
def test_whole_parameters_that_live_on_are_told_about(check: Any) -> None:
    run_ranks(check, 2)


def _closures(split: bool, kind: str) -> dict[str, torch.Tensor]:
    if split:
        epl.init(epl.Config({"communication.timeout": 30}))
    model = _model(split)
    optimizers: dict[str, Any] = {
        "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
        "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    }
    optimizer = optimizers[kind](model.parameters())
    if split:
        epl.parallelize(model, optimizer)
    x = torch.randn(5, 6, dtype=torch.float64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    state = epl.full_state_dict(model) if split else model.state_dict()
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor"])
def test_the_first_call_may_be_in_the_closure_of_an_optimizer(kind: str) -> None:
    """Optimizers were watched from the first call on, which was too late for this step: it was one on blocks, and wrong."""
    expected = _closures(False, kind)
    for found in run_ranks(_closures, 2, True, kind):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
