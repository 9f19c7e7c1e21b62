"""Unmodified modules split over 2, 3 and 4 ranks compute what one device computes."""

from __future__ import annotations

import pytest

from tests.parallel.split.cases import CASES, FOUR, in_double, make_case
from tests.parallel.split.parity import check


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        pytest.param(name, ways, marks=pytest.mark.full if name.endswith("_whole") and ways == 3 else ())
        for name in CASES
        for ways in (2, 3)
    ],
)  # whole models on three: their layers are there without them
def test_equals_one_device(name: str, ways: int) -> None:
    case = make_case(name)
    with in_double(case.model):
        check(case, ways)


HEADED = {name for name in CASES if any(part in name for part in ("gpt2", "llama", "bert", "mixtral", "phi3", "qwen3"))}
HEADED |= {
    name for name in CASES if any(part in name for part in ("neox", "falcon", "t5", "vit", "encoder", "decoder", "mha"))
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in HEADED])
def test_equals_one_device_on_four(name: str) -> None:
    check(make_case(name), 4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "t5_whole" else ()) for name in FOUR]
)  # T5's layers are there without it
def test_models_equal_one_device_on_four(name: str) -> None:
    case = make_case(name, FOUR)
    with in_double(case.model):
        check(case, 4)
