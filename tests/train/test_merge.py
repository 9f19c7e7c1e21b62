"""Merging parts of collected objects: plain functions on made-up ranks."""

from __future__ import annotations

import pytest
import torch

from epl.graph.collections import Part
from epl.train.merge import PartForm, Rank, Told, counted, merge, merge_all, problems

F32 = torch.float32


def loop_object(shape=(), *, shares=None, rows=None, number=1):
    return Told((0, 1, number), rows, shares, False, (PartForm(0, 1, shape, F32),))


def model_object(stage, parts, rows):
    return Told((1, 0, stage, 0), rows, None, True, tuple(PartForm(start, n, (), F32) for start, n in parts))


def test_merge_of_micro_batches():
    parts = [Part(3, 1, torch.tensor([5.0, 6.0])), Part(0, 3, torch.tensor([1.0, 2.0]))]
    assert merge("MEAN", parts).tolist() == [2.0, 3.0]
    assert merge("SUM", parts).tolist() == [6.0, 8.0]
    assert merge("CONCAT", parts).tolist() == [1.0, 2.0, 5.0, 6.0]


def test_scalars_become_a_vector():
    assert merge("CONCAT", [Part(1, 1, torch.tensor(2)), Part(0, 1, torch.tensor(1))]).tolist() == [1, 2]


def test_dtypes():
    whole = [Part(0, 1, torch.tensor(1)), Part(1, 1, torch.tensor(2))]
    assert merge("MEAN", whole).item() == 1.5
    assert merge("SUM", whole).dtype == torch.int64
    truths = [Part(0, 1, torch.tensor([True, False])), Part(1, 1, torch.tensor([True, True]))]
    assert merge("SUM", truths).tolist() == [2, 1]
    assert merge("MEAN", [Part(0, 7, torch.tensor(0.1, dtype=torch.float64))]).item() == 0.1


def test_the_result_has_memory_of_its_own():
    value = torch.ones(3)
    for how in ("MEAN", "SUM", "CONCAT"):
        merge(how, [Part(0, 1, value)]).zero_()
    assert value.sum() == 3


def test_a_value_that_all_ranks_of_a_share_have_counts_once():
    ranks = [Rank(r, r, (loop_object(), model_object(stage, [(0, 2)], 2))) for r in (0, 1) for stage in (0, 1)]
    assert list(counted(ranks)) == [(0, 0, 0), (0, 1, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (3, 1, 0)]


def test_what_the_ranks_of_a_split_have_counts_once():
    # Each of them computes all rows of its micro batches, and each was counted: "12 of 6 rows".
    object_ = model_object(1, [(0, 3), (3, 3)], 6)
    ranks = [Rank(0, 0, ()), Rank(0, 0, (object_,)), Rank(0, 0, (object_,))]
    assert problems("MEAN", ranks, apart=False) == []
    assert list(counted(ranks)) == [(1, 0, 0), (1, 0, 1)]


def test_shares_are_weighted_by_their_rows():
    ranks = [Rank(r, r, (loop_object(shares=(3, 2, 0)),)) for r in range(3)]
    numbers = [10.0, 20.0, 1000.0]

    def value(rank, number, part):
        return torch.tensor(numbers[rank])

    assert merge_all("MEAN", ranks, value)[0].item() == pytest.approx(14.0)
    assert merge_all("SUM", ranks, value)[0].item() == 30.0  # the last one only repeats rows
    assert merge_all("CONCAT", ranks, value)[0].tolist() == [10.0, 20.0]
    assert merge_all("SUM", ranks[2:], value)[0].item() == 10.0  # alone it is what its loop sees


def test_without_a_loader_the_rows_of_the_model_call_count():
    ranks = [Rank(r, r, (loop_object(rows=rows),)) for r, rows in enumerate((1, 3))]
    found = merge_all("MEAN", ranks, lambda rank, number, part: torch.tensor(float(rank)))
    assert found[0].item() == 0.75


def test_lanes_and_micro_batches_come_together():
    # Two micro batches of 3 rows over two lanes: lane 0 has rows 0-1 and 3-4, lane 1 rows 2 and 5.
    ranks = [
        Rank(0, 0, (model_object(0, [(0, 2), (3, 2)], 6),)),
        Rank(0, 0, (model_object(0, [(2, 1), (5, 1)], 6),)),
    ]
    numbers = {(0, 0): 0.0, (0, 1): 3.0, (1, 0): 2.0, (1, 1): 5.0}

    def value(rank, number, part):
        return torch.tensor(numbers[rank, part])

    assert problems("MEAN", ranks, apart=False) == []
    assert merge_all("CONCAT", ranks, value)[0].tolist() == [0.0, 2.0, 3.0, 5.0]
    assert merge_all("MEAN", ranks, value)[0].item() == pytest.approx((0 * 2 + 3 * 2 + 2 + 5) / 6)


def test_objects_come_in_order_whoever_has_them():
    ranks = [Rank(0, 0, (model_object(0, [(0, 1)], 1),)), Rank(0, 0, (model_object(1, [(0, 1)], 1),))]
    found = merge_all("SUM", list(reversed(ranks)), lambda rank, number, part: torch.tensor(rank))
    assert [v.item() for v in found] == [1, 0]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([Rank(0, 0, (loop_object(),)), Rank(1, 1, ())], "rank 0 has added 1 objects in the loop, rank 1 0"),
        ([Rank(0, 0, (model_object(0, [(0, 1)], 1),)), Rank(1, 1, ())], "[1, 0] objects inside their models"),
        ([Rank(0, 0, (model_object(0, [(0, 2)], 4),))], "2 of 4 rows"),
        ([Rank(0, 0, (loop_object((2,)),)), Rank(1, 1, (loop_object((3,)),))], "(2,) torch.float32 and (3,)"),
        ([Rank(0, 0, (loop_object(shares=(4,)),)), Rank(1, 1, (loop_object(shares=(4,)),))], "into [1] shares"),
    ],
)
def test_what_cannot_be_merged_is_told(ranks, words):
    found = problems("MEAN", ranks, apart=False)
    assert len(found) == 1
    assert words in found[0]


def test_forms_may_differ_where_they_do_not_meet():
    ranks = [Rank(0, 0, (loop_object((2, 3)),)), Rank(1, 1, (loop_object((4, 3)),))]
    assert problems("CONCAT", ranks, apart=False) == []
    assert problems("SUM", ranks, apart=True) == []
    assert problems("SUM", ranks, apart=False) != []
    ranks = [Rank(0, 0, (loop_object((2, 3)),)), Rank(1, 1, (loop_object((2, 4)),))]
    assert "dim 0 only" in problems("CONCAT", ranks, apart=False)[0]
