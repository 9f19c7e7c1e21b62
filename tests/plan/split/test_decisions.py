"""Decisions about cuts: wishes granted or not, and what cannot be dealt out."""

from __future__ import annotations

import pytest

from epl.errors import SplitError
from epl.plan.split.decisions import Choice, Decisions, HeadsError


def decided(ways: int = 2, **shapes: tuple[int, ...]) -> Decisions:
    found = Decisions(ways, shapes)
    for name in shapes:
        found.cut_alone(name, 0, "columns")
    return found


def test_coarsening_makes_heads_of_features() -> None:
    found = decided(q=(24, 8)).granted(("coarsen", "q", 4))
    assert found is not None
    assert (found.choices["q"], found.axes, found.heads) == (Choice(0, "q", (4,)), {"q": 6}, {"q"})


def test_sections_lie_one_after_another() -> None:
    found = decided(qkv=(24, 8)).granted(("section", "qkv", (1, 1, 1)))
    assert found is not None
    assert (found.choices["qkv"], found.axes["qkv"]) == (Choice(0, "qkv", (1, 1, 1)), 8)
    heads = found.granted(("coarsen", "qkv", 2))
    assert heads is not None
    assert heads.choices["qkv"] == Choice(0, "qkv", (2, 2, 2))


def test_sections_are_not_divided_again() -> None:
    once = decided(qkv=(24, 8)).granted(("section", "qkv", (1, 1, 1)))
    assert once is not None
    assert once.granted(("section", "qkv", (1, 1))) is None


def test_one_more_border() -> None:
    once = decided(qkv=(24, 8)).granted(("section", "qkv", (1, 1)))
    assert once is not None
    found = once.granted(("resize", "qkv", ((1, 1), (12, 6, 6))))
    assert found is not None
    assert (found.choices["qkv"], found.axes["qkv"]) == (Choice(0, "qkv", (2, 1, 1)), 6)


def test_united_axes_have_common_granules() -> None:
    found = decided(q=(12, 8), k=(6, 8)).granted(("unify", "q", "k"))
    assert found is not None
    assert found.axes == {"q": 6}
    assert found.choices == {"q": Choice(0, "q", (2,)), "k": Choice(0, "q", (1,))}


def test_heads_stay_heads_when_united() -> None:
    heads = decided(q=(12, 8), k=(6, 8)).granted(("coarsen", "k", 2))
    assert heads is not None
    found = heads.granted(("unify", "q", "k"))
    assert found is not None
    assert found.heads == {"q"}


@pytest.mark.parametrize(
    "wish", [("coarsen", "q", 5), ("coarsen", "no", 2), ("section", "q", (1,) * 7), ("unify", "q", "no")]
)
def test_what_does_not_fit_is_not_granted(wish: tuple[str, str, object]) -> None:
    assert decided(q=(24, 8)).granted(wish) is None


def test_granting_leaves_the_decisions_before_alone() -> None:
    before = decided(q=(24, 8))
    before.granted(("coarsen", "q", 4))
    assert (before.choices, before.axes, before.heads) == ({"q": Choice(0, "q")}, {"q": 24}, set())


def test_heads_that_do_not_divide_name_the_nearest_counts() -> None:
    found = decided(4, q=(24, 8)).granted(("coarsen", "q", 4))
    assert found is not None
    with pytest.raises(HeadsError, match=r"6 heads .* to 4 ranks; .*: 3 or 6$"):
        found.check_all()


@pytest.mark.parametrize(
    ("heads", "ways", "nearest"), [(2, 3, "1 or 2"), (6, 8, "3 or 6"), (1, 3, "1"), (6, 4, "3 or 6"), (7, 2, "1 or 7")]
)
def test_two_counts_are_named_where_there_are_two(heads: int, ways: int, nearest: str) -> None:
    assert str(HeadsError("q", heads, ways)).endswith(f"can be: {nearest}")


def test_fewer_features_than_ranks() -> None:
    found = Decisions(4, {"w": (3, 2)})
    with pytest.raises(SplitError, match=r"3 features .* over 4 ranks: .* epl.split\(3\)"):
        found.cut_alone("w", 0, "columns")
    assert found.axes == {}
    assert found.choices == {}


def test_unequal_sections_are_refused() -> None:
    with pytest.raises(SplitError, match="dim 0 of size 10 is not made of 3 equal sections"):
        Decisions(2, {"w": (10, 2)}).cut_alone("w", 0, "given", sections=3)
