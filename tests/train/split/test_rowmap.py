"""How rows of ranks of their own go into split parts, found from a recorded forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epl
from epl.graph.record import Recordings
from epl.train.split.rowmap import row_map
from tests.harness import run_ranks
from tests.parity.compare import Run, assert_same


class Net(nn.Module):
    def __init__(self, glue: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.body, self.part, self.glue = nn.Linear(6, 6), nn.Linear(6, 5), glue

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.part(self.glue(self.body, x))
        return out


GLUES: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "rows": (lambda body, x: body(x), (1,)),
    "tokens": (lambda body, x: body(x.unflatten(1, (2, 3)).repeat(1, 1, 2)).flatten(0, 1), (2,)),
    "view": (lambda body, x: body(torch.stack([x] * 3, 1)).view(-1, 6) + 1, (3,)),
    "two views": (lambda body, x: torch.cat([body(x), body(x.flip(1))]).tanh(), (1, 1)),
    "two views, in": (lambda body, x: body(torch.cat([x, -x])), (1, 1)),
    "of tokens": (lambda body, x: torch.cat([body(torch.stack([x, x], 1)).flatten(0, 1), body(x)]), (2, 1)),
    "positions first": (lambda body, x: body(torch.stack([x] * 3, 1)).transpose(0, 1).reshape(-1, 6), (1, 1, 1)),
    "repeated": (lambda body, x: body(x).repeat(2, 1), (1, 1)),
    "each repeated": (lambda body, x: body(x).repeat_interleave(2, 0), (2,)),
    "one of two": (lambda body, x: torch.cat([body(x), x, x]).chunk(3)[1], (1,)),
    "two of three": (lambda body, x: torch.cat(body(torch.cat([x, x, x])).chunk(3)[1:]), (1, 1)),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", GLUES)
def test_the_order_of_rows_that_have_several_elements(name: str, rows: int) -> None:
    """Every rank must find the same, also one with a single row."""
    glue, sections = GLUES[name]
    model = Net(glue)
    recorded = Recordings(model, lambda module: "split" if module is model.part else "body").of(
        (torch.randn(rows, 6),), {}, 1
    )
    ((part,),) = row_map(recorded, {"split"}).values()
    assert part.call.inputs[0].dim == part.call.outputs[0].dim == 0
    assert part.call.inputs[0].inners == part.call.outputs[0].inners == sections


class Pairs(nn.Module):
    """A contrastive loss: the other view of a row lies half the batch away."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 10)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        z = F.normalize(self.project(h), dim=1)
        n = z.shape[0]
        alike = (z @ z.t() * 4).masked_fill(torch.eye(n, dtype=torch.bool), -1e9)
        return F.cross_entropy(alike, torch.arange(n).roll(n // 2))


class Contrastive(nn.Module):
    def __init__(self, annotated: bool) -> None:
        super().__init__()
        with epl.replicate(2) if annotated else contextlib.nullcontext():
            self.body = nn.Linear(6, 8)
        with epl.split(2) if annotated else contextlib.nullcontext():
            self.loss = Pairs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.loss(torch.cat([self.body(x), self.body(x.flip(1))]).tanh())
        return out


def _train(annotated: bool) -> Run:
    torch.manual_seed(3)
    model: Any = Contrastive(annotated).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(13, 6, dtype=torch.float64)), batch_size=6)
    if annotated:
        model, optimizer, loader = epl.parallelize(model, optimizer, loader)
    losses = []
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, epl.full_state_dict(model) if annotated else model.state_dict())


def _on_a_rank() -> Run:
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "communication.timeout": 60}))
    return _train(True)


def test_pairs_of_views_are_those_of_one_device() -> None:
    # Views side by side were taken for rows with two elements each, so that the ranks' rows lay as [a, a', b, b'] where one device
    # has [a, b, a', b']: a loss that finds pairs by their place trained on wrong ones. And in a tail of one row it saw that row
    # twice: the other rank repeats it, to stay in step.
    for found in run_ranks(_on_a_rank, 2):
        assert_same(found, _train(False))
