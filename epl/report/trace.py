"""What happened when, as a Chrome trace: open it at ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from epl.errors import PlanError
from epl.plan.schedule import Action, Simulation

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


class TraceEvent(NamedTuple):
    """Something that took time on a rank; a pipeline's actions are named as in the schedule's text (`2F3`, `2SF3>3`)."""

    rank: int
    name: str
    start: float
    """Seconds, from any common beginning."""
    duration: float
    """Seconds."""
    args: Mapping[str, str | int | float | bool] = {}
    """What the viewer shows beside it."""


def chrome_trace(events: Iterable[TraceEvent]) -> dict[str, Json]:
    """The trace as a JSON object: a process for every rank, in it a thread for computations, one for messages, one for
    reductions and one for the rest. Times count from the first event."""
    ordered = sorted(events, key=lambda event: (event.rank, event.start, -event.duration, event.name))
    beginning = min((event.start for event in ordered), default=0.0)
    lanes = _Lanes()
    written: list[Json] = []
    for event in ordered:
        action = _action(event.name)
        track = _track(action)
        thread = lanes.thread(event, track)
        args: dict[str, Json] = {}
        if action is not None:
            numbers = {"stage": action.stage, "micro_batch": action.micro_batch, "peer": action.peer}
            args |= {key: value for key, value in numbers.items() if value is not None}
        args |= event.args
        written.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": track,
                "pid": event.rank,
                "tid": thread,
                "ts": (event.start - beginning) * 1e6,
                "dur": event.duration * 1e6,
                "args": args,
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": [*lanes.names(), *written]}


def simulated_events(simulation: Simulation) -> list[TraceEvent]:
    """A simulated schedule as events, to be laid beside those of a real run."""
    return [
        TraceEvent(device, str(timed.action), timed.start, timed.end - timed.start)
        for device, actions in enumerate(simulation.devices)
        for timed in actions
    ]


_TRACKS = ("compute", "messages", "reduction", "other")


def _action(name: str) -> Action | None:
    try:
        return Action.parse(name)
    except PlanError:
        return None


def _track(action: Action | None) -> str:
    if action is None:
        return "other"
    if action.is_compute:
        return "compute"
    return "messages" if action.is_message else "reduction"


class _Lanes:
    """A thread for every track of a rank, and more of them where its events overlap: viewers can only nest within one."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, str], list[float]] = defaultdict(list)

    def thread(self, event: TraceEvent, track: str) -> int:
        """The number of a thread of this track that is free when the event starts; events come by start."""
        ends = self._ends[event.rank, track]
        lane = next((lane for lane, end in enumerate(ends) if end <= event.start), len(ends))
        ends[lane : lane + 1] = [event.start + event.duration]
        return self._number(track, lane)

    def names(self) -> list[Json]:
        """What the viewer calls ranks and threads."""
        ranks = sorted({rank for rank, _ in self._ends})
        names = [_name("process_name", rank, 0, f"rank {rank}") for rank in ranks]
        for (rank, track), ends in sorted(self._ends.items()):
            for lane in range(len(ends)):
                text = track if lane == 0 else f"{track} {lane + 1}"
                names.append(_name("thread_name", rank, self._number(track, lane), text))
        return names

    def _number(self, track: str, lane: int) -> int:
        return lane * len(_TRACKS) + _TRACKS.index(track)


def _name(what: str, rank: int, thread: int, text: str) -> Json:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": text}}
