"""Parameters under split that no module holds: the code of the model computes with them between its modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from tests.harness import run_ranks

CLASSES, ROWS = 51, 12


def arc(cos: torch.Tensor, y: torch.Tensor, classes: int) -> torch.Tensor:
    hot = F.one_hot(y, classes).to(cos.dtype)
    moved = torch.cos(torch.acos(cos.clamp(-1 + 1e-7, 1 - 1e-7)) + 0.5)
    return 8 * (hot * moved + (1 - hot) * cos)


def cosface(cos: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 8 * cos.scatter(1, y[:, None], cos.gather(1, y[:, None]) - 0.35)


class Net(nn.Module):
    def __init__(self, first: Any, second: Any, how: str) -> None:
        super().__init__()
        self.how = how
        with first:
            self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU())
        with second:
            self.classes = nn.Parameter(torch.randn(CLASSES, 8))
            self.bias = nn.Parameter(torch.randn(CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h, w, b = self.body(x), self.classes, self.bias
        if self.how == "linear":
            return F.linear(h, w, b)
        if self.how == "arcface":
            return arc(F.linear(F.normalize(h), F.normalize(w)), y, w.shape[0])
        if self.how == "cosface":
            return cosface(F.normalize(h) @ F.normalize(w).t(), y)
        if self.how == "loss inside":  # classes that do not count are not spread evenly over ranks and micro batches
            return F.cross_entropy(torch.einsum("bd,cd->bc", h, w) + b, y, ignore_index=3)
        if self.how == "penalty inside":
            return F.linear(h, w, b), w.norm() + b.abs().sum()
        if (
            self.how == "by number"
        ):  # the numbers are those of the rank's own rows: 0..5 were once gathered as if they were rows
            cos = F.linear(F.normalize(h), F.normalize(w))
            return 8 * cos * (1 + cos[torch.arange(len(y)), y].view(-1, 1))
        if self.how == "changed by number":
            cos = F.linear(F.normalize(h), F.normalize(w)).clone()
            cos[torch.arange(len(y)), y] = 0.25
            return cos
        assert self.how == "used twice"
        return (h @ w[:8].T).tanh() @ w[:8] @ w.t()


def weighted(model: nn.Module, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loop itself lets logits meet parameters, from either side."""
    return F.cross_entropy(model.bias * logits, y) + (logits * model.classes.sum(1)).mean()


HEADS = (
    "linear",
    "arcface",
    "cosface",
    "loss inside",
    "penalty inside",
    "used twice",
    "by number",
    "changed by number",
)


def train(
    first: tuple[str, int], second: tuple[str, int], colocated: bool, micro_batches: int, how: str, optimizer: str
) -> Any:
    """The mean of the ranks' losses, the whole weights after three steps, and what this rank has of the classes."""
    settings = {"cluster.colocate_split_and_replicate": colocated, "pipeline.num_micro_batch": micro_batches}
    epl.init(epl.Config({**settings, "communication.timeout": 30}))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Net(*(getattr(epl, kind)(width) for kind, width in (first, second)), how)
    x, y = torch.randn(ROWS, 6), torch.randint(0, CLASSES, (ROWS,))
    y[[0, 1, 7]] = 3
    kinds: Any = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adamw": torch.optim.AdamW}
    model, steps = epl.parallelize(model, kinds[optimizer](model.parameters()))
    if colocated and "replicate" in (first[0], second[0]):
        rank, ranks = epl.Env.get().cluster.rank, epl.Env.get().cluster.world_size
        x, y = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]
    losses = []
    for _ in range(3):
        steps.zero_grad()
        out = model(x, y)
        if how == "loss inside":
            loss = out
        elif how == "penalty inside":
            loss = F.cross_entropy(out[0], y) + 0.01 * out[1]
        else:
            loss = weighted(model, out, y) if how == "linear" else F.cross_entropy(out, y)
        loss.backward()
        steps.step()
        losses.append(float(epl.global_mean(loss.detach())))
    return losses, epl.full_state_dict(model), tuple(model.classes.shape)


LAYOUTS: dict[str, tuple[tuple[str, int], tuple[str, int], int, bool, int]] = {
    "rows": (("replicate", 2), ("split", 2), 2, True, 1),
    "rows in micro batches": (("replicate", 2), ("split", 2), 2, True, 3),
    "split": (("split", 2), ("split", 2), 2, True, 1),
    "split in micro batches": (("split", 2), ("split", 2), 2, True, 3),
    "stages": (("replicate", 1), ("split", 2), 3, False, 2),
    "replicas of rows": (("replicate", 2), ("split", 2), 4, True, 1),
}
CASES = [
    *(("rows", how) for how in HEADS if how != "loss inside"),
    *(("rows in micro batches", how) for how in ("linear", "arcface", "penalty inside", "by number")),
    ("split", "arcface"),
    ("split in micro batches", "cosface"),
    ("split in micro batches", "loss inside"),
    *(("stages", how) for how in ("linear", "loss inside", "penalty inside")),
    ("replicas of rows", "cosface"),
]


@pytest.mark.parametrize(("layout", "how"), CASES)
def test_equals_one_device(layout: str, how: str) -> None:
    first, second, ranks, colocated, micro_batches = LAYOUTS[layout]
    optimizer = "sgd" if HEADS.index(how) % 2 else "adamw"
    losses, weights, _ = run_ranks(train, 1, first, second, False, 1, how, optimizer)[0]
    parts = []
    for found, state, shape in run_ranks(train, ranks, first, second, colocated, micro_batches, how, optimizer):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, expected in weights.items():
            torch.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-9)
        parts.append(shape[0])
    if layout.startswith("rows") and how in ("linear", "arcface", "cosface"):
        assert parts == [26, 25]  # by classes


def test_a_loss_inside_counts_the_own_rows() -> None:
    """With rows of its own each rank has the loss of its rows; unlike counts of ignored rows weigh as in data parallelism."""
    first, second, ranks, colocated, micro_batches = LAYOUTS["rows"]
    found = run_ranks(train, ranks, first, second, colocated, micro_batches, "loss inside", "sgd")
    expected = run_ranks(train, ranks, ("replicate", 2), ("replicate", 2), True, 1, "loss inside", "sgd")
    for (losses, state, _), (theirs, weights, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(theirs, rel=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(state[name], weight, rtol=1e-9, atol=1e-9)
