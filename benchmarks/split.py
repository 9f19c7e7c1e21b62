"""Split parts of a model, on 2 ranks of this machine: transformer blocks, a head over 100,000 classes, experts.

Blocks are measured against torch's parallelize_module (DTensor) and against Megatron's f and g written by hand; the head and the
experts, which stand beside a replicated rest of the model, against data parallelism. All run on the same weights and data in the
same processes, step by step in turns. A step of blocks is zero_grad, forward, loss and backward, all others also update the
weights. Before any clock runs, all must give the same losses while they train.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from lib.blocks import Blocks
from lib.compare import compare, compare_counts, megabytes, milliseconds, shown
from lib.measure import bytes_sent, interleave, limit_memory, peak_memory, return_freed_memory, slowest
from lib.parts import Faces, Mixture
from lib.ranks import RankFailed, run_ranks, show
from lib.report import Row, Section, bars_of, finish, load, machine, quick_wanted, write
from lib.training import RANKS, Case, check_losses

import epl

DTENSOR_LIMITS = {256: 0.85, 512: 0.95, 1024: 1.03}  # of blocks, by their width
HAND_LIMIT, HEAD_LIMIT = 1.08, 0.88
PART_LIMIT = 1 / RANKS + 0.02
NOISE = "noise"  # the first peer once more
TOLERANCE = 1e-4  # of losses, relative
CHECKED_STEPS = 4  # also the warm-up: in the first a model is cut, after it DDP rearranges its buckets


@dataclasses.dataclass(frozen=True)
class Size:
    """How much to do."""

    blocks: tuple[Blocks, ...]
    head: Faces
    experts: Mixture
    rounds: int
    memory_runs: int
    noise: bool
    """Whether to measure a peer twice: what the two differ by is noise."""

    @property
    def cases(self) -> tuple[Case, ...]:
        return *self.blocks, self.head, self.experts


FULL = Size(
    blocks=(Blocks(layers=4, width=256), Blocks(layers=2, width=512), Blocks(layers=1, width=1024)),
    head=Faces(),
    experts=Mixture(),
    rounds=41,
    memory_runs=6,
    noise=True,
)
QUICK = Size(
    blocks=(Blocks(layers=2, width=256),),
    head=Faces(width=128, rows=16),
    experts=Mixture(layers=1, width=128),
    rounds=7,
    memory_runs=1,
    noise=False,
)


@dataclasses.dataclass(frozen=True)
class Found:
    """What one rank saw of a case."""

    seconds: Mapping[str, Sequence[float]]
    """Of each step, by the way it was run."""
    sent: Mapping[str, float]
    """Bytes of a step."""
    held: float
    """Bytes for the split parts under epl: parameters, gradients, the optimizer's state."""
    whole: float
    """The same on one device."""


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def start(case: Case) -> None:
    """Join the other ranks."""
    logging.getLogger("epl").setLevel(logging.WARNING)
    epl.init(epl.Config(dict(case.settings)))


def measure(case: Case, rounds: int, noise: bool) -> Found:
    """Run a case in all its ways."""
    start(case)
    ways = case.ways()
    if noise:
        _, peer, *_ = ways
        ways[NOISE] = ways[peer]
    trainers = {name: make() for name, make in ways.items()}
    for _ in range(CHECKED_STEPS):
        check_losses({name: trainer.step() for name, trainer in trainers.items()}, TOLERANCE)
    whole = case.whole()
    whole.step()
    held = trainers["epl"].held(), whole.held()
    del whole
    steps = {name: functools.partial(case.timed, trainer) for name, trainer in trainers.items()}
    sent = {name: bytes_sent(step) for name, step in steps.items()}
    return Found(interleave(steps, rounds, f"time {case.name}"), sent, *held)


def measure_memory(case: Case, name: str) -> int:
    """Bytes at the peak of a few steps, one way alone in its process.

    What a library sets up when it is first used is not the model's: a tiny one comes first.
    """
    start(case)
    return_freed_memory()
    train(case.tiny, name)
    return peak_memory(lambda: train(case, name))


