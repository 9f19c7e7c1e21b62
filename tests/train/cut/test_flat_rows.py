"""Rows and positions as one dim: between stages, out of the model, in the loss; against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epl.errors import RecordingError
from tests.train.cut.threads import TurnNetwork, cut_in_memory

ROWS, LENGTH, WIDTH, WORDS = 7, 5, 8, 11
_generator = torch.Generator().manual_seed(0)
X = torch.randint(WORDS, (ROWS, LENGTH), generator=_generator)
Y = torch.randint(WORDS, (ROWS, LENGTH), generator=_generator)
Y[0, :3] = -100  # unequal numbers of ignored labels per micro batch


@pytest.fixture(autouse=True)
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.middle = nn.Embedding(WORDS, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, WORDS)


class StaysFlat(Model):
    def forward(self, x):
        h = self.words(x).view(-1, WIDTH)
        return self.head(self.middle(h + torch.relu(h)))


class AndBack(Model):
    def forward(self, x):
        h = self.middle(self.words(x).flatten(0, 1))
        return self.head(h.view(*x.shape, -1))


class LossInside(Model):
    def forward(self, x, labels):
        h = self.middle(self.words(x).reshape(-1, WIDTH))
        return F.cross_entropy(self.head(h), labels.view(-1))


class BothForms(Model):
    def forward(self, x):
        h = self.words(x).flatten(0, 1)
        z = self.middle(h)
        return self.head(z) + self.head(h), z.view(*x.shape, -1), z


class PositionsFirst(Model):
    """Between stages of one width nothing is cut or joined: the order does not matter there."""

    def forward(self, x):
        rows, length = x.shape
        h = self.middle(self.words(x).transpose(0, 1).flatten(0, 1))
        return self.head(h.view(length, rows, WIDTH).transpose(0, 1))


class PositionsFirstOut(Model):
    def forward(self, x):
        return self.head(self.middle(self.words(x).transpose(0, 1).flatten(0, 1)))


def by_row(model):
    losses = F.cross_entropy(model(X), Y.view(-1), reduction="none")
    return (losses.view(ROWS, LENGTH).sum(1) * torch.arange(ROWS)).mean()


def all_three(model):
    logits, states, flat = model(X)
    return F.cross_entropy(logits, Y.view(-1)) + states.pow(2).mean() + 1e-3 * (flat * flat.detach()).sum()


def read_first(model):
    logits = model(X)
    hits = (logits.argmax(-1) == Y.view(-1)).double().mean()
    return F.cross_entropy(logits, Y.view(-1)) * (2 if hits.item() > 2 else 1)


CASES = {
    "flat labels": (StaysFlat, lambda m: F.cross_entropy(m(X), Y.view(-1))),
    "unflattened": (StaysFlat, lambda m: F.cross_entropy(m(X).view(ROWS, LENGTH, WORDS).transpose(1, 2), Y)),
    "by row": (StaysFlat, by_row),
    "whole batch": (StaysFlat, lambda m: F.cross_entropy(m(X), Y.view(-1)).sqrt()),
    "read first": (StaysFlat, read_first),
    "and back": (AndBack, lambda m: F.cross_entropy(m(X).view(-1, WORDS), Y.view(-1))),
    "inside": (LossInside, lambda m: m(X, labels=Y)),
    "both forms": (BothForms, all_three),
    "positions first": (PositionsFirst, lambda m: F.cross_entropy(m(X).flatten(0, 1), Y.view(-1))),
}


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 3)])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_device(name, stages, micro_batches):
    make, loss_of = CASES[name]
    plain = make()
    expected = loss_of(plain)
    expected.backward()
    network = TurnNetwork(stages)

    def loop(rank):
        model = cut_in_memory(network, rank, make(), micro_batches)
        loss = loss_of(model)
        loss.backward()
        with torch.no_grad():
            evaluated = loss_of(model).item()
        return loss.item(), evaluated, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    gradients = {}
    for value, evaluated, own in network.run(loop):
        assert (value, evaluated) == pytest.approx((expected.item(),) * 2, abs=1e-9)
        gradients |= own
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9)


def test_rows_that_lie_side_by_side_are_not_joined():
    network = TurnNetwork(2)

    def loop(rank):
        cut_in_memory(network, rank, PositionsFirstOut(), 2)(X)

    with pytest.raises(RecordingError, match=r"5 elements for each of the 7 rows .*h\.flatten\(0, 1\)"):
        network.run(loop)
