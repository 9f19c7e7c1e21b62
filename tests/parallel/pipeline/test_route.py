"""Which rows go from which lane to which: every row arrives once, and its gradient comes back once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from epl.parallel.pipeline.route import route
from epl.plan.batch import Flat, share_rows

WIDTHS = list(itertools.product(range(1, 6), range(1, 6)))


@pytest.mark.parametrize(("makers", "users"), WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 12])
def test_rows_arrive_in_order_and_their_gradients_come_back(makers, users, rows):
    made, used = share_rows(rows, 1, makers), share_rows(rows, 1, users)
    ways = route(rows, makers, users, (0,))
    for user, wanted in enumerate(used):
        got = []
        for maker in range(makers):
            for share in ways.get((maker, user), ()):
                whole = share.dim is None
                start = made[maker].start + share.start
                got += range(start, start + (len(made[maker]) if whole else share.length))
        assert got == list(range(wanted.start, wanted.stop))
    for maker, own in enumerate(made):
        back = []
        for user, wanted in enumerate(used):
            for share in ways.get((maker, user), ()):
                start = wanted.start + share.at
                stop = wanted.stop if share.dim is None else start + share.length
                back += range(start, stop) if share.counts else ()
        assert back == ([] if own.padding and makers != users else list(range(own.start, own.stop)))
        assert any((maker, user) in ways for user in range(users))  # also a lane without rows learns of gradients


@pytest.mark.parametrize(("makers", "users"), WIDTHS)
def test_what_all_lanes_have_is_taken_from_one(makers, users):
    for rows in (1, 3, 8):
        ways = route(rows, makers, users, ("same",))
        assert sorted(user for _, user in ways) == list(range(users))
        with_rows = route(rows, makers, users, (0, "same"))
        assert with_rows.keys() == route(rows, makers, users, (0,)).keys()  # it costs no further message


@pytest.mark.parametrize(("makers", "users"), WIDTHS)
def test_weights_of_an_average_add_up(makers, users):
    for rows in (1, 3, 8):
        ways = route(rows, makers, users, ("average",))
        assert len(ways) == makers * users
        for user in range(users):
            assert sum(ways[maker, user][0].weight for maker in range(makers)) == pytest.approx(1)


def test_of_the_drawing():
    ways = route(5, 2, 3, (0,))
    assert {pair: (s.start, s.length, s.at) for pair, (s,) in ways.items()} == {
        (0, 0): (0, 2, 0),
        (0, 1): (2, 1, 0),
        (1, 1): (0, 1, 1),
        (1, 2): (1, 1, 0),
    }


@pytest.mark.parametrize(("makers", "users"), WIDTHS)
def test_rows_of_several_elements_go_the_same_ways(makers, users):
    for rows in (1, 3, 8):
        ways, each = route(rows, makers, users, (0,)), route(rows, makers, users, (Flat(1, 3),))
        assert ways.keys() == each.keys()
        for pair, (one,) in ways.items():
            (other,) = each[pair]
            assert (other.start, other.length, other.at) == (3 * one.start, 3 * one.length, 3 * one.at)
            assert other == replace(
                one, dim=None if one.dim is None else 1, start=other.start, length=other.length, at=other.at
            )
