"""Rows travel to the ranks of their experts, and home again: an all-to-all of uneven counts each way.

    at home       rows in order of experts                       e0 e0 e1 e2 e2 e2 | e3 e4 e4        | cuts between ranks
    on the way    one message per pair of ranks                   to rank 0          to rank 1
    at experts    rows of one expert together, by rank           e0(r0) e0(r1) | e1(r0) e1(r1) | ...

Both directions only move rows, so each is the other's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from epl.parallel.split.ranks import SplitRanks


class Traffic(NamedTuple):
    """Who sends how many rows to whom; every rank knows it all, since every rank knows the counts of all."""

    ranks: SplitRanks
    sent: list[int]
    """Rows from this rank to each."""
    received: list[list[int]]
    """Rows from each rank, for each expert of this one."""

    @staticmethod
    def of(kept: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], ranks: SplitRanks) -> Traffic:
        """From rows by rank and expert, and the experts of each rank."""
        first, last = spans[ranks.rank]
        own = kept[ranks.rank]
        return Traffic(ranks, [sum(own[a:b]) for a, b in spans], [list(row[first:last]) for row in kept])

    @property
    def sizes(self) -> list[int]:
        """Rows by expert of this rank."""
        return [sum(rows) for rows in zip(*self.received, strict=True)]

    def to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """What this rank's experts work on, where `rows` is what it has for all experts."""
        self._note(rows)
        blocks = self.ranks.all_to_all(
            rows.split_with_sizes(self.sent), [(sum(part), rows.shape[1]) for part in self.received]
        )
        if len(self.received[0]) < 2:
            return torch.cat(blocks)
        pieces = [block.split_with_sizes(part) for block, part in zip(blocks, self.received, strict=True)]
        return torch.cat([piece for of_expert in zip(*pieces, strict=True) for piece in of_expert])

    def to_homes(self, rows: torch.Tensor) -> torch.Tensor:
        """What came of this rank's own rows, where `rows` is what its experts have made."""
        self._note(rows)
        pieces = rows.split_with_sizes(
            [part[expert] for expert in range(len(self.received[0])) for part in self.received]
        )
        ways = self.ranks.ways
        parts = (
            [torch.cat(pieces[rank::ways]) if len(pieces) > ways else pieces[rank] for rank in range(ways)]
            if pieces
            else []
        )
        parts = parts or [rows] * ways
        return torch.cat(self.ranks.all_to_all(parts, [(count, rows.shape[1]) for count in self.sent]))

    def _note(self, rows: torch.Tensor) -> None:
        self.ranks.note("all-to-all", rows.numel() * rows.element_size(), "rows travel between homes and experts")


class ToExperts(torch.autograd.Function):
    """Rows go to their experts; gradients come home."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, traffic: Traffic) -> torch.Tensor:
        ctx.traffic = traffic
        return traffic.to_experts(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.traffic.to_homes(grads[0]), None


class ToHomes(torch.autograd.Function):
    """Results come home; their gradients go to the experts."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, traffic: Traffic) -> torch.Tensor:
        ctx.traffic = traffic
        return traffic.to_homes(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.traffic.to_experts(grads[0]), None
