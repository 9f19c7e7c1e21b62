"""Rows through experts that are on this rank, or spread over the ranks of a split.

    rows of a rank    experts of a rank    dispatch                                 combine
    all               all                  -                                        at once                    one device
    all               its own              each rank takes the pairs of its own     one all-reduce             `split` alone
    its own           its own              all-to-all                               all-to-all, then at home   beside `replicate`
    its own           all                  -                                        at once                    experts left whole

Where ranks have rows of their own they tell each other their counts first (one small all-gather, which also carries the sums for
the losses), so capacity and losses are those of the replica's whole micro batch and every rank knows all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch

from epl.parallel.experts import dispatch
from epl.parallel.experts.exchange import ToExperts, ToHomes, Traffic
from epl.parallel.experts.rows import Rows
from epl.parallel.split.functions import Gather
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.value import enter
from epl.plan.split.cut import Cut

Compute = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""This rank's experts on rows, given how many each of them has."""


class Held(NamedTuple):
    """The experts of this rank."""

    compute: Compute
    ranks: SplitRanks | None = None
    """Over which they are spread; None: all are here."""
    spans: tuple[tuple[int, int], ...] = ()
    """Of each rank: its experts [first, last)."""


class Told(NamedTuple):
    """What is known of the micro batch of the whole replica."""

    rows: int
    counts: torch.Tensor
    """Pairs by expert."""
    sums: torch.Tensor | None
    """What was given as sums over rows, now over all rows."""
    sizes: list[list[int]]
    """Pairs by rank and expert, as numbers; of one rank where all have the same rows."""
    kept: list[list[int]]
    """Of these, within capacity."""
    capacity: int | None

    @property
    def total(self) -> list[int]:
        """Pairs by expert, as numbers."""
        return [sum(column) for column in zip(*self.sizes, strict=True)]

    @property
    def taken(self) -> list[int]:
        """Of these, within capacity."""
        return [sum(column) for column in zip(*self.kept, strict=True)]


def tell(
    experts: torch.Tensor,
    sums: torch.Tensor | None,
    *,
    num_experts: int,
    capacity_factor: float | None,
    rows: Rows | None,
    tokens: Sequence[int],
) -> Told:
    """Count this rank's pairs, and hear of the others' where they have rows of their own: `tokens` is how many each rank has."""
    counts = dispatch.count(experts, num_experts)
    choices, total = experts.shape[1], sum(tokens)
    capacity = None
    if capacity_factor is not None:
        capacity = max(1, ceil(capacity_factor * choices * total / num_experts))
    pairs = [choices * here for here in tokens]
    if rows is None:
        counts = counts.sum(0)
        sizes = dispatch.on_host(counts.unsqueeze(0), pairs)
        kept = sizes if capacity is None else [[min(size, capacity) for size in sizes[0]]]
        return Told(total, counts, sums, sizes, kept, capacity)

    ranks = rows.ranks
    told = counts.view(-1) if sums is None else torch.cat([counts.view(-1), sums])
    ranks.note("all-gather", told.numel() * told.element_size() * ranks.ways, "counts of rows by expert")
    each: torch.Tensor = Gather.apply(told.unsqueeze(0), ranks, 0, Cut.even("ranks", ranks.ways, ranks.ways))  # type: ignore[no-untyped-call]
    of_ranks = each.detach()[:, : counts.numel()].view(ranks.ways, choices, num_experts)
    on_host = of_ranks.cpu()
    sizes = kept = dispatch.on_host(on_host.sum(1), pairs)
    if capacity is not None:
        kept = dispatch.on_host(dispatch.within(on_host, capacity), pairs)
    return Told(
        total, of_ranks.sum((0, 1)), None if sums is None else each[:, counts.numel() :].sum(0), sizes, kept, capacity
    )


def run(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, told: Told, held: Held, rows: Rows | None
) -> torch.Tensor:
    """What experts make of this rank's tokens x [tokens, width], by weights and experts [tokens, choices].

    This rank's addend of it where all ranks have the same rows and experts of their own.
    """
    order = dispatch.sort_by_expert(experts)
    here = 0 if rows is None else rows.ranks.rank
    sizes, kept, ranks = told.sizes[here], told.kept[here], held.ranks
    if ranks is None:
        pairs = dispatch.select(order, sizes, kept, 0, len(sizes), x.shape[0])
        return pairs.weighted(held.compute(pairs.gathered(x), kept), weights)

    if rows is None:
        first, last = held.spans[ranks.rank]
        pairs = dispatch.select(order, sizes, kept, first, last, x.shape[0])
        x, weights = enter(x, ranks), enter(weights, ranks)
        return pairs.weighted(held.compute(pairs.gathered(x), kept[first:last]), weights)

    traffic = Traffic.of(told.kept, held.spans, ranks)
    pairs = dispatch.select(order, sizes, kept, 0, len(sizes), x.shape[0])
    arrived: Any = ToExperts.apply(pairs.gathered(x), traffic)  # type: ignore[no-untyped-call]
    made = held.compute(arrived, traffic.sizes)
    home: Any = ToHomes.apply(made, traffic)  # type: ignore[no-untyped-call]
    return pairs.weighted(home, weights)
