"""Rules that users give for their own modules and functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import epl
from epl.errors import SplitError, UsageError
from epl.parallel.split import user_rules
from epl.parallel.split.choose import choose
from epl.parallel.split.rules.registry import RULES
from tests.parallel.split.cases import MLP, alone
from tests.parallel.split.parity import check, plans_of


@pytest.fixture(autouse=True)
def _no_rules_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_rules, "_modules", {})
    monkeypatch.setattr(user_rules, "_functions", {})
    for function in (swish,):
        monkeypatch.delitem(RULES, function, raising=False)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Gated(nn.Module):
    """Value and gate in one weight, multiplied by a function that is not known."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(features, 2 * width, dtype=torch.float64) * 0.3)
        self.scale = nn.Parameter(torch.ones(width, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = torch.linalg.multi_dot([x, self.fused]).chunk(2, -1)
        return value * torch.sigmoid(gate) * self.scale


@pytest.mark.parametrize("ways", [2, 3])
def test_a_module_with_sections_and_other_code_for_the_split_part(ways: int) -> None:
    def followed(self: Gated, x: torch.Tensor) -> Any:
        value, gate = (x @ self.fused).chunk(2, -1)
        return value * torch.sigmoid(gate) * self.scale

    @epl.split_rule(Gated, forward=followed)
    def cuts(module: Gated) -> Any:
        return {"fused": epl.Sections(1, 2), "scale": 0}

    torch.manual_seed(0)
    case = alone(nn.Sequential(Gated(6, 7), nn.Linear(7, 5).double()), x(4, 6))
    (plan,) = plans_of(case, ways)
    assert {name: plan.choices[f"0.{name}"].dim for name in ("fused", "scale")} == {"fused": 1, "scale": 0}  # type: ignore[union-attr]
    assert plan.choices["1.weight"].dim == 1  # type: ignore[union-attr]
    assert "split_rule of Gated" in plan.reasons["0.fused"]
    assert check(case, ways, [plan]).count("all-reduce") == 2


def test_what_a_rule_gets_wrong_is_said_at_once() -> None:
    epl.split_rule(Gated)(lambda module: {"fuse": 0, "scale": 1, "fused": epl.Sections(1, 3)})
    with pytest.raises(SplitError, match=r"(?s)no parameter 'fuse'.*no dim 1.*3 equal sections"):
        choose(Gated(6, 4), 2, (x(4, 6),))
    with pytest.raises(UsageError, match="forward= for classes of modules"):
        epl.split_rule(swish, forward=swish)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grads[0] * (gate + x * gate * (1 - gate))


def swish(x: torch.Tensor) -> torch.Tensor:
    return Swish.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("target", [Swish, swish])
def test_a_function_computed_otherwise_on_split_values(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.swish", swish)  # a rule for a function takes its place in the module

    class Net(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            return self.b(swish(self.a(x)))

    epl.split_rule(target)(lambda function, x: x * torch.sigmoid(x))
    torch.manual_seed(0)
    assert check(alone(Net(8, 16).double(), x(4, 8)), 2) == ["all-reduce", "all-reduce"]
