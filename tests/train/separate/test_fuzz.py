"""Random loss programs: value, gradients and everything computed on the way are those of plain PyTorch."""

from __future__ import annotations

import collections
import os
import random
import warnings

import pytest
import torch
from torch import nn

from epl.train.lazy import LazyTensor
from epl.train.lazy.read import read
from tests.train.lazy.double import Double
from tests.train.separate.programs import N, random_operation

SEEDS = int(os.environ.get("EPL_TEST_FUZZ_SEEDS", "200"))
"""More of them: EPL_TEST_FUZZ_SEEDS=5000 pytest tests/train/separate/test_fuzz.py"""
BATCH = 40


@pytest.fixture(autouse=True)
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Program:
    """A random loss of a random model, run plainly while it is drawn."""

    def __init__(self, seed: int) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, N), nn.Tanh(), nn.Linear(N, N))
        self.x = torch.randn(N, N, 5, generator=generator)
        self.pool = [self.model(self.x), self.model(self.x * 0.5)]
        self.operations = []
        for _ in range(rng.randrange(2, 9)):
            self._draw(rng, generator)
        tail = [i for i, value in enumerate(self.pool) if value.requires_grad][-3:]
        self.tail = [(i, rng.choice(["sum", "mean"])) for i in tail]
        self.loss = self.total(self.pool)
        self.usable = bool(self.loss.requires_grad)
        if self.usable:
            try:
                self.loss.backward()
            except RuntimeError:
                self.usable = False  # plain PyTorch refuses this program
        self.gradients = [p.grad for p in self.model.parameters()]
        self.model.zero_grad()

    def _draw(self, rng, generator) -> None:
        for _ in range(20):
            operation = random_operation(rng, self.pool, generator)
            try:
                value = operation(self.pool)
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue
            good = isinstance(value, torch.Tensor) and 0 < value.numel() <= 600
            if good and bool(torch.isfinite(value).all()):
                self.pool.append(value)
                self.operations.append(operation)
                return

    def total(self, pool):
        return sum(getattr(pool[i], reduction)() * (0.5 + 0.1 * i) for i, reduction in self.tail)

    def run(self, micro_batches: int) -> tuple[str, dict[str, float]]:
        """Which way it went, and where it differs."""
        double = Double(self.model, micro_batches)
        pool = [double(self.x), double(self.x * 0.5)]
        for operation in self.operations:
            pool.append(operation(pool))
        loss = self.total(pool)
        loss.backward()
        pairs = [("loss", loss, self.loss)]
        for i, (p, g) in enumerate(zip(self.model.parameters(), self.gradients, strict=True)):
            none = torch.zeros_like(p)
            pairs.append((f"gradient {i}", none if p.grad is None else p.grad, none if g is None else g))
        pairs += [(f"value {i}", a, b) for i, (a, b) in enumerate(zip(pool, self.pool, strict=True))]
        self.model.zero_grad()
        return ("scheduled" if "scheduled" in double.carrier.events else "whole batch"), _differences(pairs)


def _differences(pairs) -> dict[str, float]:
    worst = {}
    for name, found, expected in pairs:
        if isinstance(found, LazyTensor):
            found = read([found.epl_node], "the test")[0]
        assert found.shape == expected.shape, name
        error = float((found - expected).abs().max() / (1 + expected.abs().max()))
        if not error <= 1e-10:
            worst[name] = error
    return worst


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_random_programs(first):
    ways: collections.Counter[str] = collections.Counter()
    for seed in range(first, min(first + BATCH, SEEDS)):
        with warnings.catch_warnings(action="ignore"):
            program = Program(seed)
            for micro_batches in (2, 3) if program.usable else ():
                way, worst = program.run(micro_batches)
                assert worst == {}, f"seed {seed}, {micro_batches} micro batches, {way}"
                ways[way] += 1
    assert ways["scheduled"] > 5
    assert ways["whole batch"] > 5
