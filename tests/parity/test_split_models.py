"""Hugging Face models, unmodified, with their layers or all of them under split, equal one device."""

from __future__ import annotations

import pytest

from tests.harness import preload, run_ranks
from tests.parity.compare import assert_same
from tests.parity.hugging_face import LAYERS
from tests.parity.split_models import ModelCase, all_under_epl, on_one_device

preload("tests.parity.split_models")
TOLERANCE = 1e-6  # losses are computed in float32, whatever the model's dtype

LAYERS_ONLY = [
    ModelCase("llama", optimizer="adamw"),
    ModelCase("gpt2"),
    ModelCase("bert", optimizer="adamw"),
    ModelCase("t5"),
    ModelCase("qwen3", optimizer="adamw"),
    ModelCase("mixtral"),
]
WHOLE = [
    ModelCase("llama", whole=True),
    ModelCase("gpt2", whole=True, optimizer="adamw"),
    ModelCase("bert", whole=True),
    ModelCase("t5", whole=True, optimizer="adamw"),
    ModelCase("qwen3", whole=True),
    ModelCase("mixtral", whole=True, optimizer="adamw"),
]
MIXES = [
    ModelCase("qwen3", ranks=4, optimizer="adamw"),
    ModelCase("llama", ranks=4, stages=2, optimizer="adamw"),
]
COLLECTIVES = {
    "llama": 4 * LAYERS,
    "gpt2": 4 * LAYERS,
    "bert": 4 * LAYERS,
    "t5": 10 * LAYERS,
    "qwen3": 4 * (LAYERS - 1),
}
"""Forward and backward: after attention and after the feed-forward, and before each; encoder and decoder of T5 have 2 and 3."""


def _check(cases: list[ModelCase]) -> dict[str, tuple[list[str], float]]:
    expected = [on_one_device(case) for case in cases]
    told = {}
    for found in run_ranks(all_under_epl, cases[0].ranks, cases, timeout=120):
        for case, (run, sent, here), wanted in zip(cases, found, expected, strict=True):
            try:
                assert_same(run, wanted, TOLERANCE)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None
            told[case.kind] = sent, here
    return told


def test_layers_under_split():
    for kind, (sent, _) in _check(LAYERS_ONLY).items():
        if kind != "mixtral":  # its experts send one by one, as many as rows choose
            assert len(sent) <= COLLECTIVES[kind] + (kind == "t5"), kind  # T5: the decoder's rows enter the encoder's
            assert set(sent) == {"all_reduce_"}, kind


def test_whole_models_under_split():
    for kind, (_, here) in _check(WHOLE).items():
        assert here < 0.58, kind


@pytest.mark.parametrize("case", MIXES, ids=["replicas", "stages"])
def test_split_beside_replicas_and_inside_stages(case):
    _check([case])
