"""Random programs on randomly cut inputs: values and gradients of one device. `try_one` by the thousand is the test to run after a change."""

from __future__ import annotations

import pytest

from epl.errors import SplitError
from tests.parallel.split.fuzz import try_one


@pytest.mark.parametrize("start", range(0, 120, 20))
def test_random_programs(start):
    for seed in range(start, start + 20):
        try_one(seed)


@pytest.mark.full
@pytest.mark.deadline(600)
@pytest.mark.parametrize("start", range(1000, 21000, 2000))
def test_many_random_programs(start):
    refused = 0
    for seed in range(start, start + 2000):
        try:
            try_one(seed)
        except SplitError:
            refused += 1
    assert refused < 10  # changes in place through gathered views
