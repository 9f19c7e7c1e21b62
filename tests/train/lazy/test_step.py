"""Scheduled or whole batch: the choice, what it costs, what is told, and what is remembered."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epl.errors import LazyValueError
from epl.report import log
from epl.train.lazy import LazyTensor, program
from epl.train.separate.rules import RULES
from epl.train.separate.state import SUM, Piece
from tests.train.lazy.double import Double

X, Y = torch.linspace(-1, 1, 16 * 6).view(16, 6).sin(), torch.arange(16) % 3


def double(micro_batches: int = 4, width: int = 3) -> Double:
    torch.manual_seed(0)
    return Double(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, width)), micro_batches)


def way(d: Double) -> list[str]:
    return [e for e in d.carrier.events if e in ("scheduled", "whole batch", "forward")]


WAYS = {
    "a mean": (lambda M: F.cross_entropy(M(X), Y), ["scheduled"]),
    "two calls": (lambda M: F.mse_loss(M(X), M(X * 2)), ["scheduled"]),
    "targets from the model itself": (
        lambda M: F.cross_entropy(M(X), M(X * 2).detach().softmax(-1)),
        ["forward", "scheduled"],
    ),
    "contrastive": (lambda M: (M(X) @ M(X).T).logsumexp(0).mean(), ["whole batch", "whole batch"]),
    "a root of a mean": (lambda M: M(X).pow(2).mean().sqrt(), ["whole batch"]),
    "different numbers of micro batches": (lambda M: M(X).mean() + M(X[:3]).mean(), ["whole batch", "whole batch"]),
    "a model fed by itself": (
        lambda M: M(torch.cat([M(X), M(X)], 1)).mean(),
        ["whole batch", "whole batch", "scheduled"],
    ),
    "a real index": (lambda M: M(X)[torch.tensor([5, 1, 15, 1])].mean(), ["scheduled"]),
    "a real mask": (lambda M: F.cross_entropy(M(X)[Y > 0], Y[Y > 0]), ["scheduled"]),
    "a lazy mask": (lambda M: (lambda o: o[o > 0].sum())(M(X)), ["whole batch"]),
}


@pytest.mark.parametrize("name", WAYS)
def test_which_way_a_loss_goes(name):
    loss_of, expected = WAYS[name]
    d = double()
    loss_of(d).backward()
    assert way(d) == expected


def test_a_whole_batch_is_told_once_with_its_reason_and_cost(caplog):
    log._said.clear()
    log.logger.propagate = True
    with caplog.at_level(logging.INFO, logger="epl"):
        d = double()
        for _ in range(3):
            d(X).pow(2).mean().sqrt().backward()
        records = {id(r): r for r in caplog.records if r.name == "epl"}  # each once, however many handlers have seen it
        (told,) = (r.getMessage() for r in records.values())
        assert "sqrt may mix rows of the batch" in told
        assert "test_step.py" in told
        assert "All 4 micro batches' forwards run before the first backward" in told
        caplog.clear()
        for _ in range(2):
            loss = F.cross_entropy(d(X), Y)
            loss.item()
            loss.backward()
        records = {id(r): r for r in caplog.records if r.name == "epl"}  # each once, however many handlers have seen it
        (told,) = (r.getMessage() for r in records.values())
        assert "the loop reads a value before backward: item" in told


@pytest.mark.parametrize(
    ("first", "alive"), [(lambda loss: None, 1), (lambda loss: loss.item(), 8)], ids=["scheduled", "whole"]
)
def test_activations_alive_at_once(first, alive):
    d, refs, peak = double(8), [], [0]

    def count(module, inputs, output):
        refs.append(weakref.ref(output))
        peak[0] = max(peak[0], sum(r() is not None for r in refs))

    d.model[1].register_forward_hook(count)
    loss = F.cross_entropy(d(X), Y)
    refs.clear()
    first(loss)
    loss.backward()
    assert peak[0] == alive
    assert sum(r() is not None for r in refs) == 0


def test_nothing_of_a_step_stays_without_the_garbage_collector():
    d = double()
    gc.collect()
    gc.disable()
    try:
        loss = F.cross_entropy(d(X), Y)
        call = weakref.ref(loss.epl_node.parents[0].args[0])
        loss.backward()
        assert call() is None
        assert loss.item() > 0
    finally:
        gc.enable()


def test_outputs_that_were_read_and_dropped_are_forgotten_at_the_next_call():
    """A validation loop without no_grad would otherwise keep the graphs of every batch."""
    d = double()
    refs = []
    d.model[1].register_forward_hook(lambda module, inputs, output: refs.append(weakref.ref(output)))
    value = F.cross_entropy(d(X), Y).item()
    refs = [r for r in refs if r() is not None]
    assert len(refs) == 4
    kept = d(X)
    assert "forget" in d.carrier.events
    assert sum(r() is not None for r in refs) == 0
    assert F.cross_entropy(kept, Y).item() == value


def test_a_structure_is_analysed_and_checked_once(monkeypatch):
    d = double()
    analysed = []
    monkeypatch.setattr(program, "analyse", lambda *a, real=program.analyse: analysed.append(1) or real(*a))
    monkeypatch.setattr(program, "_structures", {})
    for i in range(3):
        F.cross_entropy(d(X + i), (Y + i) % 3).backward()
    assert len(analysed) == 1
    for i in range(3):  # which rows a mask takes is looked at each time
        F.cross_entropy(d(X)[i < Y], Y[i < Y]).backward() if i < 2 else None
    assert len(analysed) == 3


def test_a_wrong_rule_cannot_pass_unseen(monkeypatch):
    monkeypatch.setattr(program, "_structures", {})
    monkeypatch.setitem(RULES, torch.mean, lambda a, entry, x: Piece(SUM, torch.mean, (x,), {}))
    with pytest.raises(AssertionError, match="a separability rule of epl is wrong"):
        torch.mean(double()(X)).backward()


def test_terms_that_cancel_are_not_taken_for_a_wrong_rule(monkeypatch):
    """In float32 the sums of two orders differ by far more than the total they leave."""
    monkeypatch.setattr(program, "_structures", {})
    signs = torch.tensor([1.0, -1.0]).repeat(8)[:, None] * 1e6
    d = double(3)
    loss = (d(X).detach() * 0 + d(X).mean() * 0 + 1.2345678 * signs + torch.linspace(0, 1, 16)[:, None]).sum()
    loss.backward()
    loss = ((d(X) * 0 + 1) * signs * torch.linspace(1.1, 1.1001, 16)[:, None]).sum()
    loss.backward()
    assert way(d)[-1] == "scheduled"


def test_errors_name_the_line_of_the_loop():
    bad = Y.clone()
    bad[0] = 99
    with pytest.raises(IndexError) as caught:
        F.cross_entropy(double()(X), bad).backward()
    assert any("cross_entropy, recorded at" in note and "test_step.py" in note for note in caught.value.__notes__)
    weight = torch.ones(16, 3)
    loss = (double()(X) * weight).sum()
    weight.zero_()
    with pytest.raises(LazyValueError, match=r"(?s)given to mul .*test_step\.py.*changed in\s+place"):
        loss.backward()


def test_what_is_known_without_numbers_needs_none():
    d = double()
    out = d(X)
    loss = F.cross_entropy(out, Y)
    assert isinstance(loss, LazyTensor)
    assert (out.shape, out.dtype, out.requires_grad, out.is_leaf, len(out)) == ((16, 3), torch.float32, True, False, 16)
    assert (loss.dim(), loss.numel(), loss.grad_fn is not None, loss.grad, loss.retains_grad) == (
        0,
        1,
        True,
        None,
        False,
    )
    assert torch.zeros_like(out).shape == (16, 3)
    assert out.new_ones(2).tolist() == [1.0, 1.0]
    assert torch.is_tensor(out)
    assert out.device == torch.device("cpu")
    assert not out.is_cuda
    assert d.carrier.events == []


def test_a_hook_on_a_value_may_be_taken_off():
    d, seen = double(), []
    out = d(X)
    handle = out.register_hook(seen.append)
    handle.remove()
    F.cross_entropy(out, Y).backward()
    assert seen == []
    assert way(d) == ["scheduled"]


def test_gradients_that_are_only_asked_for_leave_grad_alone():
    d = double()
    wanted = d.model[0].weight
    wanted.grad = torch.ones_like(wanted)
    (found,) = torch.autograd.grad(F.cross_entropy(d(X), Y), [wanted])
    assert torch.equal(wanted.grad, torch.ones_like(wanted))
    assert d.model[2].weight.grad is None
    d.model.zero_grad()
    F.cross_entropy(d.model(X), Y).backward()
    torch.testing.assert_close(found, wanted.grad)
    other = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(F.cross_entropy(d(X), Y), [other])
    assert torch.autograd.grad(F.cross_entropy(d(X), Y), [other], allow_unused=True) == (None,)
