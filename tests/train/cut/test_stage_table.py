"""`Env.get().plan` after the first call: the stages as `epl.plan` foresees them, alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import epl
from tests.harness import run_ranks

ROWS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 20)
        self.head.weight = nn.Parameter(torch.randn(20, 8))
        self.embed.weight = self.head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Scoped(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with epl.replicate(1, name="a"):
            x = self.embed(ids)
            for block in self.blocks[:2]:
                x = x + block(x)
        with epl.replicate(1, name="b"):
            for block in self.blocks[2:]:
                x = x + block(x)
            return self.head(x)


def _plans(kind: str) -> tuple[dict[str, Any], dict[str, Any], str, int]:
    """What was foreseen, what the first call left in Env, as text, and stages that Env knew before."""
    automatic = {"auto.auto_parallel": True, "pipeline.num_stages": 2} if kind == "automatic" else {}
    epl.init(epl.Config({"pipeline.num_micro_batch": 4, **automatic}))
    torch.manual_seed(0)
    model = Scoped() if kind == "forward" else Net()
    if kind == "annotated":
        epl.annotate(epl.replicate(1, name="a"), [model.embed, *model.blocks[:1]])
        epl.annotate(epl.replicate(1, name="b"), [*model.blocks[1:], model.head])
    ids = torch.zeros(ROWS, 5, dtype=torch.long)
    foreseen = epl.plan(model, ids)
    epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = len(epl.Env.get().plan.stages)
    model(ids).sum().backward()
    plan = epl.Env.get().plan
    return foreseen.to_dict(), plan.to_dict(), str(plan), before


@pytest.mark.parametrize("kind", ["annotated", "forward", "automatic"])
def test_the_first_call_fills_in_the_stages(kind: str) -> None:
    found = run_ranks(_plans, 2, kind)
    for foreseen, plan, text, before in found:
        assert before == 0
        assert plan["stages"] == foreseen["stages"]
        assert plan["reason"] == foreseen["reason"]
        assert [stage["parameters"] > 0 and stage["activations"] > 0 for stage in plan["stages"]] == [True, True]
        assert "schedule: PreferBackward, 4 micro batches; devices idle" in text
        assert "tied: " in text
        assert text == found[0][2]


def _wide() -> tuple[list[int], list[int], list[str]]:
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    model = Net()
    model.head.weight = nn.Parameter(torch.randn(20, 8))
    epl.annotate(epl.replicate(1, name="a"), [model.embed, *model.blocks[:2]])
    epl.annotate(epl.replicate(2, name="b"), [*model.blocks[2:], model.head])
    ids = torch.zeros(ROWS, 5, dtype=torch.long)
    foreseen = epl.plan(model, ids)
    epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(ids).sum().backward()
    plan = epl.Env.get().plan
    activations = [[stage.activations or 0 for stage in each.stages] for each in (foreseen, plan)]
    return activations[0], activations[1], [t.name for t in plan.taskgraphs]


def test_a_wide_stage_keeps_its_share_of_the_activations() -> None:
    for foreseen, found, names in run_ranks(_wide, 3):
        assert found == foreseen
        assert names == ["a", "b"]
