"""Every rule on inputs that come whole, as partial sums, and cut along each dim, evenly or not: as on one device."""

from __future__ import annotations

import itertools
import random

import pytest

from epl.errors import SplitError
from tests.parallel.split.compare import compare, layouts_of
from tests.parallel.split.table import REFUSED, inputs_of, table

PROGRAMS = table()


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
@pytest.mark.parametrize("ways", [2, 3])
def test_a_program_on_split_values_is_the_program(program, ways):
    inputs, rng = inputs_of(program), random.Random(ways)
    combinations = list(itertools.product(*(layouts_of(value, ways, rng) for value in inputs)))
    rng.shuffle(combinations)
    tried = 0
    for layouts in combinations[:14]:
        if all(layout is None for layout in layouts):
            continue
        try:
            compare(program.run, inputs, layouts, ways)
            tried += 1
        except SplitError:
            assert program.name in REFUSED
    assert tried
