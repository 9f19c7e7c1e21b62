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
from epl.parallel.pipeline.ties import Ties, _keys, check_holders, describe, tie, tied_parameters
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


class _MemoryReducer:
    """Adds a stage's gradients up over the replicas, which are threads too; notes whether the engine announced the last one."""

    def __init__(self, stage: int, replica: int, replicas: int, module: nn.Module, shared: dict, weight: float) -> None:
        self._stage, self._replica, self._module, self._shared, self._weight = stage, replica, module, shared, weight
        self._replicas, self._announced = replicas, 0

    def last_backward(self) -> None:
        self._announced += 1

    def finish(self) -> None:
        assert self._announced == 1, f"the last backward of stage {self._stage} was announced {self._announced} times"
        self._announced = 0
        boxes, barrier = self._shared[self._stage]
        boxes[self._replica] = [p.grad * self._weight for p in self._module.parameters()]
        barrier.wait(20)
        totals = [sum(parts) for parts in zip(*(boxes[r] for r in range(self._replicas)), strict=True)]
        barrier.wait(20)
        for p, total in zip(self._module.parameters(), totals, strict=True):
            p.grad = total


def in_memory(
    model: str, schedule: str, devices: int, micro_batches: int, chunks: int, rows: int, replicas: int = 1
) -> Result:
    """The last step's losses (of replica 0) and the gradients of all stages of the last replica, devices as threads."""
    stages = devices * chunks
    shared = {stage: ({}, threading.Barrier(replicas)) for stage in range(stages)}
    blocks = cut_evenly(0, rows, replicas)
    results: list[Result | BaseException | None] = [None] * replicas

    def replica(number: int) -> None:
        try:
            results[number] = _one_replica(
                model, schedule, devices, micro_batches, chunks, rows, blocks, number, shared
            )
        except BaseException as error:
            results[number] = error
            for _, barrier in shared.values():
                barrier.abort()

    threads = [threading.Thread(target=replica, args=(n,)) for n in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    assert isinstance(results[0], Result)
    assert isinstance(results[-1], Result)
    return Result(results[0].losses, results[-1].gradients)


def _one_replica(model, schedule, devices, micro_batches, chunks, all_rows, blocks, replica, shared) -> Result:
    staged, stages = MODELS[model], devices * chunks
    with _building:  # seeds are the process's
        whole = [m.double() for m in staged.stages(stages)]
    own = {d: [_copy_with_ties(whole[s]) for s in range(d, stages, devices)] for d in range(devices)}
    start, stop = blocks[replica]
    rows = stop - start
    batch = tuple(t[start:stop] for t in staged.batch(all_rows))
    number = min(micro_batches, rows)
    made = make_schedule(schedule, devices, number, chunks).with_communication().with_reduce()
    check(made)
    network = MemoryNetwork(devices, timeout=20)
    holders = check_holders([describe(tied_parameters(own[d])) for d in range(devices)])
    network.boxes, network.barriers = {}, {k: threading.Barrier(len(h)) for k, h in holders.items()}  # type: ignore[attr-defined]
    sizes = [stop - start for start, stop in cut_evenly(0, rows, number)]

    def device(d: int):
        made_stages, reducers = {}, {}
        for stage, module in zip(range(d, stages, devices), own[d], strict=True):
            program = ChainStage(stage, stage == stages - 1)
            program.function = lambda received, *mb, module=module: run_stage(module, received, mb)
            program.micro_batches = cut_batch(batch, rows, number)
            made_stages[stage] = Stage(stage, program)
            if len(blocks) > 1:
                reducers[stage] = _MemoryReducer(stage, replica, len(blocks), module, shared, rows / all_rows)
        executor = Executor(made_stages, devices, network.transport(d), reducers=reducers)
        parameters = tied_parameters(own[d])
        ties = Ties(parameters, holders, d, _MemoryAdder(holders, d, network)) if parameters else None
        for _ in range(2):  # the second step is the one in which forms are known
            for module in own[d]:
                module.zero_grad()
            step = executor.run(Program.of(made, d), [n / rows for n in sizes])
            if ties is not None:
                ties.add_up_gradients()
        return [step.losses[n].item() for n in sorted(step.losses)]

    losses = network.run(device)[-1]
    ordered = [own[s % devices][s // devices] for s in range(stages)]
    return Result(losses, {name: p.grad for name, p in _named(ordered).items()})


_building = threading.Lock()


def _copy_with_ties(stage: nn.Module) -> nn.Module:
    """A deepcopy is another parameter: it is tied under the same key."""
    made = copy.deepcopy(stage)
    for p, q in zip(stage.parameters(), made.parameters(), strict=True):
        if p in _keys:
            tie(_keys[p], q)
    return made


def on_one_device(model: str, micro_batches: int, rows: int, replicas: int = 1) -> Result:
    """The same pieces in one process, over the same micro batches, as the user would write it; the losses of replica 0."""
    staged = MODELS[model]
    (stage,) = [m.double() for m in staged.stages(1)]
    losses = []
    for replica, (start, stop) in enumerate(cut_evenly(0, rows, replicas)):
        batch = tuple(t[start:stop] for t in staged.batch(rows))
        for piece in cut_batch(batch, stop - start, min(micro_batches, stop - start)):
            loss = run_stage(stage, None, piece)
            (loss * len(piece[1]) / rows).backward()
            if replica == 0:
                losses.append(loss.item())
    return Result(losses, {name: p.grad for name, p in _named([stage]).items()})
