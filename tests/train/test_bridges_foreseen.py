"""`epl.plan` lists what goes from one TaskGraph to another, with its bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import epl
from epl.env import Env
from epl.graph import registry
from epl.plan.bridges import LOOP, BridgePlan


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Env, "_current", None)
    registry.reset()
    yield
    registry.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with epl.replicate(2):
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        with epl.split(2):
            self.wide = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        return self.second(h + self.wide(h))


def test_on_shared_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPL_CLUSTER_COLOCATE_SPLIT_AND_REPLICATE", "True")
    monkeypatch.setenv("EPL_PIPELINE_NUM_MICRO_BATCH", "2")
    made = epl.plan(Net(), torch.zeros(10, 6), num_devices=2)
    micro_batch = 5 * 8 * 4  # rows × features × bytes
    assert [(b.source, b.target, b.forward, b.backward) for b in made.bridges] == [
        ("taskgraph_0", "taskgraph_1", micro_batch, micro_batch),
        ("taskgraph_1", "taskgraph_0", micro_batch, micro_batch),
    ]


def test_what_the_model_returns_from_a_split_part_goes_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPL_CLUSTER_COLOCATE_SPLIT_AND_REPLICATE", "True")
    with epl.replicate(2):
        body = nn.Linear(6, 8)
    with epl.split(2):
        head = nn.Linear(8, 100)
    made = epl.plan(nn.Sequential(body, head), torch.zeros(4, 6), num_devices=2)
    assert [(b.source, b.target, b.forward) for b in made.bridges] == [
        ("taskgraph_0", "taskgraph_1", 4 * 8 * 4),
        ("taskgraph_1", LOOP, 4 * 100 * 4),
    ]


def test_between_stages_skips_go_straight_and_what_is_not_trained_has_no_gradients() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with epl.replicate(1, name="a"):
                self.a = nn.Linear(6, 8)
            with epl.replicate(1, name="b"):
                self.b = nn.Linear(8, 8)
            with epl.replicate(1, name="c"):
                self.c = nn.Bilinear(8, 8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return self.c(self.b(h.detach()), h)

    made = epl.plan(Skips(), torch.zeros(4, 6), num_devices=3)
    value = 4 * 8 * 4
    assert made.bridges == (
        BridgePlan("a", "b", "sent", value, 0),
        BridgePlan("a", "c", "sent", value, value),
        BridgePlan("b", "c", "sent", value, value),
    )
