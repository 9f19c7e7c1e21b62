"""What operations of the loop return at sizes they were not asked about: exactly what fake tensors say, mostly without asking them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epl.graph.context import Context
from epl.graph.spec import Spec, swap
from epl.train.lazy import infer as module
from epl.train.lazy.infer import NeedsDataError, infer

LENGTHS = [5, 30, 12, 7, 20, 25, 9, 16, 28, 6, 22, 11, 18, 27, 14, 8]


@pytest.fixture
def runs(monkeypatch):
    """The operations that were run on fake tensors."""
    found, run = [], module._run_alone
    monkeypatch.setattr(module, "_run_alone", lambda func, *rest: found.append(func) or run(func, *rest))
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "_kept", {})
    return found


def specs(*args, **kwargs):
    return swap((args, kwargs), torch.Tensor, Spec.of)


def logits(length: int) -> torch.Tensor:
    return torch.randn(4, length, 10, requires_grad=True) * 2


FORESEEN = {
    "loss": lambda n: (F.cross_entropy, *specs(logits(n).flatten(0, 1), torch.zeros(4 * n, dtype=torch.long))),
    "loss per token": lambda n: (
        F.cross_entropy,
        *specs(logits(n).flatten(0, 1), torch.zeros(4 * n, dtype=torch.long), reduction="none"),
    ),
    "shift": lambda n: (torch.Tensor.__getitem__, *specs(logits(n), (slice(None), slice(None, -1)))),
    "view": lambda n: (torch.Tensor.view, *specs(logits(n), -1, 10)),
    "maximum": lambda n: (torch.max, *specs(logits(n), -1)),
    "random": lambda n: (F.dropout, *specs(logits(n), 0.5)),
}


@pytest.mark.parametrize("name", FORESEEN)
def test_few_of_many_lengths_are_worked_out(runs, name):
    for length in LENGTHS:
        call = FORESEEN[name](length)
        assert infer(*call) == module._run(*call, Context.now())
    before = len(runs)
    assert before <= len(LENGTHS) + 5  # one each by this test
    infer(*FORESEEN[name](10))
    assert len(runs) == before


def test_laws_that_are_none(runs):
    for length in LENGTHS:
        call = (torch.Tensor.__getitem__, *specs(logits(length), (slice(None), slice(None, 12, 2))))
        assert infer(*call) == module._run(*call, Context.now())


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.cat([x, x]) if x.shape[1] == 10 else x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError


def test_functions_of_others_are_run_at_every_length(runs):
    shapes = [infer(Double.apply, *specs(logits(length))).spec.shape for length in (5, 20, 15, 10)]
    assert shapes == [(4, 5, 10), (4, 20, 10), (4, 15, 10), (8, 10, 10)]


def test_what_needs_data_needs_it_at_every_length(runs):
    for length in (5, 20, 15, 10):
        with pytest.raises(NeedsDataError):
            infer(torch.nonzero, *specs(logits(length)))
