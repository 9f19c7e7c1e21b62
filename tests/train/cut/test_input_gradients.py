"""Gradients of inputs (saliency, adversarial training): those of one device, whatever the stages that use an input."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from tests.harness import run_ranks

Layout = tuple[str, str]


class Net(nn.Module):
    """Both stages use the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.second, self.beside, self.head = nn.Linear(8, 8), nn.Linear(6, 8), nn.Linear(8, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((self.second(self.first(x)) + self.beside(x)).tanh()) + x[:, :1]
        return out


def gradients(layout: Layout | None, micro_batches: int, reads: bool) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = Net().double()
    if layout is not None:
        epl.init(epl.Config({"communication.timeout": 30, "pipeline.num_micro_batch": micro_batches}))
        made = {"split": lambda: epl.split(2), "replicate": lambda: epl.replicate(1), "wide": lambda: epl.replicate(2)}
        for names, kind in zip((("first",), ("second", "beside", "head")), layout, strict=True):
            epl.annotate(made[kind](), [getattr(model, name) for name in names])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if layout is not None:
        epl.parallelize(model, optimizer)
    data, labels = torch.randn(5, 6).double(), torch.randint(0, 7, (5,))
    found = []
    for _ in range(2):
        x = data.clone().requires_grad_()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        if reads:
            assert loss.item() > 0
        loss.backward()
        optimizer.step()
        assert x.grad is not None
        found.append(x.grad)
    return found


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("layout", [("split", "replicate"), ("replicate", "split"), ("wide", "replicate")])
def test_an_input_has_the_gradient_of_one_device(layout: Layout, reads: bool) -> None:
    # The lanes of a split stage each have the whole gradient. They were added up: what came through that stage counted twice.
    expected = gradients(None, 1, False)
    for found in run_ranks(gradients, 3, layout, 2, reads):
        for own, one in zip(found, expected, strict=True):
            torch.testing.assert_close(own, one, rtol=1e-9, atol=1e-12)
