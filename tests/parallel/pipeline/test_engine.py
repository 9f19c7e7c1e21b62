"""Every schedule on every staged model over the in-memory transport: the gradients of one device."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from tests.parallel.pipeline.engine import in_memory, on_one_device
from tests.parallel.pipeline.models import MODELS

SCHEDULES = {"PreferForward": 1, "PreferBackward": 1, "PreferBackwardOptimizer": 1, "Interleaved": 2, "ZeroBubble": 1}
reference = functools.lru_cache(on_one_device)


def check(model: str, schedule: str, devices: int, micro_batches: int, rows: int, replicas: int) -> None:
    expected = reference(model, micro_batches, rows, replicas)
    found = in_memory(model, schedule, devices, micro_batches, SCHEDULES[schedule], rows, replicas)
    assert found.losses == pytest.approx(expected.losses, abs=1e-12)
    for name, gradient in expected.gradients.items():
        assert found.gradients[name] is not None, name
        torch.testing.assert_close(
            found.gradients[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_product(model, schedule):
    sizes = ((1, 8), (2, 8), (4, 8), (7, 10), (4, 3))  # micro batches, rows: also uneven, and fewer rows than asked for
    for devices, (micro_batches, rows), replicas in itertools.product((2, 3, 4), sizes, (1, 2)):
        check(model, schedule, devices, micro_batches, rows, replicas)
