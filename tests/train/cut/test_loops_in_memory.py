"""Loops that people write, on models in 2 and 3 real stages: the numbers of plain PyTorch on every rank, or an error."""

from __future__ import annotations

import functools

import pytest
import torch

from epl.errors import EplError
from tests.train.cut.threads import TurnNetwork, cut_in_memory
from tests.train.lazy.cases import CASES, REFUSED, Env, Outcome, differences, run

pytestmark = pytest.mark.filterwarnings("ignore")  # threads share the filters that cases set

SHAPES = [
    (2, 10, 3, "PreferBackward"),
    (3, 7, 2, "ZeroBubble"),
    (3, 8, 4, "PreferForward"),
    (2, 8, 1, "PreferBackwardOptimizer"),
]
"""Stages, rows, micro batches and schedule: every loop in one of the first two, every fourth in one of the others too; all in all of them
in `make test-full`."""
REFUSED_IN_STAGES = {
    **REFUSED,
    "lbfgs": "it moves all parameters by products over all of them",
    "bad_target": "the loop goes on after an error at home, in a step that other ranks were in",
}
NOT_HERE = {"clip": "norms over ranks need process groups: tests/train/test_own_loop.py"}


@pytest.fixture(autouse=True)
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@functools.cache
def plainly(name: str, rows: int, micro_batches: int) -> Outcome:
    return run(CASES[name], Env(rows, lambda model: model, micro_batches))


def in_stages(name: str, stages: int, rows: int, micro_batches: int, strategy: str) -> list[Outcome]:
    network = TurnNetwork(stages)

    def loop(rank: int) -> Outcome:
        def wrap(model):
            return cut_in_memory(network, rank, model, micro_batches, strategy)

        return run(CASES[name], Env(rows, wrap, micro_batches))

    return network.run(loop)


def _cases():
    for number, name in enumerate(name for name in CASES if name not in NOT_HERE):
        chosen = {SHAPES[number % 2]} | ({SHAPES[2 + number // 4 % 2]} if number % 4 == 0 else set())
        for shape in SHAPES:
            marks = () if shape in chosen else pytest.mark.full
            yield pytest.param(name, shape, marks=marks, id=f"{name}-{'-'.join(map(str, shape))}")


@pytest.mark.parametrize(("name", "shape"), list(_cases()))
def test_a_loop_is_right_on_every_rank_or_refused(name, shape):
    if name in REFUSED_IN_STAGES:
        with pytest.raises(EplError):
            in_stages(name, *shape)
        return
    for rank, found in enumerate(in_stages(name, *shape)):
        assert differences(found, plainly(name, shape[1], shape[2])) == {}, f"rank {rank}"
