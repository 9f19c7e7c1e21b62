"""The order of things that feed each other."""

from __future__ import annotations

import pytest

from epl.plan.ordering import after_what_feeds_them


@pytest.mark.parametrize(
    ("names", "feeds", "expected"),
    [
        ("abc", {}, "abc"),
        ("abc", {"b": {"a"}, "c": {"a", "b"}}, "abc"),
        ("abc", {"a": {"c"}}, "bca"),
        ("dabc", {"d": {"c"}, "c": {"b"}, "b": {"a"}}, "abcd"),
        ("ab", {"a": {"b"}, "b": {"a"}}, "ab"),  # a circle
        ("xabs", {"x": {"b"}, "a": {"b", "s"}, "b": {"a"}}, "sabx"),  # s feeds it, x is fed by it
    ],
)
def test_each_comes_after_what_feeds_it(names: str, feeds: dict[str, set[str]], expected: str) -> None:
    assert "".join(after_what_feeds_them(names, feeds)) == expected
