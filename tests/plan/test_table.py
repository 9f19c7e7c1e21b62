"""Text tables and shortened lists."""

from __future__ import annotations

import pytest

from epl.plan.table import compact_names, compact_numbers, table


def test_columns_are_aligned_and_lines_end_without_blanks() -> None:
    assert table([("name", "count"), ("a", "1,000"), ("long name", "2")], right=(1,)) == (
        "name       count\n---------  -----\na          1,000\nlong name      2"
    )
    assert table([("a", "b"), ("x", "")]) == "a  b\n-  -\nx"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 1, 4, 6, 7], "0-1,4,6-7"), ([2, 0], "2,0")]
)
def test_numbers(numbers: list[int], text: str) -> None:
    assert compact_numbers(numbers) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["", "a"], "(whole model), a"),
        (["emb", "layers.0", "layers.1", "layers.2", "layers.4", "head"], "emb, layers.0-2,4, head"),
        (["a.0.x", "a.1.x"], "a.0.x, a.1.x"),
        (["0", "1", "2"], "0-2"),
        (list("abcdef"), "a, b, c, d, e, f"),
        (list("abcdefg"), "a, b, c, d, e, … 2 more"),
    ],
)
def test_names(names: list[str], text: str) -> None:
    assert compact_names(names) == text
