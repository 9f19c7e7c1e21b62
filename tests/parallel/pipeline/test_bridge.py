"""Stages of unequal width give the gradients of one device."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from tests.parallel.pipeline.wide import Case, in_memory, on_one_device

EQUAL = [(2, 2), (3, 3)]
UNEQUAL = [(1, 2, 1), (2, 1), (2, 3), (3, 1, 2), (4, 4), (1, 2)]
SCHEDULES = {"PreferForward": 1, "PreferBackward": 1, "PreferBackwardOptimizer": 1, "Interleaved": 2, "ZeroBubble": 1}
SIZES = [
    (1, 8),
    (2, 12),
    (4, 9),
    (7, 10),
    (4, 3),
]  # micro batches, rows: also uneven, and micro batches smaller than a stage is wide

reference = functools.lru_cache(on_one_device)


def compare(case: Case) -> None:
    losses, gradients = reference(replace(case, schedule="", widths=(1,) * len(case.widths)))
    found_losses, found = in_memory(case)
    assert found_losses == pytest.approx(losses, abs=1e-12)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{case} {n}: {m}"
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("skip", [False, True], ids=["chain", "skip"])
@pytest.mark.parametrize("home", [False, True], ids=["loss by lane", "loss at home"])
def test_whole_product(schedule, skip, home):
    chunks = SCHEDULES[schedule]
    for widths, (micro_batches, rows) in itertools.product(EQUAL if chunks > 1 else UNEQUAL, SIZES):
        compare(Case(widths, schedule, micro_batches, rows, chunks, home, skip))
