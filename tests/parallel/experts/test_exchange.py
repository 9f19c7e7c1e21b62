"""Rows to their experts and home again: what arrives where, and that each way is the other's gradient."""

from __future__ import annotations

import pytest
import torch

from epl.parallel.experts.dispatch import within
from epl.parallel.experts.exchange import ToExperts, ToHomes, Traffic
from tests.parallel.split.threads import ThreadRanks, run_threads

KEPT = [[2, 0, 1, 3, 1], [0, 0, 4, 0, 2], [1, 1, 1, 1, 1]]
"""Rows by rank and expert."""


@pytest.mark.parametrize(
    "spans", [((0, 2), (2, 4), (4, 5)), ((0, 0), (0, 5), (5, 5)), ((0, 1), (1, 1), (1, 5))], ids=str
)
def test_rows_arrive_by_expert_and_come_home_in_order(spans: tuple[tuple[int, int], ...]) -> None:
    def rank(ranks: ThreadRanks) -> None:
        own = [100 * ranks.rank + 10 * expert + n for expert, size in enumerate(KEPT[ranks.rank]) for n in range(size)]
        rows = torch.tensor(own, dtype=torch.float64).view(-1, 1).requires_grad_()
        traffic = Traffic.of(KEPT, spans, ranks)
        arrived = ToExperts.apply(rows, traffic)
        first, last = spans[ranks.rank]
        expected = [
            100 * home + 10 * expert + n
            for expert in range(first, last)
            for home, sizes in enumerate(KEPT)
            for n in range(sizes[expert])
        ]
        assert arrived.view(-1).tolist() == expected
        assert traffic.sizes == [sum(sizes[expert] for sizes in KEPT) for expert in range(first, last)]
        home = ToHomes.apply(arrived * 2, traffic)
        assert home.view(-1).tolist() == [2 * value for value in own]
        (home * rows.detach()).sum().backward()
        assert rows.grad.view(-1).tolist() == [2 * value for value in own]
        assert ranks.calls == ["all-to-all"] * 4

    run_threads(rank, 3)


def test_capacity_takes_first_choices_first_and_ranks_in_order() -> None:
    counts = torch.tensor([[[3.0, 1.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 3.0]]])  # ranks, choices, experts
    assert within(counts, 4).tolist() == [[3, 1], [1, 3]]  # expert 0: 3 of rank 0, 1 of rank 1, no second choice
    assert within(counts, 6).tolist() == [[4, 1], [2, 3]]
    assert within(counts, None).tolist() == [[4, 1], [2, 3]]
