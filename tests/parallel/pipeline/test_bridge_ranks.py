"""Stages of unequal width on real ranks: messages over Gloo, gradients by the reducer, batch norm over lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import epl
from epl.parallel import GradientReducer, copy_from_first, sync_batch_norm
from epl.parallel.pipeline.bridge import make_mailbox
from epl.parallel.pipeline.executor import Executor, Program
from epl.parallel.pipeline.stage import Stage
from epl.plan.batch import cut_evenly
from epl.train.laneplace import LanePlace
from tests.harness import run_ranks
from tests.parallel.pipeline.wide import Case, Model, batch, gradients_of, on_one_device, run_rank, summed, total_losses


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
    """The user of the parts on one rank: its replica, its losses, its gradients."""
    epl.init(epl.Config({"communication.timeout": 30}))
    job = epl.Env.get().job("test")
    devices = devices_of(case.widths, replicas)
    if shuffled:  # the lanes of every device in reverse: places in a group are not those of the plan
        devices = [[ranks[::-1] for ranks in each] for each in devices]
    place = LanePlace(devices, job, num_chunks=case.chunks, home=case.home)
    model, group, reducers = Model(case), place.replica_group(0), {}
    for stage in place.lanes.stages:
        if case.home and stage == case.num_stages - 1:
            continue  # on one rank only
        with torch.no_grad():
            for p in model.stages[stage].parameters():
                p.add_(dist.get_rank(group))  # those of a stage begin apart, and must become its first one's
        copy_from_first(model.stages[stage].parameters(), group)
        reducers[stage] = GradientReducer(model.stages[stage], group, factor=lambda: place.gradient_factor(1.0))

    def before_step() -> None:
        for reducer in reducers.values():
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
        reducers={stage: StageReduction(reducer) for stage, reducer in reducers.items()},
        before_step=before_step,
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


# ---- batch norm ------------------------------------------------------------------------------------------------------------

NORM = Case((1, 2, 1), micro_batches=3, rows=5, coupled=False)
SIZES = [2, 2, 1]  # of the last micro batch the second lane has no row


class Normed:
    """A stage of the middle with batch norm; rows of 3 × 4."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        parts = nn.Linear(4, 4), nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.Tanh()), nn.Linear(4, 1)
        self.stages = [part.double() for part in parts]

    def run(self, stage: int, received, x):
        value = self.stages[stage](x if stage == 0 else received)
        return value if stage < 2 else value.square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


class NormedLane:
    def __init__(self, model: Normed, stage: int, lanes) -> None:
        self._model, self._stage, self._lanes = model, stage, lanes
        self.has_rows = True

    def forward(self, received, micro_batch):
        start, stop = cut_evenly(0, 5, 3)[micro_batch]
        rows = self._lanes.rows(self._stage, stop - start)
        self.has_rows = not rows.padding
        before = received[self._stage - 1][0] if received else None
        value = self._model.run(self._stage, before, Normed.batch()[start + rows.start : start + rows.stop])
        return ({}, value) if self._stage == 2 else ({self._stage + 1: (value,)}, None)


def train_normed():
    epl.init(epl.Config({"communication.timeout": 30}))
    place = LanePlace(devices_of(NORM.widths, 1), epl.Env.get().job("test"))
    model, (stage,) = Normed(), place.lanes.stages
    program = NormedLane(model, stage, place.lanes)
    sync_batch_norm(model.stages[stage], place.lane_group(), counted=lambda: program.has_rows)
    transport = place.make_transport(list(NORM.edges))
    mailbox = make_mailbox(transport, place.lanes, SIZES, {(0, 1): (0,), (1, 2): (0,)})
    executor = Executor({stage: Stage(stage, program)}, 3, transport, mailbox=mailbox)
    schedule = NORM.schedules(place.lanes)
    executor.run(Program.of(schedule, stage, stages=place.lanes.stages), [n / 5 for n in SIZES])
    buffers = {f"{stage}.{name}": value for name, value in model.stages[stage].named_buffers()}
    return gradients_of(model), buffers


def test_batch_norm_over_lanes():
    results = run_ranks(train_normed, 4, timeout=60)
    whole = Normed()
    for start, stop in cut_evenly(0, 5, 3):
        value = None
        for stage in range(3):
            value = whole.run(stage, value, Normed.batch()[start:stop])
        (value * (stop - start) / 5).backward()
    expected, found = gradients_of(whole), summed(gradients for gradients, _ in results)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
    for lane in (1, 2):
        for name, value in whole.stages[1].named_buffers():
            torch.testing.assert_close(results[lane][1][f"1.{name}"], value, rtol=1e-10, atol=1e-12)
