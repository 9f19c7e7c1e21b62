"""A model with split parts beside rows of their own, of which the loop calls the parts instead of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from epl.errors import UsageError
from tests.harness import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with epl.replicate(2):
            self.body = nn.Linear(6, 8)
        with epl.split(2):
            self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out


Output = Callable[[Net, torch.Tensor], torch.Tensor]
OUTPUTS: dict[str, Output] = {
    "parts": lambda m, x: m.head(torch.tanh(m.body(x))),
    "parameters": lambda m, x: F.linear(torch.tanh(m.body(x)), m.head.weight, m.head.bias),
}


def _refused(how: str, closure: bool) -> str:
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "communication.timeout": 60}))
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters()) if closure else torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = epl.parallelize(model, optimizer)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = F.cross_entropy(OUTPUTS[how](model, torch.randn(4, 6)), torch.arange(4))
        found.backward()
        return found

    if not closure:
        loss()
    with pytest.raises(UsageError) as caught:
        optimizer.step(loss if closure else None)
    return str(caught.value)


@pytest.mark.parametrize(("how", "closure"), [("parts", False), ("parts", True), ("parameters", False)])
def test_a_step_without_a_call_of_the_model_is_refused(how: str, closure: bool) -> None:
    # What is cut and reduced follows from the first call of the model: without one, every rank trained a replica of its own.
    for said in run_ranks(_refused, 2, how, closure):
        assert "before Net was called" in said
        assert "model(x)" in said
