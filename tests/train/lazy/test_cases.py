"""Every loop gives the numbers and gradients of plain PyTorch, or is refused; and all ranks decide alike."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.train.lazy.cases import CASES, REFUSED, Env, Outcome, differences, run
from tests.train.lazy.double import Double, Replica

SHAPES = [(10, 1), (10, 3), (8, 4)]
"""Rows and micro batches, even and uneven."""

REFUSED_ON_RANKS = {
    "lbfgs": "it moves all parameters by products over all of them, and writes into those of other ranks"
}
NOT_OF_RANKS = {
    "clip": "norms over all ranks are made by epl.parallel.clip",
    "bad_target": "home raises, and it is the real carrier that tells the others",
}


@pytest.fixture(autouse=True)
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@functools.cache
def plainly(name: str, rows: int, micro_batches: int, seed: int = 3) -> Outcome:
    return run(CASES[name], Env(rows, lambda model: model, micro_batches, seed))


def lazily(name: str, rows: int, micro_batches: int, seed: int = 3) -> tuple[Outcome, list[str]]:
    doubles: list[Double] = []

    def wrap(model):
        doubles.append(Double(model, micro_batches))
        return doubles[-1]

    return run(CASES[name], Env(rows, wrap, micro_batches, seed)), [e for d in doubles for e in d.carrier.events]


@pytest.mark.parametrize("name", CASES)
def test_a_loop_is_right_or_refused(name):
    for rows, micro_batches in SHAPES:
        expected = plainly(name, rows, micro_batches)
        if name in REFUSED:
            with pytest.raises(RuntimeError):
                lazily(name, rows, micro_batches)
            continue
        found, _ = lazily(name, rows, micro_batches)
        assert differences(found, expected) == {}, f"{rows} rows in {micro_batches} micro batches"


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_decisions_depend_on_code_alone(name):
    """What ranks exchange, and when, is the same for other data: no rank could decide otherwise."""
    (_, events), (other, other_events) = (lazily(name, 10, 3, seed) for seed in (3, 4))
    assert events == other_events
    assert differences(other, plainly(name, 10, 3, 4)) == {}


def on_ranks(name: str, ranks: int, rows: int, micro_batches: int) -> list[tuple[Outcome, list[str]]]:
    replica = Replica(ranks)

    def loop(rank: int) -> tuple[Outcome, list[str]]:
        doubles: list[Double] = []

        def wrap(model):
            doubles.append(Double(model, micro_batches, replica, rank))
            return doubles[-1]

        return run(CASES[name], Env(rows, wrap, micro_batches)), [e for d in doubles for e in d.carrier.events]

    return replica.run(loop)


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_OF_RANKS])
def test_a_loop_is_right_on_every_rank_of_a_replica(name):
    expected = plainly(name, 10, 3)
    if name in REFUSED or name in REFUSED_ON_RANKS:
        with pytest.raises(RuntimeError):
            on_ranks(name, 2, 10, 3)
        return
    found = on_ranks(name, 2, 10, 3)
    for rank, (outcome, _) in enumerate(found):
        assert differences(outcome, expected) == {}, f"rank {rank}"
    assert found[0][1] == found[1][1]
