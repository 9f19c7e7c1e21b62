"""Pipelines of epl against torch.distributed.pipelining and against a hand-written one, on ranks of this machine.

All run the same stages on the same batch in the same processes, step by step in turns. A step is zero_grad, then forward and
backward of all micro batches; there is no optimizer. Before any clock runs, all must give the same losses and gradients.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from lib.compare import compare, megabytes, milliseconds, shown
from lib.measure import interleave, peak_memory, return_freed_memory, slowest
from lib.pipelines import PEERS, STAGES, ForwardBackward, Runner, Stage, Torch, Work, check_same, loss_of, start
from lib.ranks import run_ranks, show
from lib.report import Bar, Row, Section, finish, machine, write
from lib.workloads import Transformer
from torch import nn

TIME_LIMIT, MEMORY_LIMIT = 1.03, 1.02
WARM_UP = 2  # steps before the clock runs
SPEED_UP = "speed-up "


@dataclasses.dataclass(frozen=True)
class Size:
    """How much to do."""

    models: tuple[Transformer, ...]
    small: Transformer
    """Where hardly anything is computed, to see what an action costs."""
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
    rounds=21,
    small_rounds=101,
    memory_runs=6,
    noise=True,
)
QUICK = Size(
    models=(Transformer(layers=4, width=256, sequence=32, rows=16),),
    small=Transformer(layers=4, width=64, sequence=8, rows=16),
    rounds=7,
    small_rounds=15,
    memory_runs=1,
    noise=False,
)


class ByHand:
    """As one would write it for this model alone: shapes known, one receive ahead, sends waited for at the end."""

    def __init__(self, work: Work, stage: nn.Module) -> None:
        self.stage, self.number, self.last = stage, work.micro_batches, work.stages - 1
        self.parameters = stage.parameters
        tokens, targets = work.model.batch(0)
        self.tokens, self.targets = tokens.chunk(self.number), targets.chunk(self.number)
        self.shape = (work.model.rows // self.number, work.model.sequence, work.model.width)
        self.rank, self.group = dist.get_rank(), dist.new_group()
        self.ahead = self.number if work.schedule == "PreferForward" else min(self.last - self.rank, self.number - 1)

    def step(self) -> torch.Tensor | None:
        self.stage.zero_grad()
        self.inputs, self.outputs, self.losses, self.sends = {}, {}, [], []
        self.coming, self.returning = self._receive(self.rank - 1), None
        for number in range(self.number):
            self._forward(number)
            if number >= self.ahead:
                self._backward(number - self.ahead)
        for number in range(max(self.number - self.ahead, 0), self.number):
            self._backward(number)
        for work, _ in self.sends:
            work.wait()
        return torch.stack(self.losses) if self.losses else None

    def _forward(self, number: int) -> None:
        x = self.tokens[number]
        if self.coming is not None:
            work, x = self.coming
            work.wait()
            self.coming = self._receive(self.rank - 1) if number + 1 < self.number else None
            self.inputs[number] = x.requires_grad_()
        output = self.stage(x)
        if self.rank == self.last:
            loss = loss_of(output, self.targets[number])
            self.losses.append(loss.detach())
            self.outputs[number] = loss / self.number
        else:
            self._send(output.detach(), self.rank + 1)
            self.outputs[number] = output
            if self.returning is None:
                self.returning = self._receive(self.rank + 1)

    def _backward(self, number: int) -> None:
        gradient = None
        if self.returning is not None:
            work, gradient = self.returning
            work.wait()
            self.returning = self._receive(self.rank + 1) if number + 1 < self.number else None
        self.outputs.pop(number).backward(gradient)
        if self.rank > 0:
            self._send(self.inputs.pop(number).grad, self.rank - 1)

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        self.sends.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))

    def _receive(self, peer: int) -> tuple[dist.Work, torch.Tensor] | None:
        if not 0 <= peer <= self.last:
            return None
        buffer = torch.empty(self.shape)
        return dist.irecv(buffer, group=self.group, group_src=peer), buffer


class OneRank:
    """The whole model on rank 0 alone, over the same micro batches."""

    def __init__(self, work: Work) -> None:
        self.stage = nn.Sequential(*(Stage(work.model, n, work.stages) for n in range(work.stages)))
        tokens, targets = work.model.batch(0)
        self.pairs = list(zip(tokens.chunk(work.micro_batches), targets.chunk(work.micro_batches), strict=True))

    def step(self) -> torch.Tensor | None:
        if dist.get_rank() > 0:
            return None
        self.stage.zero_grad()
        losses = []
        for tokens, targets in self.pairs:
            loss = loss_of(self.stage(tokens), targets)
            (loss / len(self.pairs)).backward()
            losses.append(loss.detach())
        return torch.stack(losses)


MAKE: dict[str, Callable[[Work, nn.Module], Runner]] = {"epl": ForwardBackward, "torch": Torch, "by hand": ByHand}


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def measure_steps(work: Work, rounds: int, noise: bool) -> dict[str, list[float]]:
    """Seconds of each step."""
    start(work)
    stage = Stage(work.model, dist.get_rank(), work.stages)
    runners: dict[str, Runner] = {name: make(work, copy.deepcopy(stage)) for name, make in MAKE.items()}
    if noise:
        runners["torch again"] = Torch(work, copy.deepcopy(stage))
    for _ in range(WARM_UP):
        check_same(runners, "by hand")
    runners["one rank"] = OneRank(work)
    runners["one rank"].step()
    return interleave({name: runner.step for name, runner in runners.items()}, rounds, f"time {work.name}")


def measure_memory(work: Work, name: str) -> int:
    """Bytes at the peak of a few steps of this rank's stage, one variant alone in its process."""

    def train() -> None:
        runner = MAKE[name](work, Stage(work.model, dist.get_rank(), work.stages))
        for _ in range(1 + WARM_UP):
            runner.step()

    start(work)
    return_freed_memory()
    return peak_memory(train)


