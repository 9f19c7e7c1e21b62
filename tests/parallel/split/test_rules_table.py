"""Every rule on inputs that come whole, as partial sums, and cut along each dim, evenly or not: as on one device."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from epl.errors import SplitError
from epl.parallel.split.value import SplitTensor
from tests.parallel.split.compare import compare, even, layouts_of
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


# What was gathered there, to the same numbers: every rank computed all heads of such attentions.
STAY_CUT = ["rotary", "sdpa grouped 1", "sdpa grouped 2"]


@pytest.mark.parametrize("name", STAY_CUT)
def test_heads_that_are_cut_stay_cut(name):
    program = next(program for program in PROGRAMS if program.name == name)
    inputs = inputs_of(program)
    place = inputs[0].ndim - 3

    def run(*given):
        outputs = program.run(*given)
        for out in [outputs] if isinstance(outputs, torch.Tensor) else outputs:
            assert not isinstance(given[0], SplitTensor) or (isinstance(out, SplitTensor) and out.place == place)
        return outputs

    compare(run, inputs, [(place, even(inputs[0].shape[place], 2)), *[None] * (len(inputs) - 1)], 2)
