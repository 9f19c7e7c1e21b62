from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple

import numpy as np
import pytest
import torch

from epl.data.structure import count_rows, cut_rows, digest, join_rows
from epl.errors import DataError

Pair = namedtuple("Pair", ["x", "y"])


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping that carries more than its items."""

    note = ""


def batch(rows: int, start: int = 0) -> Encoding:
    encoding = Encoding(
        x=torch.arange(start, start + rows)[:, None],
        pair=Pair(torch.arange(start, start + rows), [torch.arange(rows), None]),
        array=np.arange(start, start + rows),
        names=[str(i) for i in range(start, start + rows)],
        scale=torch.tensor(2.0),
        flag=True,
    )
    encoding.note = "kept"
    return encoding


def test_rows_are_counted_cut_and_joined_in_any_nesting() -> None:
    whole = batch(5)
    assert count_rows(whole) == 5
    first, second = cut_rows(whole, 0, 2), cut_rows(whole, 2, 5)
    assert isinstance(second, Encoding)
    assert second.note == "kept"
    assert second["x"].tolist() == [[2], [3], [4]]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].y[0].tolist() == [2, 3, 4]
    assert second["pair"].y[1] is None
    assert second["array"].tolist() == [2, 3, 4]
    assert second["names"] == ["2", "3", "4"]
    assert second["flag"] is True
    assert whole["x"].shape == (5, 1)
    assert digest(join_rows([first, second])) == digest(whole)


def test_one_batch_is_itself() -> None:
    whole = object()
    assert join_rows([whole]) is whole


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([torch.zeros(2, 1), torch.zeros(2, 2)], "shapes"),
        ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], "keys"),
        ([(torch.zeros(1),), (torch.zeros(1), torch.zeros(1))], "lengths"),
        ([(torch.zeros(1),), torch.zeros(1)], "kinds"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "values"),
        ([{"flag": True}, {"flag": False}], "values"),
    ],
)
def test_what_cannot_be_joined_is_refused(batches: list[object], text: str) -> None:
    with pytest.raises(DataError, match=text):
        join_rows(batches)


@pytest.mark.parametrize("item", [{"a": 1}, "text", torch.tensor(3.0), (torch.zeros(2), torch.zeros(3))])
def test_what_has_no_common_rows_is_refused(item: object) -> None:
    with pytest.raises(DataError, match="batch_size=None"):
        count_rows(item)


def test_digests_tell_values_types_and_shapes_apart() -> None:
    samples = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.float64),
        torch.ones(4),
        np.zeros(4),
        torch.tensor(0.0, dtype=torch.bfloat16),
        OrderedDict(a=1),
        {"b": 1},
        "0",
        0,
        None,
        object(),
    ]
    assert len({digest(s) for s in samples}) == len(samples)
    assert digest([torch.ones(2), {"a": "b"}]) == digest([torch.ones(2), {"a": "b"}])
