"""Data parallel training with epl against torch's DistributedDataParallel, on 2 ranks of this machine.

Both train the same models on the same data in the same two processes, step by step in turns. A step is zero_grad, forward,
loss, backward, optimizer.step. Before any clock runs, both must give the same losses.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import statistics
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from lib.measure import interleave, peak_memory, slowest
from lib.ranks import run_ranks, show
from lib.ratio import paired_ratio
from lib.report import Bar, Row, Section, finish, load, machine, write
from lib.workloads import Batch, ConvNet, Transformer, Workload
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import epl
from epl.parallel import GradientReducer, ReducePolicy

RANKS = 2
MICRO_BATCHES = 4
TIME_LIMIT, MEMORY_LIMIT = 1.03, 1.02
TOLERANCE = 1e-5  # of losses, relative
CHECKED_STEPS = 4  # also the warm-up: both sides rearrange their buckets after the first backward pass


@dataclasses.dataclass(frozen=True)
class Size:
    """How much to do."""

    workloads: dict[str, Workload]
    rounds: int
    memory_runs: int
    sweep_rounds: int
    noise: bool
    """Whether to measure DDP twice: what the two differ by is noise."""


FULL = Size({"transformer": Transformer(), "convnet": ConvNet()}, rounds=31, memory_runs=6, sweep_rounds=15, noise=True)
QUICK = Size(
    {"transformer": Transformer(layers=2, sequence=32), "convnet": ConvNet(blocks=(1, 1, 1, 1), rows=4)},
    rounds=6,
    memory_runs=2,
    sweep_rounds=2,
    noise=False,
)


class Trainer:
    """One way to train a workload: its own copy of the model and of the optimizer, the same data."""

    def __init__(
        self, workload: Workload, model: nn.Module, quietly: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.workload, self.model, self.quietly = workload, model, quietly
        self.optimizer = workload.optimizer(model)
        first = 100 * dist.get_rank()
        self.batches = [workload.batch(first + n) for n in range(4)]
        self.micro_batches = [workload.batch(first + n, workload.rows // MICRO_BATCHES) for n in range(MICRO_BATCHES)]
        self.steps = 0

    def step(self) -> torch.Tensor:
        """One step; this rank's loss."""
        self.steps += 1
        return self._train([self.batches[self.steps % len(self.batches)]])

    def accumulated_step(self) -> torch.Tensor:
        """One step over several micro batches, the gradients of which travel once."""
        return self._train(self.micro_batches)

    def _train(self, batches: list[Batch]) -> torch.Tensor:
        self.optimizer.zero_grad()
        *others, last = batches
        with self.quietly() if others else contextlib.nullcontext():
            for batch in others:
                self._backward(batch, len(batches))
        loss = self._backward(last, len(batches))
        self.optimizer.step()
        return loss

    def _backward(self, batch: Batch, parts: int) -> torch.Tensor:
        loss = self.workload.loss(self.model, batch) / parts
        loss.backward()
        return loss.detach()


def make_ddp(workload: Workload) -> Trainer:
    """torch's own."""
    model = DistributedDataParallel(workload.model(), gradient_as_bucket_view=True)
    return Trainer(workload, model, model.no_sync)


def make_epl(workload: Workload) -> Trainer:
    """epl as a user has it."""
    epl.set_default_strategy(epl.replicate(1))
    trainer = Trainer(workload, model := workload.model(), lambda: epl.no_sync(model))
    epl.parallelize(model, trainer.optimizer)
    return trainer


MAKE = {"ddp": make_ddp, "epl": make_epl}


def make_alone(workload: Workload, groups: list[dist.ProcessGroup], policy: ReducePolicy) -> Trainer:
    """epl's reducer alone, so that several settings fit into one process."""
    model = workload.model()
    reducer = GradientReducer(model, groups[0], policy=policy, communicators=groups[1:])
    return Trainer(workload, model, reducer.no_sync)


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def start() -> None:
    """Join the other ranks."""
    logging.getLogger("epl").setLevel(logging.WARNING)
    epl.init()


def measure_steps(label: str, workload: Workload, size: Size, accumulated: bool) -> dict[str, list[float]]:
    """Seconds of each step."""
    start()
    trainers = {"ddp": make_ddp(workload)}
    if size.noise:
        trainers["ddp again"] = make_ddp(workload)
    trainers["epl"] = make_epl(workload)
    steps = {name: t.accumulated_step if accumulated else t.step for name, t in trainers.items()}
    for _ in range(CHECKED_STEPS):
        check_losses({name: step() for name, step in steps.items()})
    return interleave(steps, size.rounds, label)


