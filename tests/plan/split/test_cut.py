"""Cuts are arithmetic: every element lies on one rank, and the blocks of all ranks are the whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from epl.plan.split.cut import Axis, Cut


@st.composite
def cuts(draw) -> Cut:
    ways = draw(st.integers(1, 4))
    counts = draw(st.none() | st.lists(st.integers(0, 3), min_size=ways, max_size=ways))
    granules = draw(st.integers(1, 9)) if counts is None else sum(counts)
    return Cut(Axis("a", granules, ways, counts), draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))


@given(cuts(), st.integers(0, 1))
def test_blocks_put_together_are_the_whole(cut, dim):
    shape = [2, 2]
    shape[dim] = cut.size
    whole = torch.arange(2 * cut.size).view(shape)
    blocks = [cut.take(whole, dim, rank) for rank in range(cut.axis.ways)]
    assert [block.shape[dim] for block in blocks] == cut.lengths
    assert torch.equal(cut.join(blocks, dim), whole)


@given(cuts())
def test_ranges_cover_the_dim_once(cut):
    held = sorted(n for rank in range(cut.axis.ways) for start, stop in cut.ranges(rank) for n in range(start, stop))
    assert held == list(range(cut.size))


def test_sizes_that_do_not_divide_are_dealt_as_evenly_as_can_be():
    assert Axis("a", 7, 3).counts == (3, 2, 2)
    assert Axis("a", 7, 3).starts == (0, 3, 5)


def test_a_rank_holds_its_heads_of_every_section():
    cut = Cut(Axis("heads", 4, 2), (2, 2, 1))
    assert cut.ranges(1) == [(4, 8), (12, 16), (18, 20)]
    assert cut.length(1) == 10


def test_cuts_are_equal_by_axis_and_alike_by_elements():
    first, second = Cut(Axis("a", 6, 2)), Cut(Axis("b", 6, 2))
    assert first == Cut(first.axis)
    assert first != second
    assert first.alike(second)
    assert not first.alike(Cut(Axis("c", 6, 2, (1, 5))))
    assert not first.alike(Cut(Axis("d", 3, 2), (2,)))  # 4 | 2, not 3 | 3
    assert Cut(Axis("e", 2, 2), (3,)).alike(first)
