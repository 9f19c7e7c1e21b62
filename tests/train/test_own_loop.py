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


def plainly(name: str) -> Outcome:
    """What a loop shows on one device."""
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
        expected = plainly(name)
        for rank, found in enumerate(outcomes):
            if problems := differences(found[name], expected):
                wrong[f"{name}, rank {rank}"] = problems
    assert wrong == {}


# ---- two replicas of two stages --------------------------------------------------------------------------------------

REPLICA_ROWS = (7, 5)
REPLICATED = [
    "metric_after",
    "metric_before",
    "item_first",
    "l2_term",
    "autograd_grad",
    "backward_twice",
    "two_calls",
    "contrastive",
    "ignore_index",
    "boolean_mask",
    "perplexity_as_loss",
    "grad_wrt_logits",
    "encoder_before",
    "uncertainty_weights",
    "vmap",
    "tensor_hook",
    "accumulated_without_a_step",
]
"""Loops whose gradients are linear in the loss: those of the replicas are averaged by their rows."""


def _on_replicas(names: list[str]) -> dict[str, Outcome]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        epl.init(_settings())
        replica = epl.Env.get().cluster.rank // 2
        found[name] = run(LOOPS[name], Script(REPLICA_ROWS[replica], MICRO_BATCHES, STAGES, seed=3 + replica))
    return found


def test_replicas_of_stages_show_their_own_numbers_and_average_their_gradients() -> None:
    outcomes = run_ranks(_on_replicas, 4, REPLICATED, timeout=110)
    wrong = {}
    for name in REPLICATED:
        torch.set_default_dtype(torch.float64)
        replicas = [run(LOOPS[name], Script(rows, MICRO_BATCHES, seed=3 + n)) for n, rows in enumerate(REPLICA_ROWS)]
        torch.set_default_dtype(torch.float32)
        own = 6  # parameters of the model; others live on every rank, and are nobody's to reduce
        for rank, found in enumerate(outcomes):
            expected = replicas[rank // 2]
            averages = [
                None if a is None or b is None else (a * REPLICA_ROWS[0] + b * REPLICA_ROWS[1]) / sum(REPLICA_ROWS)
                for a, b in zip(*(replica.gradients[:own] for replica in replicas), strict=True)
            ]
            expected = expected._replace(gradients=[*averages, *expected.gradients[own:]])
            if problems := differences(found[name], expected):
                wrong[f"{name}, rank {rank}"] = problems
    assert wrong == {}
