"""`epl.nn.MoE` on one device: against a loop over rows, and what is around it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from epl import _torch
from epl.errors import UsageError
from epl.nn import Experts, MoE, TopKGate
from tests.nn.reference import Small, close, reference

CASES: dict[str, dict[str, Any]] = {
    "top 2": {},
    "switch": {"top_k": 1},
    "dropless": {"capacity_factor": None},
    "drops": {"capacity_factor": 0.6},
    "drops, top 1": {"capacity_factor": 0.5, "top_k": 1},
    "top 3": {"capacity_factor": 0.8, "top_k": 3},
    "not normalized": {"normalize": False},
    "shared": {"shared_experts": 2},
    "gated": {"gated": True, "activation": functional.silu, "bias": False, "shared_experts": 1},
    "own experts": {"expert": Small},
    "own experts, shared": {"expert": Small, "shared_experts": 2, "capacity_factor": 0.7},
    "own gate": {"gate": lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5))},
}


def make(**options: Any) -> MoE:
    torch.manual_seed(0)
    if "gate" in options:
        options["gate"] = options["gate"]()
    return MoE(6, 8, 5, **options).double()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_is_what_a_loop_over_rows_computes(options: dict[str, Any]) -> None:
    moe = make(**options)
    other = copy.deepcopy(moe)
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    like = x.detach().clone().requires_grad_()

    y, aux = moe(x)
    expected, expected_aux = reference(other, like)
    close(y, expected)
    for name, value in expected_aux.items():
        close(getattr(aux, name), value)

    direction = torch.randn_like(y)
    ((y * direction).sum() + 0.3 * aux.balance_loss + 0.2 * aux.z_loss).backward()
    ((expected * direction).sum() + 0.3 * expected_aux["balance_loss"] + 0.2 * expected_aux["z_loss"]).backward()
    close(x.grad, like.grad)
    for (name, parameter), (_, same) in zip(moe.named_parameters(), other.named_parameters(), strict=True):
        if same.grad is None:  # an expert without rows, in the loop
            assert parameter.grad is not None, name
            close(parameter.grad, torch.zeros_like(same))
        else:
            close(parameter.grad, same.grad)


def test_an_expert_without_rows_has_a_gradient_of_zeros() -> None:
    moe = make(capacity_factor=None)
    x = torch.rand(4, 6, dtype=torch.float64) + 1
    with torch.no_grad():
        moe.gate.weight[2] = -10
    y, aux = moe(x)
    y.sum().backward()
    assert aux.counts[2] == 0
    assert 2 in moe.statistics().idle
    assert moe.experts.w1.grad[2].abs().max() == 0


def test_drops_are_said_once_and_counted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("epl"), "propagate", True)
    caplog.set_level(logging.INFO, "epl")
    moe = make(capacity_factor=0.5)
    x = torch.randn(10, 6, dtype=torch.float64)
    dropped = [int(moe(x)[1].dropped) for _ in range(2)]
    assert dropped[0] == dropped[1] > 0
    said = [record.getMessage() for record in caplog.records if "over the capacity 2" in record.getMessage()]
    assert len(said) == 1
    assert f"{dropped[0]} of 20" in said[0]
    found = moe.statistics(reset=True)
    assert found.calls == 2
    assert sum(found.counts) == 40
    assert sum(found.dropped) == sum(dropped)
    assert found.imbalance == max(found.counts) / 8
    assert found.dropped_share == sum(dropped) / 40
    assert moe.statistics().calls == 0
    assert moe.statistics().imbalance == 1.0


def test_recompute_counts_a_forward_once() -> None:
    moe = make()
    x = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    y, _ = checkpoint(moe, x, use_reentrant=False)
    y.sum().backward()
    assert moe.statistics().calls == 1


def test_runs_on_fake_tensors_without_looking_at_numbers() -> None:
    with _torch.fake_mode():
        moe = MoE(6, 8, 5, capacity_factor=0.5, shared_experts=1)
        y, aux = moe(torch.empty(3, 4, 6))
    assert y.shape == (3, 4, 6)
    assert aux.counts.shape == (5,)
    assert moe.statistics().calls == 0


def test_no_rows_at_all() -> None:
    moe = make()
    y, aux = moe(torch.empty(0, 4, 6, dtype=torch.float64))
    assert y.shape == (0, 4, 6)
    assert aux.counts.sum() == 0
    assert aux.balance_loss == 0


def test_jitter_shakes_the_gate_only_while_training() -> None:
    moe = make(router_jitter=0.3, capacity_factor=None)
    x = torch.randn(10, 6, dtype=torch.float64)
    assert moe(x)[1].z_loss != moe(x)[1].z_loss
    moe.eval()
    assert moe(x)[1].z_loss == moe(x)[1].z_loss


def test_dropout_inside_experts() -> None:
    for options in ({"dropout": 0.5}, {"expert": lambda: Small(p=0.5)}):
        moe = make(**options)
        x = torch.randn(10, 6, dtype=torch.float64)
        assert not torch.equal(moe(x)[0], moe(x)[0])
        moe.eval()
        assert torch.equal(moe(x)[0], moe(x)[0])


def test_half_precision_routes_in_single_precision() -> None:
    moe = MoE(6, 8, 5).bfloat16()
    y, aux = moe(torch.randn(4, 6, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert aux.balance_loss.dtype == torch.float32


def test_autocast() -> None:
    moe = MoE(6, 8, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y, aux = moe(torch.randn(4, 6))
    assert y.dtype == torch.bfloat16
    (y.float().sum() + aux.z_loss).backward()
    assert moe.experts.w1.grad is not None
    assert moe.experts.w1.grad.dtype == torch.float32


def test_state_dict_and_copies() -> None:
    moe = make(shared_experts=1)
    moe(torch.randn(4, 6, dtype=torch.float64))
    other = make(shared_experts=1)
    other.load_state_dict(moe.state_dict())
    assert sorted(moe.state_dict())[:5] == ["experts.b1", "experts.b2", "experts.w1", "experts.w2", "gate.weight"]
    x = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(copy.deepcopy(moe)(x)[0], other(x)[0])


def test_pieces_by_hand() -> None:
    torch.manual_seed(0)
    gate, experts = TopKGate(6, 5, top_k=1), Experts(6, 8, 5, capacity_factor=None)
    x = torch.randn(4, 6)
    y, aux = experts(x, *gate(x))
    assert y.shape == x.shape
    weights, chosen, _ = gate(x)
    again, without_logits = experts(x, weights, chosen)
    assert torch.equal(again, y)
    assert without_logits.balance_loss == 0
    assert torch.equal(without_logits.counts, aux.counts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 6}, "top_k: expected 1 to 5"),
        ({"top_k": 0}, "top_k: expected 1 to 5"),
        ({"capacity_factor": 0.0}, "capacity_factor: expected a number above 0, or None"),
        ({"shared_experts": -1}, "shared_experts: expected 0 or more"),
        ({"activation": nn.PReLU()}, "activation: expected one without parameters"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        MoE(6, 8, 5, **options)


def test_other_refusals() -> None:
    with pytest.raises(UsageError, match="d_hidden: expected the hidden width"):
        MoE(6, None, 5)
    with pytest.raises(UsageError, match="num_experts: expected at least 1"):
        Experts(6, 8, 0)
    with pytest.raises(UsageError, match="at least 2 dims"):
        Experts(6, 8, 5)(torch.randn(6), torch.ones(1), torch.zeros(1, dtype=torch.long))
