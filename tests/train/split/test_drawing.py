"""Random numbers of what all ranks of a split compute: alike, however ranks are seeded."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import epl
from tests.harness import run_ranks

STEPS = 3


class Net(nn.Module):
    """Dropout on whole values and on cut ones, in the split part and around it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.again = how == "checkpoint"
        with epl.replicate(2) if how == "own rows" else contextlib.nullcontext():
            self.first = nn.Linear(6, 8)
        with contextlib.nullcontext() if how == "one device" else epl.split(2):
            self.place = nn.Parameter(torch.randn(8))
            self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True)
            self.head = nn.Linear(8, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.first(x), 0.3, self.training)
        h = h.unsqueeze(1)
        h = checkpoint(self.layer, h, use_reentrant=False) if self.again else self.layer(h)
        out: torch.Tensor = self.head(h).flatten(1)
        return out


def train(
    how: str, by_rank: bool, settings: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    if how != "one device":
        epl.init(epl.Config({"communication.timeout": 30, **settings}))
    torch.manual_seed(5)
    model = Net(how).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.randn(6, 6).double(), torch.randint(0, 7, (6,))) for _ in range(STEPS)]
    rank = 0 if how == "one device" else epl.Env.get().cluster.rank
    if how != "one device":
        epl.parallelize(model, optimizer)
    torch.manual_seed(100 + rank if by_rank else 100)
    losses, own = [], []
    for x, y in data:
        noise = torch.rand(()).item()  # of the process's own stream, between calls
        own.append(noise)
        loss = F.cross_entropy(model(x if by_rank else x + noise), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict() if how == "one device" else epl.full_state_dict(model)
    return {name: entry.clone() for name, entry in state.items()}, losses, own


COLOCATED = {"cluster.colocate_split_and_replicate": True}


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("same rows", {}),
        ("checkpoint", {}),
        ("same rows", {"pipeline.num_micro_batch": 2}),
        ("own rows", COLOCATED),
    ],
)
def test_ranks_seeded_apart_draw_alike_what_is_whole(how: str, settings: dict[str, Any]) -> None:
    # What is whole under split drew from the process's generator. Ranks that were seeded apart (or not at all) had other masks for
    # values that each of them takes for the same, and the weights that all of them hold drifted apart.
    (first, _, own), (second, _, other) = run_ranks(train, 2, how, True, settings)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert own != other  # what the loop draws is still the rank's own


def test_ranks_seeded_alike_draw_what_one_device_draws() -> None:
    expected, losses, noise = train("one device", False, {})
    for state, found, drawn in run_ranks(train, 2, "same rows", False, {"split.exact_dropout": True}):
        assert drawn == noise  # the draws of the model count for the process
        assert found == pytest.approx(losses, rel=1e-9)
        for name, entry in expected.items():
            torch.testing.assert_close(state[name], entry)