# ---- here ------------------------------------------------------------------------------------------------------------


def time_rows(size: Size) -> Iterable[Row]:
    """Steps of every schedule, model and number of micro batches, with the speed-ups over one rank."""
    for work in works(size):
        seconds = slowest(run_ranks(measure_steps, STAGES, work, size.rounds, size.noise))
        ours, theirs, better = seconds["epl"], seconds["torch"], "torch"
        if work.schedule == "PreferBackward":
            better = min(("torch", "by hand"), key=lambda name: statistics.median(seconds[name]))
        yield compare(f"time_{work.name}", ours, seconds[better], milliseconds, TIME_LIMIT, f"epl / {better}")
        yield compare(f"{work.name}: by hand / torch", seconds["by hand"], theirs, milliseconds)
        if size.noise:
            yield compare(f"{work.name}: noise", seconds["torch again"], theirs, milliseconds)
        yield compare(
            f"{SPEED_UP}{work.name}", seconds["one rank"], ours, milliseconds, note=f"bound {bound(work):.2f}"
        )


def bound(work: Work) -> float:
    """The speed-up that the bubble leaves, if stages were even and messages took no time."""
    return work.micro_batches / (work.micro_batches + work.stages - 1) * work.stages


def memory_rows(size: Size) -> Iterable[Row]:
    """Peak memory of every stage."""
    for work in works(size):
        peaks: dict[str, list[Sequence[float]]] = {"epl": [], "torch": []}
        for run in range(size.memory_runs):
            show(f"memory {work.name}: {run} of {size.memory_runs} runs")
            for name, seen in peaks.items():
                seen.append(run_ranks(measure_memory, STAGES, work, name))
        for stage in range(STAGES):
            ours, theirs = ([run[stage] for run in runs] for runs in peaks.values())
            yield compare(f"memory_{work.name}_stage{stage}", ours, theirs, megabytes, MEMORY_LIMIT)


def small_rows(size: Size) -> Iterable[Row]:
    """What the runtime itself takes, where hardly anything is computed."""
    for number in size.micro_batches:
        work = Work(size.small, number)
        seconds = slowest(run_ranks(measure_steps, STAGES, work, size.small_rounds, False))
        actions = 4 * number  # of each rank: forward, backward, a send and a receive of every micro batch
        added = statistics.median(a - b for a, b in zip(seconds["epl"], seconds["by hand"], strict=True)) / actions
        note = f"{added * 1e3:+.3f} ms for each of {actions} actions"
        yield compare(f"{work.name}: epl / by hand", seconds["epl"], seconds["by hand"], milliseconds, note=note)
        yield compare(f"{work.name}: torch / by hand", seconds["torch"], seconds["by hand"], milliseconds)


def deep_rows(size: Size) -> Iterable[Row]:
    """Four ranks, on however many cores there are."""
    work = Work(size.models[0], max(size.micro_batches), stages=4)
    seconds = slowest(run_ranks(measure_steps, work.stages, work, size.rounds, False))
    for peer in ("torch", "by hand"):
        yield compare(f"{work.name}, 4 stages: epl / {peer}", seconds["epl"], seconds[peer], milliseconds)


def works(size: Size) -> Iterable[Work]:
    """Everything that has bars."""
    for schedule, model, number in itertools.product(PEERS, size.models, size.micro_batches):
        yield Work(model, number, schedule)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and few: less than a minute")
    quick = parser.parse_args().quick
    size = QUICK if quick else FULL
    where = machine()
    timed = [shown(row) for row in time_rows(size)]
    speed_up = [row for row in timed if row.name.startswith(SPEED_UP)]
    time = [row for row in timed if row not in speed_up]
    memory, small, deep = ([shown(row) for row in rows(size)] for rows in (memory_rows, small_rows, deep_rows))
    sections = [
        Section("Step time", ("bar", "what is compared, medians"), time),
        Section("Peak memory of a stage, epl against torch", ("bar", "epl / torch, medians"), memory),
        Section(
            f"Speed-up of {STAGES} stages over one rank",
            ("pipeline", "one rank / epl, medians; the bubble's bound"),
            speed_up,
        ),
        Section("Hidden 64: hardly any work", ("what", "medians"), small),
        Section("4 ranks", ("what", "medians"), deep),
    ]
    write(
        "pipeline.quick" if quick else "pipeline",
        "Pipeline: epl against torch.distributed.pipelining and by hand",
        [
            f"{where} {STAGES} ranks, one thread each, gloo, float32.",
            "\n".join(f"- h{model.width}: `{model}`" for model in (*size.models, size.small)),
            "1f1b: epl's PreferBackward, the better (by median) of Schedule1F1B and of one written by hand for this model; gpipe: "
            "epl's PreferForward, ScheduleGPipe. m is the number of micro batches. A ratio below 1 is in epl's favour, but for "
            "speed-ups. Rows named *noise* compare torch with a second copy of itself. Only epl tells the losses to all ranks. Memory "
            "is the peak of a process above what it has with the libraries imported, with glibc set to give freed blocks back at once.",
        ],
        sections,
    )
    return finish([Bar(row.name, row.ratio, row.limit) for row in [*time, *memory] if row.limit is not None])


if __name__ == "__main__":
    sys.exit(main())
