from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epl.data.division import item_rows, item_span, take_batches, take_samples
from tests.data.ranks import shares

SMALL = st.integers(1, 4)


@given(st.integers(1, 40), SMALL, SMALL)
def test_samples_are_all_taken_once_in_order(n: int, replicas: int, parts: int) -> None:
    taken = [take_samples(range(n), share) for share in shares(replicas, parts)]
    assert [s for own, divided in taken for s in own[: divided.own]] == list(range(n))
    assert all(own for own, _ in taken)
    assert all(len(own) == max(1, divided.own) for own, divided in taken)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=16), SMALL, SMALL, SMALL)
def test_batches_are_all_taken_once_in_order(sizes: list[int], replicas: int, parts: int, micro: int) -> None:
    sizes = sizes[: replicas * micro]
    rows = iter(range(sum(sizes)))
    batches = [[next(rows) for _ in range(size)] for size in sizes]
    taken = [take_batches(batches, share) for share in shares(replicas, parts, num_micro_batch=micro)]
    assert [s for own, divided in taken for s in own[: divided.own]] == list(range(sum(sizes)))
    assert len({divided.rows for _, divided in taken}) == 1
    assert all(own for own, _ in taken) == (sum(sizes) > 0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=16), SMALL, SMALL, SMALL)
def test_items_rows_are_all_taken_once_in_order(sizes: list[int], replicas: int, parts: int, micro: int) -> None:
    sizes = sizes[: replicas * micro]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    seen = []
    for share in shares(replicas, parts, num_micro_batch=micro):
        span = item_span(len(sizes), share.replica, share)
        rows = [starts[i] + r for i in range(span.start, span.stop) for r in range(sizes[i])]
        start, stop, counted = span.rows_of(len(rows), share.parts, share.part)
        own = rows[start:stop] if counted else []
        assert item_rows(sizes, share).own == len(own)
        seen += own
    assert seen == list(range(sum(sizes)))


@pytest.mark.parametrize(("items", "spans"), [(4, [(0, 2), (2, 4)]), (3, [(0, 2), (2, 3)]), (1, [(0, 1), (0, 1)])])
def test_spans_of_items(items: int, spans: list[tuple[int, int]]) -> None:
    divided = shares(2, num_micro_batch=2)
    found = [item_span(items, share.replica, share) for share in divided]
    assert [(span.start, span.stop) for span in found] == spans
