"""Split scopes in a forward claim the modules and parameters that their code names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from epl.errors import StrategyError
from epl.graph import registry, taskgraphs_of
from epl.graph.forward_claims import claim_split_scopes, refuse_unclaimed

COUNT = 2


class Faces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(6, 8)
        self.backbone.width = 8
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.ends: Any = {"left": nn.Linear(8, 8)}
        self.left = self.ends["left"]
        self.weight = nn.Parameter(torch.randn(10, 8))
        self.scale, self.turn, self.outside = 4.0, 0, nn.Linear(10, 10)

    def feed(self, h: torch.Tensor) -> torch.Tensor:
        return self.blocks[self.turn](h) if self.turn else self.feed_all(h)

    def feed_all(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with epl.replicate(COUNT, name="rows"):
            f = self.backbone(x)
        with epl.split(COUNT, name="classes"):
            f = self.feed(self.ends["left"](f.view(-1, self.backbone.width)))
            logits = F.linear(f, F.normalize(self.weight.float())) * self.scale
        return self.outside(logits)


def owned(model: nn.Module) -> dict[str, list[str]]:
    return {each.taskgraph.name: sorted(each.parameters) for each in taskgraphs_of(model, registry)}


def test_claims_what_the_code_names() -> None:
    model = Faces()
    claim_split_scopes(model, registry)
    blocks = [f"blocks.{i}.{what}" for i in (0, 1) for what in ("bias", "weight")]
    found = owned(model)
    assert found["classes"] == [*blocks, "left.bias", "left.weight", "weight"]
    assert {"backbone.bias", "backbone.weight"} <= set(found["rows"])
    before = owned(model)
    claim_split_scopes(model, registry)  # epl.plan first, then epl.parallelize
    assert owned(model) == before
    registry.on_forward_scope = refuse_unclaimed
    model(torch.randn(3, 6))  # its scopes do nothing any more


class OfStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with epl.replicate(1):
            x = self.a(x)
        with epl.split(1):
            return self.b(x)


def test_without_a_split_nothing_is_claimed() -> None:
    model = OfStages()
    claim_split_scopes(model, registry)
    assert taskgraphs_of(model, registry).implicit


class Unclear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, ways: int = 2) -> torch.Tensor:
        b = self.b
        with epl.split(ways):
            x = self.a(x)
        with epl.split(2, name="twice"):
            x = b(self.a(x))
        with epl.split(2, name="once"):
            x = self.a(x) * 2
        with epl.split(2, name="nothing"):
            return x.relu()


def test_all_that_is_unclear_is_said_at_once() -> None:
    with pytest.raises(StrategyError) as error:
        claim_split_scopes(Unclear(), registry)
    text = str(error.value)
    assert "its arguments are known while the forward runs only" in text
    assert "it calls b, of which the source does not say what it is" in text
    assert "it names no module and no parameter of self" in text
    assert "Linear is named in split(2) 'twice' and in split(2) 'once'" in text
    assert "epl.annotate(epl.split(k), model.part)" in text


def test_what_a_scope_has_built_is_not_claimed_by_another() -> None:
    model = Faces()
    epl.annotate(epl.replicate(2, name="other"), model.left)
    with pytest.raises(
        StrategyError, match=r"Linear is named in split\(2\) 'classes' and belongs to replicate\(2\) 'other'"
    ):
        claim_split_scopes(model, registry)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with scope():
            return self.a(x)


def scope() -> Any:
    return epl.split(2)


def test_a_split_scope_that_the_source_does_not_show_is_refused_when_it_is_entered() -> None:
    # On shared devices it was entered, and nothing was cut.
    model = Hidden()
    claim_split_scopes(model, registry)
    registry.on_forward_scope = refuse_unclaimed
    with pytest.raises(StrategyError, match="nothing would be cut"):
        model(torch.randn(1, 2))
