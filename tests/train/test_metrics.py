"""Numbers over all ranks, of values that are split."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import epl
from tests.harness import run_ranks

ROWS = 17


def _evaluated(on: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of all rows in order, their sum over all rows, and their mean."""
    if on:
        epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "communication.timeout": 20}))
    torch.manual_seed(0)
    with epl.replicate(2) if on else contextlib.nullcontext():
        body = nn.Linear(6, 8)
    with epl.split(2) if on else contextlib.nullcontext():
        head = nn.Linear(8, 11)
    model = nn.Sequential(body, head).double()
    loader = DataLoader(TensorDataset(torch.randn(ROWS, 6, dtype=torch.float64)), batch_size=4)
    if on:
        model, loader = epl.parallelize(model, loader)
    logits, total, weighted = [], torch.zeros(11, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for (x,) in loader:
            out = model(x)
            logits.append(epl.gather_for_metrics(out) if on else out)
            total += epl.global_sum(out.sum(0)) if on else out.sum(0)
            weighted += (epl.global_mean(out.mean()) if on else out.mean()) * len(logits[-1])
    return torch.cat(logits), total, weighted / ROWS


def test_of_split_logits_where_a_rank_has_no_row() -> None:
    # The last batch has one row: the rank that only repeats it left it out of the logits, and so gathered them, alone.
    expected = _evaluated(False)
    assert len(expected[0]) == ROWS
    for found in run_ranks(_evaluated, 2, True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
