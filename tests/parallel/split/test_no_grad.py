"""Code without grad mode inside a split part: statistics, targets, frozen parts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from tests.harness import run_ranks
from tests.parallel.split.cases import alone
from tests.parallel.split.parity import check


class Net(nn.Module):
    """`a` ends in a sum over ranks, and a bias that is added after it."""

    def __init__(self, use: str, split: bool) -> None:
        super().__init__()
        self.use = USES[use]
        with epl.split(2) if split else contextlib.nullcontext():
            self.a = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8))
            self.f = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


def _frozen(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = net.a(x)
    return net.f(h)


def _target(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    with torch.no_grad():
        target = net.f(h)
    return net.f(h) + 0.1 * target


def _statistic(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    with torch.no_grad():
        mean = h.abs().mean()
    return net.f(h / mean)


USES: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "frozen": _frozen,
    "target": _target,
    "statistic": _statistic,
}


def _step(use: str, split: bool) -> tuple[float, dict[str, bool], dict[str, torch.Tensor]]:
    if split:
        epl.init(epl.Config({"communication.timeout": 30}))
    torch.manual_seed(5)
    model = Net(use, split).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.randint(0, 7, (6,))
    if split:
        epl.parallelize(model, optimizer)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    trained = {name: p.grad is not None for name, p in model.named_parameters()}
    optimizer.step()
    state = epl.full_state_dict(model) if split else model.state_dict()
    return loss.item(), trained, {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("use", USES)
def test_who_reads_a_sum_first_does_not_decide_on_its_gradient(use: str) -> None:
    """The sum was made in the grad mode of whoever asked first, and later ones read the same: without it, all before lost their gradients.
    A bias that waited for the sum of a frozen part got one."""
    loss, trained, state = _step(use, False)
    for found, theirs, weights in run_ranks(_step, 2, use, True):
        assert found == pytest.approx(loss, abs=1e-12)
        assert theirs == trained
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)


class Follower(nn.Module):
    """An encoder that follows another by momentum, in the forward, as MoCo has it."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data = mine.data * 0.7 + theirs.data * 0.3
            k = self.key(x * 0.9)
        return (q * k).sum(-1)


@pytest.mark.parametrize("ways", [2, 3])
def test_data_of_cut_parameters_may_be_set(ways: int) -> None:
    # It was refused: "would write into a value that is split over ranks".
    torch.manual_seed(0)
    check(alone(Follower().double(), torch.randn(4, 6, dtype=torch.float64)), ways)
