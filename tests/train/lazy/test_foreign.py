"""Another rank's parameter: what ordinary code does with it works, or raises and names it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from epl.errors import LazyValueError
from epl.train.lazy import ForeignParameter, become_foreign, become_own


@pytest.fixture
def layer() -> nn.Linear:
    """A layer whose weight lives on rank 3."""
    layer = nn.Linear(16, 32)
    become_foreign(layer.weight, 3, "encoder.weight")
    return layer


def test_it_stays_the_same_object_without_its_bytes():
    layer = nn.Linear(16, 32)
    weight = layer.weight
    become_foreign(weight, 3, "w")
    assert layer.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, ForeignParameter)
    assert [p is weight for p in layer.parameters()] == [True, False]
    numbers = torch.randn(32, 16)
    become_own(weight, numbers)
    assert type(weight) is nn.Parameter
    assert layer.weight is weight
    torch.testing.assert_close(layer(torch.eye(16)), (numbers + layer.bias[:, None]).T)


def test_shape_dtype_flags_and_gradient_can_be_asked_for(layer):
    weight = layer.weight
    assert weight.shape == (32, 16)
    assert weight.numel() == 512
    assert weight.dtype is torch.float32
    assert weight.device == torch.device("cpu")
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.grad is None
    weight.grad = None
    assert sum(p.numel() for p in layer.parameters()) == 512 + 32
    assert not weight.requires_grad_(False).requires_grad
    weight.requires_grad = True
    assert weight.requires_grad
    layer.requires_grad_(False)
    assert not weight.requires_grad
    assert {weight: 1}[weight] == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
    ],
    ids=["SGD", "AdamW", "foreach", "fused"],
)
def test_optimizers_and_clipping_skip_it(layer, make):
    optimizer = make(layer.parameters())
    layer.bias.sum().backward()
    before = layer.bias.detach().clone()
    assert torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0) > 0
    torch.nn.utils.clip_grad_value_(layer.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    layer.zero_grad()
    assert not torch.equal(layer.bias, before)
    assert layer.weight not in optimizer.state


READS = {
    "item": lambda layer: layer.weight.norm().item(),
    "print": lambda layer: repr(layer.weight),
    "f-string": lambda layer: f"{layer.weight.mean():.2f}",
    "torch.save": lambda layer: torch.save(layer.state_dict(), io.BytesIO()),
    "torch.save of the parameter": lambda layer: torch.save(layer.weight, io.BytesIO()),
    "pickle": lambda layer: pickle.dumps(layer.weight),
    "deepcopy": lambda layer: copy.deepcopy(layer),
    "numpy": lambda layer: layer.weight.detach().numpy(),
    "tolist": lambda layer: layer.weight.tolist(),
    "copy_": lambda layer: layer.weight.data.copy_(torch.zeros(32, 16)),
    "copy_ under no_grad": lambda layer: torch.no_grad()(lambda: layer.weight.copy_(torch.zeros(32, 16)))(),
    "init": lambda layer: nn.init.normal_(layer.weight),
    "init zeros": lambda layer: nn.init.zeros_(layer.weight),
    "setting data": lambda layer: setattr(layer.weight, "data", torch.zeros(32, 16)),
    "an average of weights": lambda layer: torch.zeros(32, 16).mul_(0.9).add_(layer.weight.detach(), alpha=0.1),
    "running the layer": lambda layer: layer(torch.ones(1, 16)).sum().item(),
    "data_ptr": lambda layer: layer.weight.data_ptr(),
    "allclose": lambda layer: torch.allclose(layer.weight, torch.zeros(32, 16)),
    "if": lambda layer: bool((layer.weight > 0).all()),
    "another model loads it": lambda layer: nn.Linear(16, 32).load_state_dict(layer.state_dict()),
    "lerp": lambda layer: torch.lerp(torch.zeros(32, 16), layer.weight, 0.5).sum().item(),
}


@pytest.mark.parametrize("name", READS)
def test_what_needs_its_numbers_raises_and_names_it(layer, name):
    with pytest.raises((LazyValueError, RuntimeError)) as caught:
        READS[name](layer)
    assert "encoder.weight" in str(caught.value)
    assert "epl.full_state_dict(model)" in str(caught.value)


def test_its_gradient_may_be_set_each_rank_takes_its_own(layer):
    # torch.autograd.grad gives all gradients on every rank: the loop then hands them out, and the owner's optimizer uses them.
    layer.weight.grad = torch.zeros(32, 16)
    assert layer.weight.grad is None
    with pytest.raises(LazyValueError, match=r"shape \(32, 16\), found \(3,\)"):
        layer.weight.grad = torch.zeros(3)


def test_a_whole_state_dict_may_be_loaded_each_rank_takes_its_part(layer):
    whole = {"weight": torch.randn(32, 16), "bias": torch.randn(32)}
    assert layer.load_state_dict(whole).missing_keys == []
    torch.testing.assert_close(layer.bias.detach(), whole["bias"])
    assert isinstance(layer.weight, ForeignParameter)
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({**whole, "weight": torch.randn(3, 3)})


def test_converting_the_module_converts_its_place(layer):
    layer.double()
    assert layer.weight.dtype is torch.float64
    assert isinstance(layer.weight, ForeignParameter)
    assert layer.to("cpu") is layer
    layer.bfloat16()
    assert layer.weight.dtype is layer.bias.dtype is torch.bfloat16


def test_expressions_over_it_are_written_down(layer):
    term = layer.weight.float().pow(2).sum() + layer.bias.sum()
    assert term.shape == ()
    assert term.requires_grad
    with pytest.raises(LazyValueError, match=r"encoder\.weight"):
        term.item()


def test_hooks_on_it_never_run_here(layer):
    layer.weight.register_hook(lambda g: g * 0)
    layer.weight.register_post_accumulate_grad_hook(lambda p: None)
    layer.bias.sum().backward()
    assert layer.weight.grad is None


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4)])
def test_any_shape(shape):
    parameter = nn.Parameter(torch.zeros(shape))
    become_foreign(parameter, 1, "p")
    assert parameter.shape == shape
    become_own(parameter, torch.ones(shape))
    assert torch.equal(parameter.detach(), torch.ones(shape))
