"""Row arithmetic: nothing lost, nothing twice, as even as can be, weights exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epl.errors import DataError
from epl.plan.batch import Rows, cut_evenly, divide, global_batch, share_rows

rows = st.integers(1, 300)
replicas = st.integers(1, 12)
parts = st.integers(1, 6)
quick = settings(max_examples=200, derandomize=True, database=None)


def test_the_picture_on_top_of_the_file() -> None:
    assert divide(10, 2) == [(0, 5), (5, 10)]
    assert divide(10, 2, 2) == [(0, 3), (3, 5), (5, 8), (8, 10)]


@quick
@given(rows, replicas, parts)
def test_every_row_once_in_order(n: int, r: int, k: int) -> None:
    pieces = divide(n, r, k)
    assert len(pieces) == r * k
    assert [row for start, stop in pieces for row in range(start, stop)] == list(range(n))


@quick
@given(rows, replicas, parts)
def test_even_over_replicas_and_over_parts(n: int, r: int, k: int) -> None:
    lengths = [stop - start for start, stop in divide(n, r, k)]
    blocks = [sum(lengths[i * k : (i + 1) * k]) for i in range(r)]
    assert max(blocks) - min(blocks) <= 1
    assert max(lengths) - min(lengths) <= 1


@quick
@given(rows, st.integers(1, 40))
def test_the_same_cuts_as_torch(n: int, pieces: int) -> None:
    expected = [list(piece) for piece in torch.arange(n).tensor_split(pieces)]
    assert [list(range(*piece)) for piece in cut_evenly(0, n, pieces)] == expected


@quick
@given(rows, replicas, parts)
def test_weights_add_up_and_nobody_is_idle(n: int, r: int, k: int) -> None:
    shares = share_rows(n, r, k)
    assert math.isclose(sum(s.weight for s in shares), 1.0, rel_tol=1e-12)
    for share, (start, stop) in zip(shares, divide(n, r, k), strict=True):
        assert len(share) >= 1
        assert 0 <= share.start < share.stop <= n
        assert share.padding == (start == stop)
        if not share.padding:
            assert (share.start, share.stop) == (start, stop)


def test_the_weighted_mean_is_the_mean_of_the_batch() -> None:
    values = torch.randn(7, dtype=torch.float64)
    shares = share_rows(7, 5, 2)
    assert sum(s.padding for s in shares) == 3
    mean = sum(s.weight * values[s.start : s.stop].mean() for s in shares)
    assert torch.isclose(torch.as_tensor(mean), values.mean(), rtol=1e-14)


def test_who_gets_a_padding_row() -> None:
    assert share_rows(2, 3) == [Rows(0, 1, 0.5), Rows(1, 2, 0.5), Rows(1, 2, 0.0)]
    assert share_rows(1, 1, 2) == [Rows(0, 1, 1.0), Rows(0, 1, 0.0)]


@pytest.mark.parametrize("n", [0, -1])
def test_no_rows_is_refused(n: int) -> None:
    with pytest.raises(DataError, match=str(n)):
        share_rows(n, 2)


def test_no_pieces_is_refused() -> None:
    with pytest.raises(DataError, match="0 pieces"):
        cut_evenly(0, 4, 0)


def test_the_batch_equation() -> None:
    names = "global batch = replicas × micro batch × num_micro_batch"
    assert global_batch(4, 8, 1) == f"{names} = 4 × 8 × 1 = 32"
    assert global_batch(2, None, 4) == f"{names} = 2 × b × 4 = 8·b"
