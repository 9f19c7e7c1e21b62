"""Parameters under split that no split module holds: used by the model's own forward, or by the loop."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from epl.errors import PlanError
from tests.harness import run_ranks
from tests.parity.compare import Run, assert_same


class Net(nn.Module):
    """A head and positions as bare parameters of the root."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        split = epl.split(ways) if ways else contextlib.nullcontext()
        self.body = nn.Linear(6, 10)
        with split:
            self.shift = nn.Parameter(torch.randn(10))
            self.weight = nn.Parameter(torch.randn(25, 10))
        self.last = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.body(x) + self.shift), self.weight)


class Inside(Net):
    """The same, with a module after them: the code in between runs on the stages, micro batch by micro batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(super().forward(x))
        return out


def _train(kind: type[Net], ways: int, penalty: bool) -> Run:
    torch.manual_seed(0)
    model: Any = kind(ways).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole = (lambda p: p) if not ways else epl.whole
    if ways:
        model, optimizer = epl.parallelize(model, optimizer)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 25, (8,))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if penalty:
            loss = loss + 0.1 * whole(model.weight).norm()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, epl.full_state_dict(model) if ways else model.state_dict())


def _on_a_rank(kind: type[Net], micro_batches: int, penalty: bool) -> Run:
    epl.init(epl.Config({"pipeline.num_micro_batch": micro_batches, "communication.timeout": 60}))
    return _train(kind, 2, penalty)


@pytest.mark.parametrize(("kind", "micro_batches"), [(Net, 1), (Net, 2), (Inside, 1), (Inside, 2)])
def test_equals_one_device(kind: type[Net], micro_batches: int) -> None:
    # torch takes a module's forward before its hooks run, and a hook of the first call cuts the model: that call once ran the
    # forward of before, on blocks. In micro batches every call did.
    expected = _train(kind, 0, False)
    for found in run_ranks(_on_a_rank, 2, kind, micro_batches, False):
        assert_same(found, expected)


def test_a_penalty_over_the_whole_of_a_parameter() -> None:
    expected = _train(Net, 0, True)
    for found in run_ranks(_on_a_rank, 2, Net, 1, True):
        assert_same(found, expected)


class Returned(Net):
    """Hands a parameter out, as it is."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.weight


def _handed_out() -> str:
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    model = epl.parallelize(Returned(2))
    with pytest.raises(PlanError) as refused:
        model(torch.randn(4, 6))
    return str(refused.value)


def test_one_that_the_forward_returns_is_refused_in_micro_batches() -> None:
    for told in run_ranks(_handed_out, 2):
        assert "the parameter weight is under split and used after the last module" in told
        assert "put it into a module of its own" in told
