"""Runs staged models over the in-memory transport, and on one device, and gives their losses and gradients."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass

import torch
from torch import nn

from epl.parallel.pipeline.executor import Executor, Program
from epl.parallel.pipeline.memory import MemoryNetwork
from epl.parallel.pipeline.stage import Stage
from epl.parallel.pipeline.ties import Ties, check_holders, describe, tied_parameters
from epl.plan.batch import cut_evenly
from epl.plan.schedule import check, make_schedule
from epl.train.micro import cut_batch
from epl.train.pipeline import ChainStage
from tests.parallel.pipeline.models import MODELS, run_stage


@dataclass
class Result:
    losses: list[float]
    gradients: dict[str, torch.Tensor | None]


class _MemoryAdder:
    """Adds up over threads that hold a key."""

    def __init__(self, holders, own, network) -> None:
        self._holders, self._own, self._network = holders, own, network

    def add_up(self, key, tensor) -> None:
        box = self._network.boxes.setdefault(key, {})
        box[self._own] = tensor.clone()
        self._network.barriers[key].wait(20)
        total = sum(box[d] for d in self._holders[key])
        self._network.barriers[key].wait(20)
        tensor.copy_(total)

    def copy_first(self, key, tensor) -> None:
        pass  # copies of one model: equal from the start


def _named(stages) -> dict[str, nn.Parameter]:
    """Parameters by piece, whatever the cut."""
    found, count = {}, 0
    for stage in stages:
        for piece in stage:
            found |= {f"{count}.{name}": p for name, p in piece.named_parameters()}
            count += 1
    return found


def in_memory(
    model: str, schedule: str, devices: int, micro_batches: int, chunks: int, rows: int, steps: int = 2
) -> Result:
    """The last step's losses and the gradients of all stages, each device a thread with its own copy of its stages."""
    staged = MODELS[model]
    whole = [m.double() for m in staged.stages(devices * chunks)]
    own = {d: [copy.deepcopy(whole[s]) for s in range(d, devices * chunks, devices)] for d in range(devices)}
    for d in range(devices):  # a deepcopy is another parameter: tie it under the same key
        from epl.parallel.pipeline.ties import _keys, tie

        for a, b in zip(own[d], [whole[s] for s in range(d, devices * chunks, devices)], strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                if q in _keys:
                    tie(_keys[q], p)
    number = min(micro_batches, rows)
    made = make_schedule(schedule, devices, number, chunks).with_communication().with_reduce()
    check(made)
    network = MemoryNetwork(devices, timeout=20)
    described = [describe(tied_parameters(own[d])) for d in range(devices)]
    holders = check_holders(described)
    network.boxes, network.barriers = {}, {k: threading.Barrier(len(h)) for k, h in holders.items()}  # type: ignore[attr-defined]
    batch = staged.batch(rows)
    sizes = [stop - start for start, stop in cut_evenly(0, rows, number)]

    def device(d: int):
        stages = {}
        for stage, module in zip(range(d, devices * chunks, devices), own[d], strict=True):
            program = ChainStage(stage, stage == devices * chunks - 1)
            program.function = lambda received, *mb, module=module: run_stage(module, received, mb)
            program.micro_batches = cut_batch(batch, rows, number)
            stages[stage] = Stage(stage, program)
        executor = Executor(stages, devices, network.transport(d))
        parameters = tied_parameters(own[d])
        ties = Ties(parameters, holders, d, _MemoryAdder(holders, d, network)) if parameters else None
        for _ in range(steps):
            for module in own[d]:
                module.zero_grad()
            step = executor.run(Program.of(made, d), [n / rows for n in sizes])
            if ties is not None:
                ties.add_up_gradients()
        return [step.losses[n].item() for n in sorted(step.losses)]

    losses = network.run(device)[-1]
    ordered = [own[s % devices][s // devices] for s in range(devices * chunks)]
    return Result(losses, {name: p.grad for name, p in _named(ordered).items()})


def on_one_device(model: str, micro_batches: int, rows: int) -> Result:
    """The same pieces in one process, over the same micro batches, as the user would write it."""
    staged = MODELS[model]
    (stage,) = [m.double() for m in staged.stages(1)]
    number = min(micro_batches, rows)
    losses = []
    for piece in cut_batch(staged.batch(rows), rows, number):
        loss = run_stage(stage, None, piece)
        (loss * len(piece[1]) / rows).backward()
        losses.append(loss.item())
    return Result(losses, {name: p.grad for name, p in _named([stage]).items()})
