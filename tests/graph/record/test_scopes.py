"""Scopes inside a forward say where the code in them runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import epl
from epl.graph.record import Recordings
from epl.graph.state import Registry, registry
from tests.graph.record.replaying import check


@pytest.fixture(autouse=True)
def clean() -> None:
    registry.reset()
    yield
    registry.reset()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with epl.replicate(1, name="left"):
            x = self.a(x).sin()
        with epl.replicate(1, name="right"):
            return self.b(x).cos()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        for _ in range(2):
            with epl.replicate(1):
                x = self.last(x * 2)
        return x + 1


def test_scopes_in_a_forward_tag_modules_and_glue():
    model = Outer()
    recordings = Recordings(model, lambda module: None)
    call = check(model, torch.randn(4, 4), recordings=recordings)
    tags = {node.name: node.meta["taskgraph"] for node in call.whole.nodes if node.op != "placeholder"}
    assert tags == {
        "inner_a": "left",
        "sin": "left",
        "inner_b": "right",
        "cos": "right",
        "mul": "taskgraph_2",
        "last": "taskgraph_2",
        "mul_1": "taskgraph_3",
        "last_1": "taskgraph_3",
        "add": None,
    }
    assert [t.name for t in registry.taskgraphs] == ["left", "right", "taskgraph_2", "taskgraph_3"]
    assert registry.unused() == ()
    check(model, torch.randn(6, 4), recordings=recordings)
    assert len(registry.taskgraphs) == 4, "the same scopes, whatever the size"


def test_a_module_keeps_its_own_taskgraph_inside_a_scope():
    model = Outer()
    tags = {model.last: "mine"}
    call = Recordings(model, tags.get).of((torch.randn(4, 4),), {}, 2)
    assert {n.meta["taskgraph"] for n in call.whole.nodes if n.target == "last"} == {"mine"}


def test_nothing_is_left_listening():
    model = Outer()
    own = Registry()
    own.on_forward_scope = callback = lambda annotation: None
    Recordings(model, lambda module: None, registry=own).of((torch.randn(4, 4),), {}, 2)
    assert own.on_forward_scope is callback
    assert registry.on_forward_scope is None
