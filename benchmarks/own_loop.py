"""The user's own loop over an annotated model, against epl.forward_backward and torch's Schedule1F1B, on ranks of this machine.

The script is the plain one: the whole model on every rank, `loss = cross_entropy(model(x), y); loss.backward()`, with two lines of
annotation and one of `epl.parallelize`. All run on the same weights and batch in the same processes, step by step in turns. A step
is zero_grad, then forward and backward of all micro batches; there is no optimizer. Before any clock runs, all must give the
same loss and gradients. Gradient accumulation (one TaskGraph, several micro batches) is measured against DDP with no_sync.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from lib.compare import added_milliseconds, compare, megabytes, milliseconds, shown
from lib.measure import interleave, peak_memory, return_freed_memory, slowest
from lib.pipelines import STAGES, ForwardBackward, Runner, Stage, Torch, Work, check_same, loss_of, start
from lib.ranks import run_ranks, show
from lib.report import Bar, Row, Section, finish, load, machine, write
from lib.workloads import Transformer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import epl

ENGINE_LIMIT, TORCH_LIMIT, DDP_LIMIT, ADDED_LIMIT = 1.03, 1.05, 1.03, 10.0
WARM_UP = 3  # steps before the clock runs: in the first a model is recorded and placed, and its loss checked
ACCUMULATED = 4  # micro batches of a step without stages
DEPTHS = (12, 32)
TINY = Transformer(layers=2, width=8, heads=1, vocabulary=8, sequence=4, rows=8)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much to do."""

    models: tuple[Transformer, ...]
    small: Transformer
    """Where hardly anything is computed, to see what the loop adds."""
    accumulated: Transformer
    rounds: int
    small_rounds: int
    memory_runs: int
    noise: bool
    """Whether to measure torch twice: what the two differ by is noise."""
    micro_batches: tuple[int, ...] = (4, 8)


FULL = Size(
    models=(
        Transformer(layers=8, width=256, sequence=64, rows=16),
        Transformer(layers=8, width=512, sequence=32, rows=16),
    ),
    small=Transformer(layers=8, width=64, sequence=16, rows=16),
    accumulated=Transformer(layers=6, width=256, sequence=64, rows=16),
    rounds=21,
    small_rounds=101,
    memory_runs=6,
    noise=True,
)
QUICK = Size(
    models=(Transformer(layers=4, width=256, sequence=32, rows=16),),
    small=Transformer(layers=4, width=64, sequence=8, rows=16),
    accumulated=Transformer(layers=2, width=256, sequence=32, rows=16),
    rounds=7,
    small_rounds=15,
    memory_runs=1,
    noise=False,
)


class OwnLoop:
    """The user's script. Only `__init__` knows of epl."""

    def __init__(self, work: Work, *, reads: bool = False, name: str = "stage") -> None:
        """`reads`: the loop looks at the loss before backward, which then runs on the whole batch. `name`: of the TaskGraphs."""
        self.model = model = work.model.model()
        self.batch, self.reads = work.model.batch(0), reads
        with torch.device("meta"):
            self.names = [name for name, _ in own_stage(work).named_parameters()]
        halfway = work.model.layers // work.stages
        epl.annotate(epl.replicate(1, name=f"{name}_0"), model.tokens, *model.layers[:halfway])
        epl.annotate(epl.replicate(1, name=f"{name}_1"), *model.layers[halfway:], model.norm, model.head)
        epl.parallelize(model)

    def step(self) -> torch.Tensor:
        x, y = self.batch
        self.model.zero_grad()
        loss = loss_of(self.model(x), y)
        if self.reads:
            loss.item()
        loss.backward()
        return loss.detach()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's stage."""
        return (self.model.get_parameter(name) for name in self.names)


class Accumulated:
    """One TaskGraph on every rank, and several micro batches: the loop is the same."""

    def __init__(self, shape: Transformer) -> None:
        self.model = shape.model()
        self.batch = shape.batch(dist.get_rank())
        epl.annotate(epl.replicate(1, name="model"), self.model)
        epl.parallelize(self.model)
        self.parameters = self.model.parameters

    def step(self) -> torch.Tensor:
        x, y = self.batch
        self.model.zero_grad()
        loss = loss_of(self.model(x), y)
        loss.backward()
        return loss.detach()


