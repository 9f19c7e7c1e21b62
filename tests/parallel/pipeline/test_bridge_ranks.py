"""Stages of unequal width on real ranks: messages over Gloo, gradients by the reducer, batch norm over lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import epl
from epl.parallel import GradientReducer, copy_from_first
from epl.train.laneplace import LanePlace
from tests.harness import run_ranks
from tests.parallel.pipeline.wide import Case, Model, batch, gradients_of, on_one_device, run_rank, total_losses


def devices_of(widths, replicas: int):
    """Ranks replica by replica, device by device, as the plan deals them out."""
    size, starts = sum(widths), [sum(widths[:d]) for d in range(len(widths))]
    return [
        [tuple(range(r * size + start, r * size + start + width)) for r in range(replicas)]
        for start, width in zip(starts, widths, strict=True)
    ]


class StageReduction:
    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def last_backward(self) -> None:
        self._reducer.send_next()

    def finish(self) -> None:
        self._reducer.finish()


def train(case: Case, replicas: int, shuffled: bool):
    epl.init(epl.Config({"communication.timeout": 30}))
    job = epl.Env.get().job("test")
    devices = devices_of(case.widths, replicas)
    if shuffled:  # the lanes of every device in reverse: places in a group are not those of the plan
        devices = [[ranks[::-1] for ranks in each] for each in devices]
    place = LanePlace(devices, job, num_chunks=case.chunks, home=case.home)
    model = Model(case)
    with torch.no_grad():
        for module in model.stages:
            for p in module.parameters():
                p.add_(job.rank)  # ranks begin apart: those of a stage must become its first one's
    made = {}
    for stage in place.lanes.stages:
        module = model.stages[stage]
        group = place.replica_group(0)
        if any(True for _ in module.parameters()) and not (case.home and stage == case.num_stages - 1):
            copy_from_first(module.parameters(), group)
            made[stage] = GradientReducer(module, group, factor=lambda: place.gradient_factor(1.0))
    first = place.lanes.ranks[0][0]
    with torch.no_grad():  # as on one device
        for module, original in zip(model.stages, Model(case).stages, strict=True):
            for p, q in zip(module.parameters(), original.parameters(), strict=True):
                p.copy_(q)
    assert first is not None

    def clear() -> None:
        for reducer in made.values():
            reducer.accumulate()

    x, y = batch(case.rows * replicas)
    own = slice(place.replica * case.rows, (place.replica + 1) * case.rows)
    losses = run_rank(
        case,
        place.lanes,
        place.make_transport(list(case.edges)),
        model,
        x[own],
        y[own],
        reducers={stage: StageReduction(reducer) for stage, reducer in made.items()},
        clear=clear,
    )
    return place.replica, losses, gradients_of(model)


CASES = [
    (Case((1, 2, 1), "PreferBackward", 4, 9), 1, False),
    (Case((2, 1), "ZeroBubble", 4, 6), 2, False),
    (Case((2, 3), "PreferForward", 7, 10, home=True), 1, True),
    (Case((2, 2), "Interleaved", 4, 9, chunks=2, home=True), 1, False),
    (Case((1, 2), "PreferBackwardOptimizer", 4, 5, home=True), 1, False),
    (Case((1, 1), "Interleaved", 7, 9, chunks=2), 1, False),
]


@pytest.mark.parametrize(("case", "replicas", "shuffled"), CASES, ids=lambda v: str(getattr(v, "widths", v)))
def test_as_one_device(case, replicas, shuffled):
    results = run_ranks(train, sum(case.widths) * replicas, case, replicas, shuffled, timeout=90)
    losses, gradients = on_one_device(replace(case, widths=(1,) * len(case.widths)), replicas)
    found = [total_losses([own for r, own, _ in results if r == n], len(case.sizes)) for n in range(replicas)]
    assert [loss for each in found for loss in each] == pytest.approx(losses, abs=1e-12)
    seen = set()
    for _, _, own in results:
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12)
            seen.add(name)
    assert seen == gradients.keys()
