"""`epl.record_trace`: when every action of a real pipeline really happened, as one Chrome trace of all ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from epl.cluster.communication import Job
from epl.env import Env
from epl.errors import UsageError
from epl.report.trace import TraceEvent, chrome_trace
from epl.train.pipeline import Pipeline

_HERE = "epl.record_trace"


@dataclass(frozen=True)
class Recording:
    """What one rank has seen."""

    host: str
    met: float
    """When it left the meeting with which the recording began, by its own clock."""
    events: tuple[tuple[str, float, float], ...]
    """Name, start and end (seconds by its own clock) of every action."""


@contextmanager
def record_trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Every `epl.forward_backward` inside is recorded; at the end rank 0 writes one Chrome trace of all ranks to `path`.

        with epl.record_trace("trace.json"):
            epl.forward_backward(my_stage, x, y, module=stage)

    Open it at ui.perfetto.dev: one process per rank, actions named as the schedule names them (`0F2` is the forward of stage 0
    of micro batch 2), with the times of this run. All ranks enter and leave together; rank 0's `path` counts.

    Ranks of one host share a clock. Clocks of several hosts are laid over each other at the meeting of all ranks with which
    the recording begins, so between hosts times may be off by as much as a message travels.
    """
    env = Env.get()
    job = env.job(_HERE)
    pipeline = Pipeline.of(env, _HERE)
    if pipeline.events is not None:
        raise UsageError(f"{_HERE} inside {_HERE}: one recording at a time")
    _first_rank_does(job, lambda: _make_room(Path(path)))
    job.meet(_HERE).wait()
    met = time.perf_counter()
    recorded = pipeline.events = []
    try:
        yield
    finally:
        pipeline.events = None
    if Pipeline.of(Env.get(), _HERE) is not pipeline:
        raise UsageError(
            f"{_HERE}: epl.init or epl.setup_process_groups was called inside, and began another pipeline: record that one"
        )
    told = job.gather(_HERE, Recording(env.cluster.host, met, tuple(recorded)))
    trace = chrome_trace(on_one_clock([each for each in told if isinstance(each, Recording)]))
    _first_rank_does(job, lambda: Path(path).write_text(json.dumps(trace)))


def on_one_clock(recordings: Sequence[Recording]) -> list[TraceEvent]:
    """The events of all ranks by the clock of rank 0's host; `recordings` are in rank order."""
    # Nobody leaves a meeting before everybody has come: the first rank to leave on a host is the nearest to that moment.
    left: dict[str, float] = {}
    for recording in recordings:
        left[recording.host] = min(recording.met, left.get(recording.host, recording.met))
    return [
        TraceEvent(rank, name, start - left[recording.host] + left[recordings[0].host], end - start)
        for rank, recording in enumerate(recordings)
        for name, start, end in recording.events
    ]


def _make_room(path: Path) -> None:
    """Find out before the recording whether the file can be written after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _first_rank_does(job: Job, write: Callable[[], object]) -> None:
    """Let rank 0 write; if it cannot, all ranks raise, and none goes on before it is done."""
    problem = ""
    if job.rank == 0:
        try:
            write()
        except OSError as error:
            problem = str(error)
    if problem := str(job.share(_HERE, problem)):
        raise UsageError(f"{_HERE}: rank 0 cannot write the trace: {problem}")
