"""Pipelines by annotation equal one device: losses and weights, over models, stages, schedules, micro batches, replicas."""

from __future__ import annotations

import functools

import pytest

from tests.harness import run_ranks
from tests.parity.compare import Run, assert_same
from tests.parity.cover import name_of, pairwise
from tests.parity.staged_script import StagedCase, on_one_device, under_epl

AXES = {
    "model": ["mlp", "skip_cnn", "encoder_decoder", "tied_lm", "two_tower"],
    "stages": [2, 3, 4],
    "schedule": ["PreferForward", "PreferBackward", "PreferBackwardOptimizer", "Interleaved", "ZeroBubble"],
    "micro_batches": [1, 2, 4],
    "replicas": [1, 2],
    "optimizer": ["sgd", "adamw"],
    "clip": [False, True],
}


def _possible(values: dict[str, object]) -> bool:
    return values["schedule"] != "Interleaved" or values["stages"] == 4


@functools.lru_cache(maxsize=64)
def _reference(key: str) -> Run:
    return on_one_device(_cases[key])


_cases: dict[str, StagedCase] = {}


def check(case: StagedCase) -> None:
    """Every rank's run of the case equals the one-device run."""
    key = f"{case.model} {case.optimizer} {case.replicas} {case.micro_batches} {case.clip}"
    _cases[key] = case
    expected = _reference(key)
    for found in run_ranks(under_epl, case.ranks, case, timeout=90):
        assert_same(found, expected)


@pytest.mark.parametrize("values", pairwise(AXES, _possible), ids=name_of)
def test_covering_set(values):
    check(StagedCase(**values))


def test_a_loss_that_mixes_rows_runs_on_the_whole_batch():
    check(StagedCase("two_tower_contrastive", 2, micro_batches=3, optimizer="adamw"))
    check(StagedCase("two_tower_contrastive", 4, micro_batches=2, clip=True))


WIDE = [
    StagedCase("mlp", 3, widths=(1, 2, 1), micro_batches=2, optimizer="adamw"),
    StagedCase("tied_lm", 2, widths=(2, 1), micro_batches=2, clip=True),
    StagedCase("skip_cnn", 2, widths=(1, 2), micro_batches=4, replicas=2),
    StagedCase("encoder_decoder", 3, widths=(2, 2, 1), schedule="PreferForward", micro_batches=1),
    StagedCase("two_tower_contrastive", 2, widths=(1, 3), micro_batches=2),
    StagedCase("flat_lm", 3, widths=(1, 2, 1), micro_batches=3),
]


@pytest.mark.parametrize("case", WIDE, ids=lambda case: f"{case.model}-{case.widths}-{case.replicas}")
def test_stages_of_unequal_width(case):
    check(case)


ACCUMULATION = [
    StagedCase("tied_lm", 1, micro_batches=4, optimizer="adamw", clip=True),
    StagedCase("skip_cnn", 1, micro_batches=3, replicas=2),
    StagedCase("two_tower_contrastive", 1, micro_batches=2),
]


@pytest.mark.parametrize("case", ACCUMULATION, ids=lambda case: f"{case.model}-{case.replicas}")
def test_gradient_accumulation_is_the_same_with_one_stage(case):
    check(case)
