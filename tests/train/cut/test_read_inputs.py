"""Forwards that look at the numbers in their inputs between modules: each call goes the way that its whole batch says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epl.errors import RecordingError
from epl.train.lazy import ForeignParameter
from tests.train.cut.threads import TurnNetwork, cut_in_memory

ROWS, LENGTH, WIDTH, WORDS = 7, 5, 8, 11
_generator = torch.Generator().manual_seed(0)
X = torch.randint(WORDS, (ROWS, LENGTH), generator=_generator)
Y = torch.randint(WORDS, (ROWS, LENGTH), generator=_generator)
FULL = torch.ones(ROWS, LENGTH)
PADDED = FULL.clone()
PADDED[5, 1:] = 0  # in the second micro batch alone: the first one must be masked too
SHORT = PADDED.clone()
SHORT[:, 4:] = 0
HALF, NONE = Y.clone(), torch.full_like(Y, -100)
HALF[:4] = -100  # the first micro batch has no label that counts


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


class Checks(Model):
    def forward(self, x, labels, mask):
        if labels.max() >= WORDS:
            raise ValueError(f"label {labels.max().item()} is too large")
        h = self.words(x)
        h = self.middle(h) if mask.all() else self.middle(h * mask[..., None]) - 0.5
        logits = self.head(h)
        if not (labels != -100).any():
            return logits.sum() * 0
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


class Counts(Model):
    """Numbers, not only branches: how far to compute, and what to divide by."""

    def forward(self, x, labels, mask):
        n = int(mask.sum(1).max())
        logits = self.head(self.middle(self.words(x)[:, :n]))
        total = F.cross_entropy(logits.reshape(-1, WORDS), labels[:, :n].reshape(-1), reduction="sum")
        return total / max(1, (labels != -100).sum().item())


class LooksAtAStage(Model):
    def forward(self, x, labels, mask):
        h = self.words(x)
        return self.head(self.middle(h * 2 if h.sum() > 0 else h)).sum()


class LooksAtAChangedInput(Model):
    def forward(self, x, labels, mask):
        labels = labels.clone()
        labels[0] = -100
        h = self.middle(self.words(x))
        return self.head(h * 2 if labels.max() > 3 else h).sum()


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for labels, mask, rows in steps:
        optimizer.zero_grad()
        loss = model(X[:rows], labels=labels[:rows], mask=mask[:rows])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


STEPS = [(Y, FULL, 7), (Y, PADDED, 7), (NONE, FULL, 7), (HALF, PADDED, 7), (Y, SHORT, 7), (Y, FULL, 7), (Y, PADDED, 6)]


@pytest.mark.parametrize("make", [Checks, Counts])
def test_every_call_goes_the_way_of_its_whole_batch(make):
    plain = make()
    expected, weights = train(plain, STEPS), dict(plain.named_parameters())
    network = TurnNetwork(2)

    def loop(rank):
        model = cut_in_memory(network, rank, make(), 2)
        found = train(model, STEPS)
        return found, {n: p for n, p in model.named_parameters() if not isinstance(p, ForeignParameter)}

    for found, own in network.run(loop):
        assert found == pytest.approx(expected, abs=1e-9)
        for name, parameter in own.items():
            torch.testing.assert_close(parameter, weights[name], rtol=1e-9, atol=1e-9)


def test_an_error_of_the_forward_itself_is_raised_on_every_rank_and_training_goes_on():
    network = TurnNetwork(2)

    def loop(rank):
        model = cut_in_memory(network, rank, Checks(), 2)
        model(X, Y, FULL).backward()
        with pytest.raises(ValueError, match="label 30 is too large"):
            model(X, torch.full_like(Y, 30), FULL)
        return model(X, Y, FULL).item()

    assert network.run(loop) == pytest.approx([Checks()(X, Y, FULL).item()] * 2)


@pytest.mark.parametrize("make", [LooksAtAStage, LooksAtAChangedInput])
def test_what_follows_from_a_stage_or_was_changed_is_refused_with_its_line(make):
    network = TurnNetwork(2)
    with pytest.raises(RecordingError, match=r"test_read_inputs\.py:\d+\. Two ways out"):
        network.run(lambda rank: cut_in_memory(network, rank, make(), 2)(X, Y, FULL))
