"""Loops that people write, on real ranks in two stages: values on every rank and gradients on the owner are plain PyTorch's."""

from __future__ import annotations

import pytest
import torch

import epl
from tests.harness import run_ranks
from tests.train.lazy.cases import CASES, REFUSED, Outcome, differences, run
from tests.train.own_loop import SNIPPETS, Script

ROWS, MICRO_BATCHES, STAGES = 7, 3, 2
NOT_HERE = {
    **REFUSED,
    "lbfgs": "refused: test_own_loop_faults.py",
    "bad_target": "an error at home: test_own_loop_faults.py",
    "compiled_loss": "slow, and run over stages in memory",
}
LOOPS = {**{name: fn for name, fn in CASES.items() if name not in NOT_HERE}, **SNIPPETS}
GROUPS = 6
"""Calls of `run_ranks`, each with a share of the loops."""


def _settings() -> epl.Config:
    return epl.Config({"pipeline.num_micro_batch": MICRO_BATCHES, "communication.timeout": 40})


def _loops(names: list[str]) -> dict[str, Outcome]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        epl.init(_settings())
        try:
            found[name] = run(LOOPS[name], Script(ROWS, MICRO_BATCHES, STAGES))
        except Exception as error:
            error.add_note(f"in the loop {name}")
            raise
    return found


def _plainly(name: str) -> Outcome:
    torch.set_default_dtype(torch.float64)
    try:
        return run(LOOPS[name], Script(ROWS, MICRO_BATCHES))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_loop_is_right_on_every_rank(group: int) -> None:
    names = list(LOOPS)[group::GROUPS]
    outcomes = run_ranks(_loops, 2, names, timeout=110)
    wrong = {}
    for name in names:
        expected = _plainly(name)
        for rank, found in enumerate(outcomes):
            if problems := differences(found[name], expected):
                wrong[f"{name}, rank {rank}"] = problems
    assert wrong == {}
