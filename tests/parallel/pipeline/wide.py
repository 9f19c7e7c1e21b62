"""A staged model whose values carry the batch in every way, on stages of any width: over any transport, and on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from epl.parallel.pipeline.bridge import make_mailbox
from epl.parallel.pipeline.executor import Executor, Program
from epl.parallel.pipeline.lanes import Lanes
from epl.parallel.pipeline.memory import MemoryNetwork
from epl.parallel.pipeline.stage import Stage
from epl.plan.batch import cut_evenly
from epl.plan.schedule import Schedule, check, make_schedule

WIDTH = 4
CHAIN = (0, 1, 0, "same", "same", "average")
"""Layouts of h, its transpose, integers, a weight's product, integers alike on all lanes, an auxiliary loss."""
SKIP = (0, "average")
"""Layouts from the first stage straight to the last: early features, and their mean."""


@dataclass(frozen=True)
class Case:
    widths: tuple[int, ...]
    schedule: str = "PreferBackward"
    micro_batches: int = 2
    rows: int = 8
    chunks: int = 1
    home: bool = False
    coupled: bool = True
    """With auxiliary losses, and a skip connection from the first stage to the last."""
    copied: tuple[int, ...] = ()
    """Stages whose lanes all compute all rows."""

    @property
    def num_stages(self) -> int:
        return len(self.widths) * self.chunks + self.home

    @property
    def sizes(self) -> list[int]:
        number = min(self.micro_batches, self.rows)
        return [stop - start for start, stop in cut_evenly(0, self.rows, number)]

    @property
    def edges(self) -> dict[tuple[int, int], tuple]:
        last = self.num_stages - 1
        if not self.coupled:
            return {(s, s + 1): CHAIN[:-1] for s in range(last)}
        return {**{(s, s + 1): CHAIN for s in range(last)}, (0, last): SKIP if last > 1 else CHAIN + SKIP}

    def schedules(self, lanes: Lanes) -> Schedule:
        made = make_schedule(self.schedule, len(self.widths), len(self.sizes), self.chunks)
        made = made.with_home() if self.home else made
        made = made.with_communication(self.edges, lanes.bridged(self.edges, self.edges)).with_reduce()
        check(made)
        return made


class Part(nn.Module):
    """One stage: uses the auxiliary loss so far in every row, and adds to it."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.words = nn.Embedding(3, WIDTH)
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self, received, x):
        if self.first:
            h, across, ids = torch.tanh(self.layer(x)), x.t(), (x.sum(1) > 0).long()
            table, alike, auxiliary = self.table * 1.5, torch.arange(3), torch.zeros((), dtype=x.dtype)
        else:
            h, across, ids, table, alike, auxiliary = received
            assert ids.dtype == alike.dtype == torch.int64
            assert alike.tolist() == [0, 1, 2]
            assert not ids.requires_grad
            h = h + torch.tanh(self.layer(self.norm(h))) * table * (1 + auxiliary) + self.words(ids) + across.t() * 0.1
            h = h.relu_() - 0.3
            across = across * 0.5 + h.t()
            table = table + self.table * 0.25
        auxiliary = auxiliary * 0.5 + (h * self.table).square().mean()
        return h, across, ids, table, alike, auxiliary


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, 3), nn.Parameter(torch.ones(()))

    def forward(self, values, early, y):
        h, across, _, table, _, auxiliary = values
        h = h + across.t() + table
        if early:
            h = h + early[0] * (1 + early[1])
        return (F.cross_entropy(self.layer(h), y) + 0.3 * auxiliary) * self.scale


class Model:
    """The modules of every stage; the head is the last one's, or home's alone."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(5)
        self.case, last = case, case.num_stages - 1
        self.stages = []
        for stage in range(case.num_stages):
            module = nn.ModuleDict()
            if not (case.home and stage == last):
                module["part"] = Part(stage == 0)
            if stage == last:
                module["head"] = Head()
            self.stages.append(module.double())

    def run(self, stage, received, x, y):
        """What goes to each later stage, and the loss where this is its stage."""
        last = self.case.num_stages - 1
        before = received.get(stage - 1)
        early = received.get(0) if stage == last and self.case.coupled else None
        if early is not None and last == 1:
            before, early = before[: len(CHAIN)], before[len(CHAIN) :]
        if before is not None and not self.case.coupled:
            before = (*before, torch.zeros((), dtype=torch.float64))
        module = self.stages[stage]
        values = module["part"](before, x) if "part" in module else before
        if stage == last:
            return {}, module["head"](values, early, y)
        if not self.case.coupled:
            return {stage + 1: values[:-1]}, None
        outputs = {stage + 1: values}
        if stage == 0:
            skip = (values[0] * 0.5, values[0].mean())
            outputs[last] = (*values, *skip) if last == 1 else skip
        return outputs, None


