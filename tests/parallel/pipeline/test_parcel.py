"""A value in words, for errors."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch

from epl.parallel.pipeline.parcel import in_words


@dataclasses.dataclass
class Outputs:
    hidden: torch.Tensor
    cache: list[object] | None = None


class Named(collections.OrderedDict[str, object]):
    pass


Pair = collections.namedtuple("Pair", "x y")
H = torch.zeros(2, 7)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (H, "float32 (2, 7)"),
        (torch.nn.Parameter(H.half()), "float16 (2, 7)"),
        (torch.tensor(3), "int64 ()"),
        (None, "None"),
        (3.5, "3.5"),
        ("a" * 100, "'" + "a" * 39 + "…"),
        ((H, None), "(float32 (2, 7), None)"),
        ((H,), "(float32 (2, 7),)"),
        ([H.bool(), [1, "x"]], "[bool (2, 7), [1, 'x']]"),
        ({"h": H, 3: {"n": True}}, "{'h': float32 (2, 7), 3: {'n': True}}"),
        (Outputs(H, [H]), "Outputs(hidden=float32 (2, 7), cache=[float32 (2, 7)])"),
        (Named(h=H), "Named{'h': float32 (2, 7)}"),
        (Pair(H, 1), "Pair(float32 (2, 7), 1)"),
        ({1, 2}, "set"),
        ([[[[[H]]]]], "[[[[list]]]]"),
        (list(range(15)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … 3 more]"),
    ],
)
def test_in_words(value: object, words: str) -> None:
    assert in_words(value) == words
