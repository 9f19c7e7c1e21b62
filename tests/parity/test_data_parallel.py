"""Data parallelism equals one device: losses and weights, over models, optimizers, ranks, reductions, clipping, tails."""

from __future__ import annotations

import functools

import pytest

from tests.harness import run_ranks
from tests.parity.compare import Run, assert_same
from tests.parity.cover import name_of, pairwise
from tests.parity.script import Case, on_one_device, under_epl

AXES = {
    "model": ["mlp", "cnn", "cnn_synchronised", "transformer", "sparse"],
    "optimizer": ["sgd", "adamw"],
    "ranks": [1, 2, 3, 4],
    "method": ["mean", "sum"],
    "clip": ["no", "after", "before"],
    "tail": ["uneven", "dropped"],
}


def _possible(case: dict[str, object]) -> bool:
    # One replica has nothing to sum over, and synchronised statistics need the whole batch in one piece.
    if case["model"] == "cnn_synchronised" and (case["method"] == "sum" or case["clip"] == "before"):
        return False
    return not (case["ranks"] == 1 and (case["method"] == "sum" or case["clip"] == "before"))


def _case(values: dict[str, object]) -> Case:
    model = str(values["model"])
    config: dict[str, object] = {"communication.gradients_reduce_method": values["method"]}
    if model == "cnn_synchronised":
        config["communication.sync_batch_norm"] = True
    return Case(
        model=model.partition("_")[0],
        optimizer=str(values["optimizer"]),
        ranks=int(values["ranks"]),  # type: ignore[call-overload]
        clip=str(values["clip"]),
        drop_tail=values["tail"] == "dropped",
        config=config,
    )


@functools.lru_cache(maxsize=64)
def _reference(key: str) -> Run:
    return on_one_device(_cases[key])


_cases: dict[str, Case] = {}


def check(case: Case, tolerance: float = 1e-9) -> None:
    """Every rank's run of the case equals the one-device run."""
    key = repr(case)
    _cases[key] = case
    expected = _reference(key)
    for found in run_ranks(under_epl, case.ranks, case):
        assert_same(found, expected, tolerance)


@pytest.mark.parametrize("values", pairwise(AXES, _possible), ids=name_of)
def test_covering_set(values):
    check(_case(values))


def _everything() -> list[dict[str, object]]:
    import itertools

    cases = (dict(zip(AXES, v, strict=True)) for v in itertools.product(*AXES.values()))
    return [case for case in cases if _possible(case)]


@pytest.mark.full
@pytest.mark.parametrize("values", _everything(), ids=name_of)
def test_whole_product(values):
    check(_case(values))


SETTINGS = {
    "one bucket": {"communication.max_splits": 1},
    "three communicators": {"communication.num_communicators": 3, "communication.max_splits": 8},
    "one communicator": {"communication.num_communicators": 1},
    "sparse as dense": {"communication.sparse_as_dense": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_must_not_change_the_result(name):
    model = "sparse" if "sparse" in name else "transformer"
    optimizer = "sgd" if "sparse" in name else "adamw"
    check(Case(model, optimizer, 2, config=SETTINGS[name]))


WIDE = [
    Case("mlp", "adamw", 2, device_count=2),
    Case("transformer", "sgd", 4, device_count=2, clip="after"),
    Case("cnn", "sgd", 4, device_count=2),
    Case("mlp", "sgd", 4, device_count=2, clip="before"),
    Case("mlp", "adamw", 4, device_count=2, config={"communication.gradients_reduce_method": "sum"}),
    Case("sparse", "sgd", 4, device_count=4, micro_batch=6),
    Case("cnn", "adamw", 4, device_count=2, config={"communication.sync_batch_norm": True}, micro_batch=6),
]


@pytest.mark.parametrize("case", WIDE, ids=lambda c: f"{c.model}-{c.ranks}ranks-replicate{c.device_count}-{c.clip}")
def test_a_replica_of_several_devices_divides_its_micro_batch(case):
    check(case)


def test_more_ranks_than_rows_in_the_tail():
    # 44 rows in global batches of 3 × 14: the tail has 2 rows for 3 ranks, one of which sees a row that does not count.
    check(Case("mlp", "adamw", 3, micro_batch=14))
    check(Case("cnn", "sgd", 3, micro_batch=14, config={"communication.sync_batch_norm": True}))


def test_two_optimizers_that_clip_before_the_reduction():
    # Each optimizer's step reduces what has not travelled yet; the second once weighted the first one's a second time, and a
    # sparse gradient was weighted by the receiver's share of the rows instead of the sender's.
    for method in ("mean", "sum"):
        config = {"communication.gradients_reduce_method": method}
        check(Case("sparse", "adamw", 3, clip="before", config=config))


def test_fp16_communication_stays_close():
    check(Case("mlp", "sgd", 2, config={"communication.fp16": True}), tolerance=5e-3)
