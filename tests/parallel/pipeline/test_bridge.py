"""Stages of unequal width give the gradients of one device, over the in-memory transport."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from epl.errors import UsageError
from epl.parallel.pipeline.bridge import Bridge, make_mailbox
from epl.parallel.pipeline.executor import Executor, Program
from epl.parallel.pipeline.lanes import Lanes
from epl.parallel.pipeline.mailbox import Mailbox
from epl.parallel.pipeline.memory import MemoryNetwork
from epl.parallel.pipeline.stage import Stage
from epl.plan.batch import cut_evenly
from epl.plan.schedule import backward_only, forward_only
from tests.parallel.pipeline.wide import Case, LaneStage, Model, batch, gradients_of, in_memory, on_one_device, summed

SCHEDULES = {"PreferForward": 1, "PreferBackward": 1, "PreferBackwardOptimizer": 1, "Interleaved": 2, "ZeroBubble": 1}
UNEQUAL = [(1, 2, 1), (2, 1), (2, 3), (3, 1, 2), (4, 4)]
EQUAL = [(2, 2), (3, 3), (2, 2, 2)]
SIZES = [(1, 8), (2, 12), (4, 9), (7, 10), (4, 3)]  # micro batches, rows: also uneven, and fewer rows than lanes

THIRDS = [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))]
"""Of the products, another one for each schedule."""

reference = functools.lru_cache(on_one_device)


def one_by_one(case: Case) -> Case:
    return replace(case, schedule="", widths=(1,) * len(case.widths), copied=())


def compare(case: Case, found) -> None:
    losses, gradients = reference(one_by_one(case))
    assert found[0] == pytest.approx(losses, abs=1e-12)
    assert found[1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{case} {n}: {m}"
        )


@pytest.mark.parametrize("third", THIRDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("home", "coupled"), [(False, True), (True, True), (False, False)])
def test_whole_product(schedule, home, coupled, third):
    chunks = SCHEDULES[schedule]
    product = [*itertools.product(EQUAL if chunks > 1 else UNEQUAL, SIZES)]
    for widths, (micro_batches, rows) in product[(third + list(SCHEDULES).index(schedule)) % 3 :: 3]:
        case = Case(widths, schedule, micro_batches, rows, chunks, home, coupled)
        compare(case, in_memory(case))


COPIED = [
    ((1, 2), (1,)),
    ((2, 1), (0,)),
    ((2, 2), (0, 1)),
    ((2, 2), (0,)),
    ((2, 2), (1,)),
    ((2, 3), (0, 1)),
    ((3, 2, 2), (0, 2)),
]


@pytest.mark.parametrize("third", THIRDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_whose_lanes_all_have_all_rows(schedule, third):
    """As under `split`: every lane computes the whole micro batch, and has the whole gradient."""
    chunks = SCHEDULES[schedule]
    product = [*itertools.product(COPIED, SIZES)]
    for (widths, copied), (micro_batches, rows) in product[(third + list(SCHEDULES).index(schedule)) % 3 :: 3]:
        if chunks > 1 and len(set(widths)) > 1:
            continue
        stages = {s + chunk * len(widths) for s in copied for chunk in range(chunks)}
        case = Case(widths, schedule, micro_batches, rows, chunks, home=True, copied=tuple(sorted(stages)))
        compare(case, in_memory(case))


def test_a_plain_pipeline_has_a_plain_mailbox():
    transport = MemoryNetwork(3).transport(0)
    assert type(make_mailbox(transport, Lanes.of((1, 1, 1), 0), [1], {})) is Mailbox
    assert type(make_mailbox(transport, Lanes.of((1, 2), 0), [1], {})) is Bridge


# ---- forwards and backwards apart, evaluation, other rows in the next step ------------------------------------------------


def on_lanes(widths, run, home=False):
    """`run(lanes, transport)` on every rank of a replica."""
    network = MemoryNetwork(sum(widths), timeout=20)
    return network.run(lambda own: run(Lanes.of(widths, own, home=home), network.transport(own)))


def test_forwards_first_and_backwards_later_twice():
    case = Case((2, 1, 3), micro_batches=3, rows=7, home=True)
    models, (x, y) = [Model(case) for _ in range(sum(case.widths))], batch(case.rows)

    def run(lanes: Lanes, transport):
        orders = [order(3, 3).with_home() for order in (forward_only, backward_only)]
        bridged = lanes.bridged(case.edges, case.edges)
        first, second = [order.with_communication(case.edges, bridged) for order in orders]
        device = first.device_of(lanes.stages[0])
        stages = {s: Stage(s, LaneStage(models[lanes.own], s, lanes, x, y)) for s in lanes.stages}
        mailbox = make_mailbox(transport, lanes, case.sizes, case.edges)
        executor = Executor(stages, 3, transport, mailbox=mailbox)
        executor.run(Program.of(first, device, keeps=True, stages=lanes.stages), [])
        for retain in (True, False):
            for stage in stages.values():
                stage.retain = retain
            executor.run(Program.of(second, device, stages=lanes.stages), [n / case.rows for n in case.sizes])
        return {}

    on_lanes(case.widths, run, home=True)
    _, gradients = reference(one_by_one(case))
    for name, found in summed(map(gradients_of, models)).items():
        torch.testing.assert_close(found, 2 * gradients[name], rtol=1e-10, atol=1e-12)


def test_evaluation_and_other_rows_every_time():
    case = Case((2, 1, 3), micro_batches=3, rows=7, home=True)
    models = [Model(case) for _ in range(sum(case.widths))]

    def run(lanes: Lanes, transport):
        bridge = Bridge(transport, lanes, (), {})
        schedule = forward_only(3, 3).with_home().with_communication(case.edges, lanes.bridged(case.edges, case.edges))
        program = Program.of(schedule, schedule.device_of(lanes.stages[0]), stages=lanes.stages)
        found = []
        for rows in (7, 3, 12, 7):
            now = replace(case, rows=rows)
            bridge.load(now.sizes, now.edges)
            stages = {s: Stage(s, LaneStage(models[lanes.own], s, lanes, *batch(rows))) for s in lanes.stages}
            with torch.no_grad():
                step = Executor(stages, 3, transport, mailbox=bridge).run(program, [])
            found.append([step.losses[n].item() for n in sorted(step.losses)])
        return found

    (at_home,) = [found for found in on_lanes(case.widths, run, home=True) if found[0]]
    for rows, losses in zip((7, 3, 12, 7), at_home, strict=True):
        assert losses == pytest.approx(reference(replace(one_by_one(case), rows=rows))[0], abs=1e-12)


# ---- fewer rows than lanes -------------------------------------------------------------------------------------------------


class Shaped(nn.Module):
    """What cannot run on no rows: a dim left to be inferred, a maximum over everything of a row's neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, h):
        out = self.layer(h.view(len(h), -1)).view(len(h), -1, 4)
        return out - out.detach().max() * 0