def train_within(case: Case, name: str, room: int) -> str:
    """What comes of a few steps with so many bytes: nothing, or the error."""
    start(case)
    return_freed_memory()
    train(case.tiny, name)
    dist.barrier()
    limit_memory(room)
    try:
        train(case, name)
    except (MemoryError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return ""


def train(case: Case, name: str) -> None:
    trainer = case.ways()[name]()
    for _ in range(CHECKED_STEPS):
        trainer.step()


# ---- here ------------------------------------------------------------------------------------------------------------


def time_rows(case: Case, found: Sequence[Found], limits: Mapping[str, float]) -> Iterable[Row]:
    """Steps of epl against those of all others; where there is a limit, it is a bar."""
    seconds = slowest([rank.seconds for rank in found])
    _, first, *_ = peers = list(seconds)
    for peer in peers[1:]:
        if peer == NOISE:
            yield compare(f"{case.name}: {NOISE}", seconds[NOISE], seconds[first], milliseconds)
        else:
            limit = limits.get(peer)
            name = f"{case.name}: {peer}" if limit is None else f"time_{case.name}_{peer.replace(' ', '_')}"
            yield compare(name, seconds["epl"], seconds[peer], milliseconds, limit)


def sent_rows(case: Case, found: Sequence[Found]) -> Iterable[Row]:
    """Bytes that a rank sends in a step."""
    for peer in found[0].sent:
        ours, theirs = ([rank.sent[name] for rank in found] for name in ("epl", peer))
        if peer not in ("epl", NOISE) and all(theirs):
            yield compare_counts(f"{case.name}: {peer}", ours, theirs, megabytes)


def part_row(case: Case, found: Sequence[Found]) -> Row:
    """What a rank holds for the split parts."""
    held, whole = [rank.held for rank in found], [rank.whole for rank in found]
    return compare_counts(f"memory_of_part_{case.name}", held, whole, megabytes, PART_LIMIT)


def limits_of(case: Case) -> dict[str, float]:
    """How long epl may take for a step, by peer."""
    if isinstance(case, Blocks):
        return {"by hand": HAND_LIMIT, "DTensor": DTENSOR_LIMITS[case.width]}
    return {"DDP": HEAD_LIMIT} if isinstance(case, Faces) else {}


def measure_peaks(case: Case, names: Iterable[str], runs: int) -> dict[str, list[float]]:
    """Peak memory of a rank, by the way it was run; the ways alternate."""
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for run in range(runs):
        show(f"memory {case.name}: {run} of {runs} runs")
        for name, seen in peaks.items():
            seen.append(statistics.mean(run_ranks(measure_memory, RANKS, case, name)))
    return peaks


def peak_rows(case: Case, peaks: Mapping[str, Sequence[float]]) -> Iterable[Row]:
    """Peak memory of epl against that of all others."""
    for peer in peaks:
        if peer != "epl":
            yield compare(f"{case.name}: {peer}", peaks["epl"], peaks[peer], megabytes)


def where_it_fits(case: Case, peaks: Mapping[str, Sequence[float]]) -> str:
    """Who trains, with less memory than data parallelism needs."""
    room = int(statistics.mean(statistics.median(peaks[name]) for name in ("epl", "DDP")))
    said = {}
    for name in ("epl", "DDP"):
        try:
            errors = run_ranks(train_within, RANKS, case, name, room)
        except RankFailed as failure:
            errors = [str(failure)]
        said[name] = next((f"does not: {error}" for error in errors if error), "trains")
    return f"With {megabytes(room)} for each rank, {case.name} under epl {said['epl']}; under DDP it {said['DDP']}"


def main() -> int:
    quick = quick_wanted(__doc__)
    size = QUICK if quick else FULL
    where = machine()
    times: dict[Case, list[Row]] = {}
    sent: list[Row] = []
    parts: list[Row] = []
    for case in size.cases:
        found = run_ranks(measure, RANKS, case, size.rounds, size.noise)
        times[case] = [shown(row) for row in time_rows(case, found, limits_of(case))]
        sent += [shown(row) for row in sent_rows(case, found)]
        parts.append(shown(part_row(case, found)))
    peaks = {
        size.head: measure_peaks(size.head, ("epl", "DDP", "DTensor"), size.memory_runs),
        size.experts: measure_peaks(size.experts, ("epl", "DDP"), size.memory_runs),
    }
    memory = [shown(row) for case, seen in peaks.items() for row in peak_rows(case, seen)]
    fits = where_it_fits(size.head, peaks[size.head])
    print(fits, flush=True)
    blocks = [row for case in size.blocks for row in times[case]]
    sections = [
        Section("Transformer blocks: step time", ("bar", "epl / the peer of that name, medians"), blocks),
        Section("Many classes: step time", ("bar", "epl / the peer of that name, medians"), times[size.head]),
        Section("Experts: step time", ("peer", "epl / the peer of that name, medians"), times[size.experts]),
        Section("Memory of the split part", ("bar", "a rank under epl / one device, counted"), parts),
        Section("Peak memory", ("peer", "epl / the peer of that name, medians"), memory),
        Section("Bytes sent by a rank in a step", ("peer", "epl / the peer of that name, counted"), sent),
    ]
    write(
        "split.quick" if quick else "split",
        "Split: epl against DTensor, by hand and data parallelism",
        [
            f"{where} At the end: {load()}. {RANKS} ranks, one thread each, gloo, float32.",
            "\n".join(f"- {case.name}: `{case}`" for case in size.cases),
            "A ratio below 1 is in epl's favour. Rows named *noise* compare a peer with a second copy of itself. *DTensor* makes the input "
            "of q, k and v distributed once, so that their gradients travel together; *apart* has every layer by itself, and they "
            "travel one by one. *by hand* is Megatron's f and g. *DDP* and *epl DP* have the whole model on every rank; "
            "*one rank* has all rows on one, which sends nothing. In the head's row, *DTensor* has the backbone under DDP and the head "
            "under loss_parallel. Memory of the split part is parameters, gradients and the optimizer's state. Peak memory is that of "
            "a process above what it has with the libraries imported and used, with glibc set to give freed blocks back at once.",
            fits,
        ],
        sections,
    )
    return finish(bars_of(sections))


if __name__ == "__main__":
    sys.exit(main())