class Ddp:
    """torch's own: a loop over micro batches, all but the last under no_sync."""

    def __init__(self, shape: Transformer) -> None:
        self.model = DistributedDataParallel(shape.model(), gradient_as_bucket_view=True)
        self.pairs = list(zip(*(t.chunk(ACCUMULATED) for t in shape.batch(dist.get_rank())), strict=True))
        self.parameters = self.model.parameters

    def step(self) -> torch.Tensor:
        self.model.zero_grad()
        *others, last = self.pairs
        with self.model.no_sync():
            losses = [self._backward(*pair) for pair in others]
        losses.append(self._backward(*last))
        return torch.stack(losses)

    def _backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model(x), y)
        (loss / ACCUMULATED).backward()
        return loss.detach()


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def measure_steps(work: Work, rounds: int, noise: bool) -> dict[str, list[float]]:
    """Seconds of each step."""
    start(work)
    runners: dict[str, Runner] = {"own loop": OwnLoop(work)}
    runners["forward_backward"] = ForwardBackward(work, own_stage(work))
    for name in ["torch", "torch again"] if noise else ["torch"]:
        runners[name] = Torch(work, own_stage(work))
    for _ in range(WARM_UP):
        check_same(runners, "torch")
    return interleave({name: runner.step for name, runner in runners.items()}, rounds, f"time {work.size}")


def own_stage(work: Work) -> Stage:
    return Stage(work.model, dist.get_rank(), work.stages)


def measure_accumulation(shape: Transformer, rounds: int, noise: bool) -> dict[str, list[float]]:
    """Seconds of each step."""
    logging.getLogger("epl").setLevel(logging.WARNING)
    epl.init(epl.Config({"pipeline.num_micro_batch": ACCUMULATED}))
    runners: dict[str, Runner] = {"own loop": Accumulated(shape), "ddp": Ddp(shape)}
    if noise:
        runners["ddp again"] = Ddp(shape)
    for _ in range(WARM_UP):
        check_same(runners, "ddp")
    return interleave({name: runner.step for name, runner in runners.items()}, rounds, "time accumulated")


