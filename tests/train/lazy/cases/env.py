"""What a case gets, and how one is run plainly and through lazy values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from epl.plan.split.layout import ParameterLayout, layout_of
from epl.train.lazy import ForeignParameter, LazyTensor
from epl.train.lazy.lane import LaneParameter
from epl.train.lazy.read import read

Case = Callable[["Env"], Any]
CASES: dict[str, Case] = {}


def case(fn: Case) -> Case:
    """Register a user's loop; it returns the numbers that the user would look at."""
    CASES[fn.__name__] = fn
    return fn


class Env:
    """`M` is called, `m` is the module behind it, `wrap` does the same for other models."""

    def __init__(self, rows: int, wrap: Callable[[nn.Module], Any], micro_batches: int = 1, seed: int = 3) -> None:
        torch.manual_seed(0)
        self.micro_batches = micro_batches
        self.m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self.wrap, self.M = wrap, wrap(self.m)
        self.opt = torch.optim.SGD(self.m.parameters(), 0.1)
        torch.manual_seed(seed)
        self.x, self.y = torch.randn(rows, 16), torch.randint(0, 8, (rows,))
        self.y[0] = 3
        self.extra: list[torch.Tensor] = []
        self.tolerance = 1e-12

    def made(self, module: nn.Module) -> nn.Module:
        """A module of the case's own, its gradients compared too."""
        self.extra += list(module.parameters())
        return module

    def parameters(self) -> list[torch.Tensor]:
        """Everything whose gradient is compared."""
        return [*self.m.parameters(), *self.extra]


class Outcome(NamedTuple):
    """What a loop showed its user, and what it left in its parameters: None for one that lives on another rank."""

    numbers: list[torch.Tensor]
    parameters: list[torch.Tensor | None]
    gradients: list[torch.Tensor | None]
    tolerance: float
    blocks: list[tuple[ParameterLayout, int] | None] | None = None
    """Of parameters that are cut over ranks: how, and which block is this rank's."""


def run(fn: Case, env: Env) -> Outcome:
    """Run a loop."""
    with warnings.catch_warnings(action="ignore"):
        found = numbers(fn(env))
    own = [None if isinstance(p, ForeignParameter) else p.detach() for p in env.parameters()]
    blocks = [None if (layout := layout_of(p)) is None else (layout, _rank_of(p)) for p in env.parameters()]
    return Outcome(found, own, [p.grad for p in env.parameters()], env.tolerance, blocks)


def _rank_of(parameter: torch.Tensor) -> int:
    """Among those that have its blocks."""
    return parameter.epl_ranks.rank if isinstance(parameter, LaneParameter) else torch.distributed.get_rank()


def numbers(result: Any) -> list[torch.Tensor]:
    """The result of a case as real tensors."""
    if isinstance(result, (tuple, list)):
        return [t for r in result for t in numbers(r)]
    if isinstance(result, LazyTensor):
        result = read([result.epl_node], "the test")[0]
    return [torch.as_tensor(result).detach().double()]


def differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Where the two differ by more than the case allows."""
    worst = {}
    if len(found.numbers) != len(expected.numbers):
        return {"number of results": float(len(found.numbers))}
    pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(found.numbers, expected.numbers, strict=True))]
    for i, (p, g, q, h) in enumerate(
        zip(found.parameters, found.gradients, expected.parameters, expected.gradients, strict=True)
    ):
        if p is None:
            continue
        assert q is not None
        if found.blocks is not None and (block := found.blocks[i]) is not None:
            layout, rank = block
            q, h = layout.take(q, rank), None if h is None else layout.take(h, rank)
        pairs.append((f"parameter {i}", p, q))
        if (g is None) != (h is None):
            worst[f"gradient {i}: {'missing' if g is None else 'unexpected'}"] = 1.0
        elif g is not None and h is not None:
            pairs.append((f"gradient {i}", g, h))
    for name, a, b in pairs:
        error = float((a - b).abs().max() / (1 + b.abs().max())) if b.numel() else 0.0
        if not error <= found.tolerance:
            worst[name] = error
    return worst
