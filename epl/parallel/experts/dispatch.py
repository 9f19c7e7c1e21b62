"""Which (row, choice) pairs go to which expert, and which are over its capacity.

    pairs      choice 0 of all rows, then choice 1, ...                          [choices · rows], of this rank
    order      the pairs sorted by expert; within one, in the order above        first choices come before second ones
    counts     pairs by choice and expert, of every rank of the replica          known to all
    kept       pairs by rank and expert within capacity: always the first of their run in `order`

Capacity is over the rows of all ranks, in their order: the same pairs are dropped as on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from epl import _torch


class Sorted(NamedTuple):
    """This rank's pairs in order of experts."""

    order: torch.Tensor
    """Indices of pairs, the kept ones only."""
    row: torch.Tensor
    """The row of each."""

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of the pairs."""
        return rows.index_select(0, self.row)

    def weighted(self, made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows that are the sums of what experts have made of them, times the weights [rows, choices] of the choices."""
        scaled = made * weights.t().reshape(-1).index_select(0, self.order).unsqueeze(1)
        return scaled.new_zeros(weights.shape[0], made.shape[1]).index_add_(0, self.row, scaled).to(made.dtype)


def count(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Pairs by choice and expert, from the experts [rows, choices] of rows, in float64 (exact, and travels with other numbers)."""
    found = torch.zeros(experts.shape[1], num_experts, dtype=torch.float64, device=experts.device)
    chosen = experts.t()
    return found.scatter_add_(1, chosen, found.new_ones(()).expand(chosen.shape))


def sort_by_expert(experts: torch.Tensor) -> torch.Tensor:
    """The order of the pairs."""
    return experts.t().reshape(-1).argsort(stable=True)


def on_host(counts: torch.Tensor, pairs: Sequence[int]) -> list[list[int]]:
    """Counts [ranks, experts] as numbers, the sizes of all that follows. Fake tensors have none: there all of a rank's pairs go to
    expert 0, which is as good for shapes."""
    if _torch.is_fake(counts):
        return [[of_rank] + [0] * (counts.shape[1] - 1) for of_rank in pairs]
    found: list[list[int]] = counts.long().tolist()
    return found


def within(counts: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """Pairs by rank and expert that are within capacity, from counts [ranks, choices, experts]."""
    if capacity is None:
        return counts.sum(1)
    of_choice = counts.sum(0)
    before = (of_choice.cumsum(0) - of_choice) + (counts.cumsum(0) - counts)  # earlier choices; earlier ranks
    return (capacity - before).clamp_(min=0).minimum(counts).sum(1)


def select(order: torch.Tensor, sizes: Sequence[int], kept: Sequence[int], first: int, last: int, rows: int) -> Sorted:
    """The kept pairs of the experts [first, last), of all sorted pairs."""
    start = sum(sizes[:first])
    if sizes[first:last] == kept[first:last]:
        order = order[start : start + sum(sizes[first:last])]
    else:
        runs = []
        for size, length in zip(sizes[first:last], kept[first:last], strict=True):
            runs.append(order[start : start + length])
            start += size
        order = torch.cat(runs)
    return Sorted(order, order.remainder(rows) if rows else order)
