"""Replicas of a model whose forward looks at its inputs: each goes its own way, from the first call on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epl
from tests.harness import run_ranks

WIDTH, CLASSES, ROWS = 4, 5, 6


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with epl.replicate(1, name="lower"):
            self.lower = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with epl.replicate(1, name="upper"):
            self.upper = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.lower(x)
        if not mask.all():
            h = torch.relu(h * mask[:, None]) + mask.sum().item()
        return F.cross_entropy(self.upper(h), labels)


def _batch(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    mask = torch.ones(ROWS, dtype=torch.float64)
    mask[2] = (replica + step) % 2
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, mask, torch.randint(CLASSES, (ROWS,), generator=generator)


def _on_ranks() -> tuple[int, list[float], dict[str, torch.Tensor]]:
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    model = Masked()
    model, optimizer = epl.parallelize(model, torch.optim.SGD(model.parameters(), 0.1))
    replica, losses = epl.Env.get().cluster.rank // 2, []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*_batch(replica, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return replica, losses, epl.full_state_dict(model)


def test_replicas_that_read_different_numbers() -> None:
    plain = Masked()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    expected: list[list[float]] = [[], []]
    for step in range(3):
        optimizer.zero_grad()
        for replica in range(2):
            loss = plain(*_batch(replica, step))
            (loss / 2).backward()
            expected[replica].append(loss.item())
        optimizer.step()
    for replica, losses, state in run_ranks(_on_ranks, 4, timeout=60):
        assert losses == pytest.approx(expected[replica], abs=1e-9)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)
