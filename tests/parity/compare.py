"""Two runs of the same script: the same losses, the same weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """What a training script leaves behind."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def assert_same(found: Run, expected: Run, tolerance: float = 1e-9) -> None:
    """Losses and weights within tolerance · (1 + largest), per tensor; names as well."""
    assert len(found.losses) == len(expected.losses), f"{len(found.losses)} steps instead of {len(expected.losses)}"
    problems = []
    for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not abs(a - b) <= tolerance * (1 + abs(b)):
            problems.append(f"loss of step {step}: {a!r} instead of {b!r}")
    assert found.state.keys() == expected.state.keys()
    for name, b in expected.state.items():
        a = found.state[name]
        if torch.equal(a, b):  # also where both are infinite (a mask)
            continue
        difference = (a.double() - b.double()).abs().max().item() if b.numel() else 0.0
        if not difference <= tolerance * (1 + b.double().abs().max().item()):
            problems.append(f"{name}: differs by {difference:.3g}")
    assert not problems, "\n".join(problems)