def check_losses(losses: dict[str, torch.Tensor]) -> None:
    """Refuse to compare the speed of different computations."""
    means = torch.stack(list(losses.values()))
    dist.all_reduce(means)
    found = dict(zip(losses, (means / RANKS).tolist(), strict=True))
    expected = found["ddp"]
    if any(abs(loss - expected) > TOLERANCE * abs(expected) for loss in found.values()):
        raise RuntimeError(f"the losses differ: {found}; expected the same within {TOLERANCE:g}")


def measure_memory(name: str, workload: Workload) -> int:
    """Bytes at the peak of a few steps, one variant alone in its process."""

    def train() -> None:
        trainer = MAKE[name](workload)
        for _ in range(CHECKED_STEPS):
            trainer.step()

    start()
    return peak_memory(train)


def measure_sweep(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step under each setting."""
    start()
    most = max(count for _, count, _ in SWEEP)
    groups = [dist.new_group() for _ in range(most)]
    trainers = {name: make_alone(workload, groups[:count], policy) for name, count, policy in SWEEP}
    for _ in range(CHECKED_STEPS):
        for trainer in trainers.values():
            trainer.step()
    return interleave({name: trainer.step for name, trainer in trainers.items()}, rounds, "settings")


DEFAULT = "default (fp16 off, 2 communicators, 5 splits)"
SWEEP: list[tuple[str, int, ReducePolicy]] = [
    (DEFAULT, 2, ReducePolicy()),
    ("fp16", 2, ReducePolicy(fp16=True)),
    *((f"num_communicators = {n}", n, ReducePolicy()) for n in (1, 3)),
    *((f"max_splits = {n}", 2, ReducePolicy(max_splits=n)) for n in (1, 2, 10, 20)),
]


# ---- here ------------------------------------------------------------------------------------------------------------


def time_rows(size: Size) -> Iterable[Row]:
    """Steps of every workload, then the accumulated ones of the first; the noise beside each."""
    work = [(name, workload, False) for name, workload in size.workloads.items()]
    work.append(("accumulated", next(iter(size.workloads.values())), True))
    for name, workload, accumulated in work:
        seconds = slowest(run_ranks(measure_steps, RANKS, f"time {name}", workload, size, accumulated))
        yield compare(f"time_{name}", seconds["epl"], seconds["ddp"], milliseconds, TIME_LIMIT)
        if size.noise:
            yield compare(f"noise of time_{name}", seconds["ddp again"], seconds["ddp"], milliseconds)


def memory_rows(size: Size) -> Iterable[Row]:
    """Peak memory of every workload."""
    for name, workload in size.workloads.items():
        peaks: dict[str, list[float]] = {"ddp": [], "epl": []}
        for run in range(size.memory_runs):
            show(f"memory {name}: {run} of {size.memory_runs} runs")
            for variant, seen in peaks.items():
                seen.append(statistics.mean(run_ranks(measure_memory, RANKS, variant, workload)))
        yield compare(f"memory_{name}", peaks["epl"], peaks["ddp"], megabytes, MEMORY_LIMIT)


def sweep_rows(size: Size) -> Iterable[Row]:
    """Each setting against the default one."""
    seconds = slowest(run_ranks(measure_sweep, RANKS, size.workloads["transformer"], size.sweep_rounds))
    return [compare(name, seconds[name], seconds[DEFAULT], milliseconds) for name in seconds if name != DEFAULT]


def compare(
    name: str, ours: list[float], theirs: list[float], show_as: Callable[[float], str], limit: float | None = None
) -> Row:
    made_of = f"{show_as(statistics.median(ours))} / {show_as(statistics.median(theirs))}"
    return Row(name, paired_ratio(ours, theirs), made_of, limit)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.0f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and few: less than a minute")
    quick = parser.parse_args().quick
    size = QUICK if quick else FULL
    where = machine()
    against = [shown(row) for rows in (time_rows(size), memory_rows(size)) for row in rows]
    settings = [shown(row) for row in sweep_rows(size)]
    write(
        "data_parallel.quick" if quick else "data_parallel",
        "Data parallel: epl against DDP",
        [
            f"{where} At the end: {load()}. {RANKS} ranks, one thread each, gloo, float32.",
            "\n".join(f"- {name}: `{workload}`" for name, workload in size.workloads.items())
            + f"\n- accumulated: the transformer, {MICRO_BATCHES} micro batches under `no_sync`",
            "A ratio below 1 is in epl's favour. Rows named *noise* compare DDP with a second copy of itself. Memory is the peak of "
            "a process above what it has with the libraries imported. Settings are measured with the reducer used alone.",
        ],
        [
            Section("epl against DDP", ("bar", "epl / DDP, medians"), against),
            Section("Settings of communication, transformer", ("setting", "setting / default, medians"), settings),
        ],
    )
    return finish([Bar(row.name, row.ratio, row.limit) for row in against if row.limit is not None])


def shown(row: Row) -> Row:
    """The row, printed as soon as it is there."""
    print(f"{row.name:<48} {row.ratio}  {row.made_of}  {load()}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