def measure_recording(shape: Transformer) -> tuple[float, float, float]:
    """Seconds of the first call of a model, which records and places it; of one with another length, which records; and of the
    very first call of a process, of a tiny model, in which torch loads what it needs for it."""
    work = Work(shape, 4)
    start(work)
    tiny = first_call(OwnLoop(dataclasses.replace(work, model=TINY), name="tiny"), TINY.sequence)
    loop = OwnLoop(work)
    return first_call(loop, shape.sequence), first_call(loop, shape.sequence // 2), tiny


def first_call(loop: OwnLoop, length: int) -> float:
    """Seconds of a call with sequences of this length; a training step follows."""
    x, y = (t[:, :length] for t in loop.batch)
    dist.barrier()
    began = time.perf_counter()
    logits = loop.model(x)
    seconds = time.perf_counter() - began
    loss_of(logits, y).backward()
    return seconds


def measure_memory(work: Work, name: str) -> int:
    """Bytes at the peak of a few steps of this rank's stage, one variant alone in its process.

    What it sets up when it is first used at all is the library's (the first recording loads much of torch): a tiny model comes first.
    """

    def train(work: Work, title: str) -> None:
        reads = name == "whole batch"
        runner = Torch(work, own_stage(work)) if name == "torch" else OwnLoop(work, reads=reads, name=title)
        for _ in range(WARM_UP):
            runner.step()

    start(work)
    return_freed_memory()
    train(dataclasses.replace(work, model=TINY), "tiny")
    return peak_memory(lambda: train(work, "stage"))


# ---- here ------------------------------------------------------------------------------------------------------------


def time_rows(size: Size) -> Iterable[Row]:
    """Steps of every model and number of micro batches."""
    for work in works(size):
        seconds = slowest(run_ranks(measure_steps, STAGES, work, size.rounds, size.noise))
        ours = seconds["own loop"]
        yield compare(
            f"time_{work.size}_forward_backward", ours, seconds["forward_backward"], milliseconds, ENGINE_LIMIT
        )
        yield compare(f"time_{work.size}_torch", ours, seconds["torch"], milliseconds, TORCH_LIMIT)
        if size.noise:
            yield compare(f"{work.size}: noise", seconds["torch again"], seconds["torch"], milliseconds)


def accumulation_rows(size: Size) -> Iterable[Row]:
    """Gradient accumulation on data-parallel ranks."""
    found = run_ranks(measure_accumulation, STAGES, size.accumulated, size.rounds, size.noise)
    seconds = slowest(found)
    yield compare(f"time_accumulated_x{ACCUMULATED}", seconds["own loop"], seconds["ddp"], milliseconds, DDP_LIMIT)
    if size.noise:
        yield compare("accumulated: noise", seconds["ddp again"], seconds["ddp"], milliseconds)


def small_rows(size: Size) -> Iterable[Row]:
    """What the loop adds where hardly anything is computed."""
    for number in size.micro_batches:
        work = Work(size.small, number)
        seconds = slowest(run_ranks(measure_steps, STAGES, work, size.small_rounds, False))
        limit = ADDED_LIMIT if number == max(size.micro_batches) else None
        yield added_milliseconds(f"added_ms_{work.size}", seconds["own loop"], seconds["forward_backward"], limit)


def recording_rows(size: Size) -> Iterable[Row]:
    """How long it takes to write a model down."""
    found: dict[int, list[tuple[float, ...]]] = {layers: [] for layers in DEPTHS}
    for run in range(size.memory_runs):
        show(f"recording: {run} of {size.memory_runs} runs")
        for layers, seen in found.items():
            shape = dataclasses.replace(size.small, layers=layers, width=256)
            seen.append(tuple(map(max, zip(*run_ranks(measure_recording, STAGES, shape), strict=True))))
    whats = ("first call: recorded and placed", "another length: recorded", "tiny model before them: torch loads")
    for index, what in enumerate(whats):
        few, many = ([run[index] for run in found[layers]] for layers in DEPTHS)
        yield compare(f"{what}, {DEPTHS[1]} / {DEPTHS[0]} layers", many, few, milliseconds)


def memory_rows(size: Size) -> Iterable[Row]:
    """Peak memory of every stage: in a schedule beside Schedule1F1B, on the whole batch beside ScheduleGPipe."""
    for work in works(size):
        peers = {"scheduled": work, "whole batch": dataclasses.replace(work, schedule="PreferForward")}
        peaks: dict[tuple[str, str], list[Sequence[float]]] = {}
        for run in range(size.memory_runs):
            show(f"memory {work.size}: {run} of {size.memory_runs} runs")
            for mode, peer in peers.items():
                peaks.setdefault((mode, "ours"), []).append(run_ranks(measure_memory, STAGES, work, mode))
                peaks.setdefault((mode, "torch"), []).append(run_ranks(measure_memory, STAGES, peer, "torch"))
        for mode in peers:
            for stage in range(STAGES):
                ours, theirs = ([run[stage] for run in peaks[mode, whose]] for whose in ("ours", "torch"))
                yield compare(f"{work.size}, {mode}, stage {stage}", ours, theirs, megabytes)


def works(size: Size) -> Iterable[Work]:
    for model in size.models:
        for number in size.micro_batches:
            yield Work(model, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and few: less than a minute")
    quick = parser.parse_args().quick
    size = QUICK if quick else FULL
    where = machine()
    timed, accumulated, small, recording, memory = (
        [shown(row) for row in rows(size)]
        for rows in (time_rows, accumulation_rows, small_rows, recording_rows, memory_rows)
    )
    sections = [
        Section("Step time", ("bar", "own loop / the peer of that name, medians"), timed),
        Section("Gradient accumulation", ("bar", "own loop / DDP with no_sync, medians"), accumulated),
        Section("Hidden 64: hardly any work", ("bar, in ms", "own loop / forward_backward, medians"), small),
        Section("Recording", ("what", "seconds of the slower rank, medians"), recording),
        Section("Peak memory of a stage", ("stage", "own loop / torch, medians"), memory),
    ]
    write(
        "own_loop.quick" if quick else "own_loop",
        "The user's own loop under a pipeline",
        [
            f"{where} At the end: {load()}. {STAGES} ranks, one thread each, gloo, float32.",
            "\n".join(f"- h{model.width}: `{model}`" for model in (*size.models, size.small))
            + f"\n- accumulated: `{size.accumulated}` on each of {STAGES} replicas, {ACCUMULATED} micro batches",
            "The own loop computes on an annotated model that was built whole; its peers are given stages. m is the number of micro "
            "batches. A ratio below 1 is in the own loop's favour. Rows named *noise* compare a peer with a second copy of itself. The "
            "own loop and forward_backward tell the loss to all ranks, torch does not. Memory is the peak of a process above what "
            "it has with the libraries imported, with glibc set to give freed blocks back at once; *whole batch*: the loop reads "
            "`loss.item()` before backward, so that all forwards run first, as in ScheduleGPipe, which stands beside it.",
        ],
        sections,
    )
    rows = [*timed, *accumulated, *small]
    return finish([Bar(row.name, row.ratio, row.limit) for row in rows if row.limit is not None])


if __name__ == "__main__":
    sys.exit(main())