def batch(rows: int):
    g = torch.Generator().manual_seed(3)
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=g), torch.randint(0, 3, (rows,), generator=g)


class LaneStage:
    """A stage's program on one lane."""

    def __init__(self, model: Model, stage: int, lanes: Lanes, x, y) -> None:
        self._model, self._stage = model, stage
        self._cuts = cut_evenly(0, len(x), len(model.case.sizes))
        self._lanes, self._x, self._y = lanes, x, y

    def forward(self, received, micro_batch):
        start, stop = self._cuts[micro_batch]
        rows = self._lanes.rows(self._stage, stop - start)
        own = slice(start + rows.start, start + rows.stop)
        return self._model.run(self._stage, received, self._x[own], self._y[own])


def run_rank(case: Case, lanes: Lanes, transport, model: Model, x, y, steps: int = 2, reducers=None, before_step=None):
    """Steps on one rank; the last one's losses, each with its weight in the micro batch's."""
    schedule = case.schedules(lanes)
    device = schedule.device_of(lanes.stages[0])
    program = Program.of(schedule, device, stages=lanes.stages)
    stages = {s: Stage(s, LaneStage(model, s, lanes, x, y)) for s in lanes.stages}
    mailbox = make_mailbox(transport, lanes, case.sizes, case.edges)
    executor = Executor(stages, schedule.num_devices, transport, reducers=reducers, mailbox=mailbox)
    last = case.num_stages - 1
    weights = [n / len(x) for n in case.sizes]
    shares = [lanes.rows(last, n).weight for n in case.sizes] if last in lanes.stages else [1.0] * len(case.sizes)
    for _ in range(steps):
        for stage in lanes.stages:
            model.stages[stage].zero_grad()
        if before_step is not None:
            before_step()
        step = executor.run(program, [w * s for w, s in zip(weights, shares, strict=True)])
    return {n: (loss.item(), shares[n]) for n, loss in step.losses.items()}


def in_memory(case: Case):
    """Losses by micro batch, and the gradients of every stage, added up over its lanes."""
    size = sum(case.widths)
    models = [Model(case) for _ in range(size)]
    network = MemoryNetwork(size, timeout=20)
    x, y = batch(case.rows)

    def rank(own: int):
        lanes = Lanes.of(case.widths, own, num_chunks=case.chunks, home=case.home, copied=case.copied)
        return run_rank(case, lanes, network.transport(own), models[own], x, y)

    losses = network.run(rank)
    return total_losses(losses, len(case.sizes)), summed(map(gradients_of, models), case.copied)


def summed(found, copied=()) -> dict[str, torch.Tensor]:
    """Gradients by name, added up over lanes; those of copied stages must be the same on all lanes, and count once."""
    total: dict[str, torch.Tensor] = {}
    for gradients in found:
        for name, gradient in gradients.items():
            if name in total and int(name.partition(".")[0]) in copied:
                torch.testing.assert_close(gradient, total[name], rtol=1e-12, atol=1e-12)
            else:
                total[name] = total[name] + gradient if name in total else gradient
    return total


def total_losses(by_rank, number: int) -> list[float]:
    return [sum(loss * share for found in by_rank if n in found for loss, share in [found[n]]) for n in range(number)]


def gradients_of(model: Model) -> dict[str, torch.Tensor]:
    named = {f"{s}.{name}": p.grad for s, m in enumerate(model.stages) for name, p in m.named_parameters()}
    return {name: gradient for name, gradient in named.items() if gradient is not None}


def on_one_device(case: Case, replicas: int = 1):
    """The same stages one after the other, over the same micro batches."""
    model = Model(case)
    x, y = batch(case.rows * replicas)
    losses = []
    for replica in range(replicas):
        for start, stop in cut_evenly(0, case.rows, len(case.sizes)):
            rows = slice(replica * case.rows + start, replica * case.rows + stop)
            made: dict[int, dict[int, object]] = {s: {} for s in range(case.num_stages)}
            for stage in range(case.num_stages):
                outputs, loss = model.run(stage, made[stage], x[rows], y[rows])
                for user, value in outputs.items():
                    made[user][stage] = value
            (loss * (stop - start) / len(x)).backward()
            losses.append(loss.item())
    return losses, gradients_of(model)
