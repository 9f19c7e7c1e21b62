"""When tensors are deferred, and what becomes of those that are no parameters."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import epl
from epl.graph import registry
from epl.graph.deferred import DeferredTensor, is_deferred
from epl.graph.tagging import module_tag
from tests.graph.deferred.compare import build_both, check_same


def test_only_large_tensors_of_parts_that_will_be_cut():
    def deferred(scope):
        with scope:
            return is_deferred(nn.Linear(37, 120).weight)

    assert deferred(epl.split(2))
    assert not deferred(epl.split(1))
    assert not deferred(epl.replicate(2))
    registry.devices = 1
    assert not deferred(epl.split(2))
    assert not is_deferred(nn.Linear(37, 120).weight)


def test_small_tensors_and_the_meta_device_are_as_ever():
    with epl.split(2):
        small = nn.Linear(8, 8)
        with torch.device("meta"):
            meta = nn.Linear(37, 120)
        other = nn.Linear(37, 120, device="meta")
    assert type(small.weight) is nn.Parameter
    assert meta.weight.is_meta
    assert type(other.weight) is nn.Parameter


def test_the_module_belongs_to_its_taskgraph():
    with epl.split(2, name="head"):
        head = nn.Linear(37, 120)
    assert module_tag(head).taskgraph.name == "head"


def test_a_scope_that_fails_is_closed():
    with pytest.raises(ZeroDivisionError), epl.split(2):
        1 / 0  # noqa: B018
    assert type(torch.empty(1 << 12)) is torch.Tensor


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(37, 120)
        self.register_buffer("mask", torch.tril(torch.ones(40, 40)))
        self.register_buffer("blank", torch.zeros(40, 40))
        self.register_buffer("noise", torch.randn(40, 40) * 2)
        self.register_buffer("view", self.blank[3:])
        self.table = torch.rand(40, 40)
        self.read = torch.ones(40, 40).numpy()[3, 3].item()


def test_buffers_and_other_tensors_have_memory_when_the_scope_is_left(caplog):
    caplog.set_level(logging.INFO, "epl")
    plain, module = build_both(WithBuffers)
    assert type(module.table) is torch.Tensor
    assert torch.equal(module.table, plain.table)
    assert module.read == 1
    module.blank.fill_(3)
    plain.blank.fill_(3)
    assert module.view.sum() == 37 * 40 * 3
    check_same(plain, module)
    assert caplog.records == []


def test_scopes_in_a_recording_defer_nothing():
    from epl import _torch

    with _torch.fake_mode(), epl.split(2):
        assert not isinstance(torch.empty(1 << 12), DeferredTensor)


def test_lazy_modules_are_as_ever():
    with epl.split(2):
        lazy = nn.LazyLinear(120)
    lazy(torch.ones(1, 37))
    assert type(lazy.weight) is nn.Parameter


def test_a_default_generator_of_ones_own_device_is_not_asked():
    """The shape of what a factory makes is asked for on the meta device, where nothing may be drawn."""
    torch.manual_seed(1)
    with epl.split(2):
        kept = [torch.rand(10), torch.randn(10)]
    torch.manual_seed(1)
    assert torch.equal(kept[0], torch.rand(10))
    assert torch.equal(kept[1], torch.randn(10))
