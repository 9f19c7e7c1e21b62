"""`epl.plan` says how parts under split would be cut, and refuses what cannot be, without a launch; a run's plan says the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import epl
from epl.env import Env
from epl.errors import SplitError
from epl.graph import registry
from tests.harness import run_ranks


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Env, "_current", None)
    registry.reset()
    yield
    registry.reset()


class Net(nn.Module):
    """The stages are a small and a large one."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        with first:
            self.first = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16))
        with second:
            self.second = nn.Linear(16, 3000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def cuts(plan: Any) -> dict[str, dict[str, str]]:
    return {split.part: {cut.name: cut.how for cut in split.parameters} for split in plan.splits}


def test_stages_and_their_reasons() -> None:
    # A stage's parameters were small beside the whole model's, and stayed whole on all its ranks.
    plan = epl.plan(Net(epl.split(2, name="a"), epl.split(3, name="b")), torch.zeros(4, 6), num_devices=5)
    whole = "whole"
    assert cuts(plan) == {
        "a": {
            "first.0.weight": "dim 0: 16 parts",
            "first.0.bias": "dim 0: 16 parts",
            "first.2.weight": "dim 1: 16 parts",
            "first.2.bias": whole,
        },
        "b": {"second.weight": "dim 0: 3000 parts", "second.bias": "dim 0: 3000 parts"},
    }
    for text in ("a, split over 2 ranks:", "b, split over 3 ranks:", "columns (", "all-reduce"):
        assert text in str(plan)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("colocated", [False, True])
def test_on_shared_devices(monkeypatch: pytest.MonkeyPatch, colocated: bool, device: str) -> None:
    monkeypatch.setenv("EPL_CLUSTER_COLOCATE_SPLIT_AND_REPLICATE", str(colocated))
    with torch.device(device):
        net = Net(epl.replicate(2), epl.split(2)) if colocated else Net(epl.split(2, name="x"), epl.split(2, name="x"))
    plan = epl.plan(net, torch.zeros(4, 6), num_devices=4)
    part, prefix = ("second", "") if colocated else ("", "second.")
    assert cuts(plan)[part][f"{prefix}weight"] == "dim 0: 3000 parts"
    assert {p.device.type for p in net.parameters()} == {device}
    assert not any(type(p) is not nn.Parameter for p in net.parameters())


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(24, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


@pytest.mark.parametrize("stages", [1, 2])
def test_heads_that_do_not_divide_are_refused_before_a_launch(stages: int) -> None:
    parts = []
    for number in range(stages):
        with epl.split(3, name=f"part {number}"):
            parts.append(Attention(4))
    with pytest.raises(SplitError, match=r"4 heads .* 3 ranks; the nearest splits that can be: 2 or 4"):
        epl.plan(nn.Sequential(*parts), torch.zeros(2, 5, 24), num_devices=3 * stages)


@pytest.mark.parametrize("colocated", [False, True])
def test_what_is_in_the_way_of_every_part_is_told_at_once(monkeypatch: pytest.MonkeyPatch, colocated: bool) -> None:
    # Only the first part was tried, and beside replicate its error did not say which part it is.
    monkeypatch.setenv("EPL_CLUSTER_COLOCATE_SPLIT_AND_REPLICATE", str(colocated))
    with epl.split(3, name="left"):
        left = Attention(4)
    with epl.split(3, name="right"):
        right = Attention(2)
    between = nn.Linear(24, 24)
    epl.annotate(epl.replicate(3), between)
    with pytest.raises(SplitError) as told:
        epl.plan(nn.Sequential(left, between, right), torch.zeros(3, 5, 24), num_devices=3 if colocated else 9)
    names = ("0", "2") if colocated else ("left", "right")
    for text in (
        "2 problems",
        f"1. {names[0]}: ",
        "4 heads",
        f"2. {names[1]}: ",
        "2 heads",
        "over 3 ranks" if not colocated else "3 ranks",
    ):
        assert text in str(told.value)


def test_a_split_without_parameters_of_its_own_is_told_about(caplog: pytest.LogCaptureFixture) -> None:
    # All its ranks computed the same, and nobody said so.
    with epl.split(2, name="wide"):
        wide = nn.ReLU()
    with epl.replicate(1, name="last"):
        last = nn.Linear(4, 4)
    plan = epl.plan(nn.Sequential(wide, last), torch.zeros(4, 4), num_devices=3)
    assert cuts(plan)["wide"] == {}
    assert "nothing is split of wide: no parameter belongs to it alone" in caplog.text


def _planned_and_run() -> tuple[Any, Any]:
    epl.init(epl.Config({"communication.timeout": 30}))
    model = Net(epl.split(2, name="a"), epl.replicate(1, name="b"))
    foreseen = epl.plan(model, torch.zeros(4, 6))
    model = epl.parallelize(model)
    model(torch.zeros(4, 6)).sum().backward()
    plan = Env.get().plan
    assert plan is not None
    return foreseen.splits, plan.splits


def test_what_is_foreseen_is_what_is_done() -> None:
    for foreseen, done in run_ranks(_planned_and_run, 3):
        assert foreseen == done
        assert [split.part for split in done] == ["a"]
