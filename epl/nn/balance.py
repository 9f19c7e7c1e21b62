"""How evenly rows fall on experts: the losses for it, and the statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from epl import _torch


class Balance(NamedTuple):
    """What a call of experts tells beside its result, over the replica's micro batch; the same on all its ranks.

    With several micro batches the losses and counts that reach the loop are the averages over them, as of any other value of
    a stage without a batch dim. Exact sums of counts: `statistics()` of the module.
    """

    balance_loss: torch.Tensor
    """Switch Transformer's: experts · Σ (share of pairs) · (mean probability); 1 when balanced."""
    z_loss: torch.Tensor
    """ST-MoE's: the mean of logsumexp(logits)²."""
    counts: torch.Tensor
    """(row, choice) pairs by expert, those over capacity included; floating point, so that averages of it are possible."""
    dropped: torch.Tensor
    """How many pairs were over the capacity of their expert, and have added nothing."""


def sums_for_losses(logits: torch.Tensor) -> torch.Tensor:
    """Of logits [rows, experts]: probabilities summed over rows, and the squares of logsumexp summed; in float64. They add up."""
    size = logits.logsumexp(-1, keepdim=True)
    sums = torch.cat([(logits - size).exp().sum(0), size.square().sum(0)])
    return sums.double()


def losses(
    counts: torch.Tensor, sums: torch.Tensor, rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The balance loss and the z loss, from counts by expert and the `sums_for_losses` of so many rows."""
    means = sums / max(rows, 1)
    share = counts / counts.sum().clamp(min=1)
    balance = (share * means[:-1]).sum() * counts.numel()
    return balance.to(dtype), means[-1].to(dtype)


@dataclass(frozen=True)
class Statistics:
    """Where rows went since the last reset."""

    calls: int
    """Forwards that were counted."""
    counts: tuple[int, ...]
    """(row, choice) pairs by expert, those over capacity included."""
    dropped: tuple[int, ...]
    """Pairs over capacity by expert."""

    @property
    def imbalance(self) -> float:
        """The busiest expert's pairs over the average's: 1.0 is balanced."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 1.0

    @property
    def dropped_share(self) -> float:
        """Pairs over capacity, of all."""
        total = sum(self.counts)
        return sum(self.dropped) / total if total else 0.0

    @property
    def idle(self) -> tuple[int, ...]:
        """Experts that no row has chosen."""
        return tuple(expert for expert, count in enumerate(self.counts) if not count)


class Tally:
    """Adds up where rows go. A plain attribute of its module and no buffer: counts belong to a run, not to a model's state."""

    def __init__(self, num_experts: int) -> None:
        self._calls = 0
        self._counts = [0] * num_experts
        self._dropped = [0] * num_experts

    def add(self, counts: list[int], kept: list[int]) -> None:
        """One forward's pairs by expert. One that backward runs again (recompute) is not another."""
        if _torch.backward_id() != -1:
            return
        self._calls += 1
        for expert, (count, taken) in enumerate(zip(counts, kept, strict=True)):
            self._counts[expert] += count
            self._dropped[expert] += count - taken

    def report(self) -> Statistics:
        """The sums so far."""
        return Statistics(self._calls, tuple(self._counts), tuple(self._dropped))
