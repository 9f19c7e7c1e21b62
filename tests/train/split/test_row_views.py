"""Logits of a language model in every shape a loss wants them, beside replicas: they stay cut, and everything is that of one device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import epl
from tests.harness import run_ranks
from tests.parity.compare import Run, assert_same

WORDS, ROWS, LENGTH = 13, 6, 5
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _hits(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    right = (logits[:, :-1].argmax(-1) == y[:, 1:]).double().mean() + (
        logits.flatten(0, 1).argmax(1) == y.flatten()
    ).double().mean()
    return F.cross_entropy(logits.view(-1, WORDS), y.view(-1)) + right.detach()


STAY_CUT: list[Loss] = [
    lambda logits, y: F.cross_entropy(logits.view(-1, WORDS), y.view(-1), ignore_index=-1),
    lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    lambda logits, y: F.cross_entropy(logits.reshape(-1, WORDS), y.reshape(-1), reduction="none").mean(),
    lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y),
    lambda logits, y: F.cross_entropy(logits.permute(0, 2, 1), y),
    lambda logits, y: F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), y[:, 1:].reshape(-1)),
    lambda logits, y: F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, WORDS), y[..., 1:].reshape(-1)),
    lambda logits, y: F.cross_entropy(logits[:, -1] / 2, y[:, -1]),
    _hits,
]


def _changed_in_a_view(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    flat = logits.view(-1, WORDS)
    logits[:, 1:].mul_(2.0)  # seen by the view that was taken before
    return F.cross_entropy(flat, y.view(-1)) + F.cross_entropy(logits[:, 0], y[:, 0])


def _used_whole_between(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    flat = logits.view(-1, WORDS)
    whole = (logits * torch.arange(float(WORDS)).double()).mean()
    return F.cross_entropy(flat, y.view(-1)) + 0.1 * whole + flat[0:2].mean() * 0


GATHER: list[Loss] = [_changed_in_a_view, _used_whole_between]


class LanguageModel(nn.Module):
    def __init__(self, ways: int) -> None:
        super().__init__()
        with epl.replicate(ways) if ways else contextlib.nullcontext():
            self.words = nn.Embedding(WORDS, 8)
            self.mix = nn.Linear(8, 8)
        with epl.split(ways) if ways else contextlib.nullcontext():
            self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.words(x))))


def _train(ways: int, losses: list[Loss]) -> tuple[Run, list[str]]:
    torch.manual_seed(0)
    told: list[str] = []
    model: Any = LanguageModel(ways).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    rank = 0
    if ways:
        epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "communication.timeout": 30}))
        logging.getLogger("epl").addFilter(lambda record: told.append(record.getMessage()) or True)
        model, optimizer = epl.parallelize(model, optimizer)
        rank = epl.Env.get().cluster.rank
    x = torch.randint(0, WORDS, (ROWS, LENGTH))
    y = (3 * x + 1) % WORDS
    found = []
    rows = slice(rank * ROWS // ways, (rank + 1) * ROWS // ways) if ways else slice(None)
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        found.append((epl.global_mean(loss) if ways else loss).item())
    gathered = [text for text in told if "gets its own rows whole" in text]
    return Run(found, epl.full_state_dict(model) if ways else model.state_dict()), gathered


def _of_kind(ways: int, which: str) -> tuple[Run, list[str]]:
    return _train(ways, {"stay cut": STAY_CUT, "gather": GATHER}[which])


def test_logits_of_words_stay_cut_in_every_shape() -> None:
    # A view, a shift by one position or another order of dims had every rank gather its rows over all words: every language model did.
    expected, _ = _train(0, STAY_CUT)
    for run, gathered in run_ranks(_of_kind, 3, 3, "stay cut"):
        assert_same(run, expected)
        assert gathered == []


def test_views_follow_what_is_done_to_the_value() -> None:
    expected, _ = _train(0, GATHER)
    for run, _ in run_ranks(_of_kind, 2, 2, "gather"):
        assert_same(run, expected)
