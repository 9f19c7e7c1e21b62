"""Chrome traces."""

from __future__ import annotations

import json
from typing import Any

from epl.plan.schedule import prefer_backward, simulate
from epl.report.trace import TraceEvent, chrome_trace, simulated_events


def parts(events: list[TraceEvent]) -> tuple[list[Any], dict[tuple[int, int], str]]:
    """The events and the names of the threads, after a way through JSON."""
    trace = json.loads(json.dumps(chrome_trace(events)))["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    return [event for event in trace if event["ph"] == "X"], threads


def test_an_action_keeps_its_name_and_is_taken_apart() -> None:
    events, threads = parts([TraceEvent(1, "1SF3>2", 10.5, 0.25, {"bytes": 4096}), TraceEvent(0, "0F0", 10.0, 1.0)])
    assert events == [
        {
            "ph": "X",
            "name": "0F0",
            "cat": "compute",
            "pid": 0,
            "tid": 0,
            "ts": 0.0,
            "dur": 1e6,
            "args": {"stage": 0, "micro_batch": 0},
        },
        {
            "ph": "X",
            "name": "1SF3>2",
            "cat": "messages",
            "pid": 1,
            "tid": 1,
            "ts": 0.5e6,
            "dur": 0.25e6,
            "args": {"stage": 1, "micro_batch": 3, "peer": 2, "bytes": 4096},
        },
    ]
    assert threads == {(0, 0): "compute", (1, 1): "messages"}


def test_ranks_are_processes() -> None:
    trace: Any = chrome_trace([TraceEvent(3, "0F0", 0.0, 1.0), TraceEvent(1, "optimizer", 0.0, 1.0)])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "rank 1", 3: "rank 3"}


def test_reductions_and_other_work_have_threads_of_their_own() -> None:
    events, threads = parts([TraceEvent(0, name, 0.0, 1.0) for name in ("0F0", "0R", "optimizer", "0RB1<1")])
    assert {event["name"]: threads[0, event["tid"]] for event in events} == {
        "0F0": "compute",
        "0R": "reduction",
        "optimizer": "other",
        "0RB1<1": "messages",
    }


def test_events_that_overlap_get_more_threads() -> None:
    """A viewer nests what overlaps in one thread, and draws it wrong when it does not nest."""
    times = [("1RF0<0", 0.0, 2.0), ("1RF1<0", 1.0, 2.0), ("1RF2<0", 2.0, 2.0), ("1RF3<0", 2.5, 1.0)]
    events, threads = parts([TraceEvent(1, *each) for each in times])
    assert [threads[1, event["tid"]] for event in events] == ["messages", "messages 2", "messages", "messages 3"]


def test_a_simulated_schedule_has_the_names_of_its_actions() -> None:
    simulation = simulate(prefer_backward(3, 4).with_communication().with_reduce(), link=0.5)
    events, threads = parts(simulated_events(simulation))
    assert sorted(event["name"] for event in events) == sorted(map(str, simulation.schedule))
    assert max(event["ts"] + event["dur"] for event in events) == simulation.makespan * 1e6
    assert set(threads.values()) == {"compute", "messages", "reduction"}


def test_nothing_is_a_trace_too() -> None:
    assert chrome_trace([]) == {"displayTimeUnit": "ms", "traceEvents": []}
