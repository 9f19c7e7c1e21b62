"""A model on one device and split over threads: outputs, gradients and weights after three AdamW steps must be equal."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from epl.graph.record.fingerprint import fingerprint
from epl.parallel.split.choose import choose
from epl.parallel.split.choose.subject import copied_with
from epl.parallel.split.cutparameter import CutParameter
from epl.parallel.split.part import SplitPart
from epl.parallel.split.value import whole
from epl.plan.split.splitplan import SplitPlan
from tests.parallel.split.cases import Case
from tests.parallel.split.threads import ThreadRanks, run_threads

TOLERANCE = 1e-9


class Trained(NamedTuple):
    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    weights: dict[str, torch.Tensor]
    input_gradient: torch.Tensor | None
    calls: list[str]
    """The collectives of the first forward and backward."""


def close(found: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    assert (found is None) == (expected is None), f"{what}: {found} instead of {expected}"
    if found is not None and expected is not None:
        assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
        error = float(((found - expected).abs().max() / (1 + expected.abs().max())).detach()) if found.numel() else 0.0
        assert error < TOLERANCE, f"{what} is off by {error:.1e}"


def captured(case: Case) -> dict[nn.Module, tuple[Any, Any]]:
    """What each part is called with."""
    found: dict[nn.Module, tuple[Any, Any]] = {}

    def detached(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault(module, copied_with((args, kwargs), detached))

    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in case.parts]
    case.run(case.model, case.x.clone().requires_grad_(case.x.is_floating_point()))
    for handle in handles:
        handle.remove()
    return found


def plans_of(case: Case, ways: int) -> list[SplitPlan]:
    """A plan for each part; equal parts share one."""
    given, known = captured(case), dict[Any, SplitPlan]()
    plans = []
    for part in case.parts:
        kind = fingerprint(part)
        if kind not in known:
            known[kind] = choose(part, ways, *given[part])
        plans.append(known[kind])
    return plans


def loss_of(outputs: Sequence[torch.Tensor]) -> Any:
    total: Any = 0.0
    for n, out in enumerate(outputs):
        if not out.requires_grad:
            continue
        if out.ndim == 0:
            total = total + out
        elif n == 0 or len(outputs) > 2:
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7 + n), dtype=out.dtype)
            total = total + (out * weights).sum() * 0.1
    return total


def train(
    case: Case, ranks: ThreadRanks | None = None, parts: dict[str, SplitPart] | None = None, steps: int = 3
) -> Trained:
    """Some steps; of the first, outputs and gradients, whole."""
    model = case.model
    where = {
        f"{prefix}.{name}" if prefix else name: (part, name)
        for prefix, part in (parts or {}).items()
        for name in part.layouts
    }

    def gathered(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        part, inner = where.get(name, (None, name))
        return tensor.detach().clone() if part is None else part.gather(inner, tensor)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first: tuple[Any, ...] = ()
    for step in range(steps):
        optimizer.zero_grad()
        x = case.x.clone().requires_grad_(case.x.is_floating_point())
        start = len(ranks.calls) if ranks else 0
        outputs = case.run(model, x)
        loss_of(outputs).backward()
        if step == 0:
            calls = list(ranks.calls[start:]) if ranks else []
            gradients = {name: gathered(name, p.grad) for name, p in model.named_parameters()}
            first = [whole(out).detach().clone() for out in outputs], gradients, x.grad, calls
            assert all(type(p) in (nn.Parameter, CutParameter) for p in model.parameters())  # blocks, no split values
            assert all(p.grad is None or type(p.grad) is torch.Tensor for p in model.parameters())
        optimizer.step()
    weights = {name: gathered(name, p) for name, p in model.named_parameters()}
    return Trained(first[0], first[1], weights, first[2], first[3])  # type: ignore[arg-type]


def split_copy(
    case: Case, plans: Sequence[SplitPlan], ranks: ThreadRanks, **more: Any
) -> tuple[Case, dict[str, SplitPart]]:
    """A copy of the case whose parts are split, by their names in the model."""
    names = {module: name for name, module in case.model.named_modules()}
    model = copy.deepcopy(case.model)
    parts = {
        names[part]: SplitPart(model.get_submodule(names[part]), plan, ranks, **more)
        for part, plan in zip(case.parts, plans, strict=True)
    }
    return case._replace(model=model, parts=[part.module for part in parts.values()]), parts


def check(case: Case, ways: int, plans: Sequence[SplitPlan] | None = None, **more: Any) -> list[str]:
    """Compare the two; the collectives of one forward and backward."""
    found = plans_of(case, ways) if plans is None else plans
    expected = train(case._replace(model=copy.deepcopy(case.model)))

    def body(ranks: ThreadRanks) -> Trained:
        split, parts = split_copy(case, found, ranks, **more)
        trained = train(split, ranks, parts)
        for part in parts.values():
            part.undo(gather=False)
        return trained

    results = run_threads(body, ways)
    for rank, result in enumerate(results):
        for n, (out, reference) in enumerate(zip(result.outputs, expected.outputs, strict=True)):
            close(out, reference, f"rank {rank}, output {n}")
        close(result.input_gradient, expected.input_gradient, f"rank {rank}, gradient of the input")
        for name, gradient in expected.gradients.items():
            close(result.gradients[name], gradient, f"rank {rank}, gradient of {name}")
        for name, weight in expected.weights.items():
            close(result.weights[name], weight, f"rank {rank}, {name} after the steps")
    return results[0].calls