class Sequence(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True) if kind == "lstm" else nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, h):
        out = self.layer(h)
        return out[0] if isinstance(out, tuple) else out


MODULES = {
    "shapes": Shaped,
    "lstm": lambda: Sequence("lstm"),
    "convolution": lambda: Sequence("convolution"),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


class Chain:
    """Linear, the module on a wide stage, a loss."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        self.stages = [m.double() for m in (nn.Linear(4, 4), MODULES[name](), nn.Linear(4, 1))]

    def run(self, stage: int, received, x):
        value = self.stages[stage](x if stage == 0 else received[stage - 1][0])
        return ({stage + 1: (value,)}, None) if stage < 2 else ({}, value.square().mean())


@pytest.mark.parametrize("name", MODULES)
def test_ordinary_modules_with_fewer_rows_than_lanes(name):
    x = torch.randn(4, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sizes, edges = [2, 1, 1], {(0, 1): (0,), (1, 2): (0,)}
    models = [Chain(name) for _ in range(5)]
    case = Case((1, 3, 1), micro_batches=3, rows=4)

    class Program_:
        def __init__(self, model, stage, lanes):
            self.model, self.stage, self.lanes = model, stage, lanes

        def forward(self, received, n):
            start, stop = cut_evenly(0, 4, 3)[n]
            rows = self.lanes.rows(self.stage, stop - start)
            return self.model.run(self.stage, received, x[start + rows.start : start + rows.stop])

    def run(lanes: Lanes, transport):
        schedule = replace(case, coupled=False).schedules(lanes)
        (stage,) = lanes.stages
        program = Program.of(schedule, stage, stages=lanes.stages)
        stages = {stage: Stage(stage, Program_(models[lanes.own], stage, lanes))}
        mailbox = make_mailbox(transport, lanes, sizes, edges)
        Executor(stages, 3, transport, mailbox=mailbox).run(program, [n / 4 for n in sizes])

    on_lanes(case.widths, run)
    whole = Chain(name)
    for start, stop in cut_evenly(0, 4, 3):
        value, loss = {}, None
        for stage in range(3):
            outputs, loss = whole.run(stage, value, x[start:stop])
            value = {stage: outputs.get(stage + 1)}
        (loss * (stop - start) / 4).backward()
    expected, found = gradients_of(whole), summed(map(gradients_of, models))
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-10, atol=1e-12)


# ---- values ----------------------------------------------------------------------------------------------------------------


def across(widths, layouts, values, rows=4):
    """What each lane of the second stage receives, and the bridges, from what each lane of the first one sends."""
    network = MemoryNetwork(sum(widths))
    bridges = [Bridge(network.transport(r), Lanes.of(widths, r), [rows], {(0, 1): layouts}) for r in range(sum(widths))]
    makers, users = bridges[: widths[0]], bridges[widths[0] :]
    forms = [maker.send((0, 1), 0, value)[0] for maker, value in zip(makers, values, strict=True)]
    received = [user.receive((0, 1), 0) for user in users]
    return makers, users, forms, received


def test_a_value_without_use_has_no_gradient():
    values = [tuple(torch.ones(2, 3, requires_grad=True) for _ in range(3)) for _ in range(2)]
    makers, users, forms, received = across((2, 1), (0, 0, "average"), values)
    ((_, form, _),) = received
    users[0].send_gradients((0, 1), form, [torch.arange(12.0).view(4, 3), None, None])
    for lane, (maker, sent) in enumerate(zip(makers, forms, strict=True)):
        first, *others = maker.receive_gradients((0, 1), 0, sent)
        assert torch.equal(first, torch.arange(12.0).view(4, 3)[2 * lane : 2 * lane + 2])
        assert others == [None, None]


def test_only_one_of_two_users_has_use_for_it():
    (makers, users, forms, received) = across((1, 2), (0, "same"), [(torch.ones(4, requires_grad=True),) * 2])
    users[0].send_gradients((0, 1), received[0][1], [torch.ones(2), torch.full((4,), 2.0)])
    users[1].send_gradients((0, 1), received[1][1], [None, torch.full((4,), 3.0)])
    rows, same = makers[0].receive_gradients((0, 1), 0, forms[0])
    assert rows.tolist() == [1, 1, 0, 0]
    assert same.tolist() == [5, 5, 5, 5]


def test_an_average_of_integers_is_refused():
    with pytest.raises(UsageError, match=r"stage 0 is replicate\(2\) and sends stage 1 a torch.int64 tensor"):
        across((2, 1), ("average",), [(torch.tensor(3),), (torch.tensor(4),)])
    *_, received = across((1, 2), ("average",), [(torch.tensor(3),)])
    assert [value[0].item() for value, _, _ in received] == [3, 3]


def test_other_rows_than_the_lanes_are_refused():
    with pytest.raises(UsageError, match=r"must have the 2 rows of its lane in dim 0; found shape \(4, 3\)"):
        across((2, 1), (0,), [(torch.ones(4, 3),)] * 2)
