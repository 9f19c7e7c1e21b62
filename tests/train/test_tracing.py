"""epl.record_trace: what a real run writes has the names of the schedule and times that can be."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import epl
from epl.errors import UsageError
from epl.plan.schedule import Action, make_schedule
from epl.train.tracing import Recording, on_one_clock
from tests.harness import rank_errors, run_ranks

STEPS, MICRO_BATCHES = 2, 3


def _start(schedule: str = "PreferBackward", chunks: int = 1) -> tuple[list[nn.Module], torch.Tensor]:
    settings = {"pipeline.num_micro_batch": MICRO_BATCHES, "pipeline.strategy": schedule}
    epl.init(epl.Config(settings | {"pipeline.num_chunks": chunks, "communication.timeout": 40}))
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(chunks)], torch.randn(6, 4)


def _step(stages: list[nn.Module], x: torch.Tensor) -> None:
    cluster = epl.Env.get().cluster
    last = cluster.rank == cluster.world_size - 1

    def run(received: object, rows: torch.Tensor, index: int) -> torch.Tensor:
        y = stages[index](rows if received is None else received)
        return y.square().mean() if last and index == len(stages) - 1 else y

    functions = [lambda received, rows, index=index: run(received, rows, index) for index in range(len(stages))]
    epl.forward_backward(functions if len(stages) > 1 else functions[0], x, module=stages)


def _record(schedule: str, chunks: int, path: str) -> str | None:
    stages, x = _start(schedule, chunks)
    _step(stages, x)
    with epl.record_trace(path):
        for _ in range(STEPS):
            _step(stages, x)
    text = Path(path).read_text() if epl.Env.get().cluster.rank == 0 else None
    _step(stages, x)  # not recorded any more
    return text


@pytest.mark.parametrize(
    ("schedule", "chunks", "ranks"),
    [("PreferBackward", 1, 2), ("ZeroBubble", 1, 2), ("Interleaved", 2, 2), ("PreferForward", 1, 1)],
)
def test_a_real_run_is_written_down_as_the_schedule_has_it(
    schedule: str, chunks: int, ranks: int, tmp_path: Path
) -> None:
    path = tmp_path / "traces" / "trace.json"
    text = run_ranks(_record, ranks, schedule, chunks, str(path))[0]
    assert text == path.read_text(), "it is complete when the recording ends, and stays as it is"
    trace = json.loads(text)
    ran: dict[int, list[dict]] = defaultdict(list)
    names = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            ran[event["pid"]].append(event)
        elif event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
    assert names == {rank: f"rank {rank}" for rank in range(ranks)}
    expected = make_schedule(schedule, ranks, MICRO_BATCHES, chunks).with_communication().with_reduce()
    for rank, actions in enumerate(expected.actions):
        assert [e["name"] for e in ran[rank]] == [str(a) for a in actions] * STEPS
        assert all(e["dur"] > 0 and e["ts"] >= 0 for e in ran[rank])
        computed = [e for e in ran[rank] if Action.parse(e["name"]).is_compute]
        for earlier, later in itertools.pairwise(computed):
            assert earlier["ts"] + earlier["dur"] <= later["ts"]
    # Ranks share a clock: what is received was sent before, by the other rank's own times.
    ends = {e["name"]: e["ts"] + e["dur"] for rank in ran for e in ran[rank][-len(expected.actions[rank]) :]}
    starts = {e["name"]: e["ts"] for rank in ran for e in ran[rank][-len(expected.actions[rank]) :]}
    for action in (a for actions in expected.actions for a in actions if str(a.kind.value) in ("RF", "RB")):
        kind = "S" + action.kind.value[1]
        sent = f"{action.peer}{kind}{action.micro_batch}>{action.stage}"
        assert ends[str(action)] > starts[sent], str(action)


def test_clocks_of_other_hosts_are_laid_over_each_other_where_all_ranks_met() -> None:
    recordings = [
        Recording("a", 10.0, (("0F0", 11.0, 12.0),)),
        Recording("a", 10.5, (("1F0", 12.0, 13.0),)),
        Recording("b", 907.5, (("2F0", 910.0, 911.0),)),
        Recording("b", 907.0, (("3F0", 911.0, 913.0),)),
    ]
    found = [(e.rank, e.name, e.start, e.duration) for e in on_one_clock(recordings)]
    assert found == [(0, "0F0", 11, 1), (1, "1F0", 12, 1), (2, "2F0", 13, 1), (3, "3F0", 14, 2)]


def _twice(path: str) -> None:
    _start()
    with epl.record_trace(path), epl.record_trace(path):
        pass


def _another_pipeline(path: str) -> None:
    _start()
    with epl.record_trace(path):
        epl.setup_process_groups([("data", 2), ("pipe", 1)])


def _where_nothing_can_be_written(path: str) -> None:
    stages, x = _start()
    with epl.record_trace(path + "/trace.json"):
        _step(stages, x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_twice, "one recording at a time"),
        (_another_pipeline, "began another pipeline"),
        (_where_nothing_can_be_written, "rank 0 cannot write the trace"),
    ],
)
def test_what_cannot_be_recorded_is_said_on_every_rank(function, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("")
    for kind, message in rank_errors(function, 2, str(path)):
        assert kind == UsageError.__name__
        assert words in message


def _recovers(path: str) -> bool:
    """An error inside comes out as it is, writes nothing, and the next recording is an ordinary one."""
    stages, x = _start()
    with pytest.raises(ZeroDivisionError), epl.record_trace(path):
        raise ZeroDivisionError
    empty = Path(path).read_text() == ""
    with epl.record_trace(path):
        _step(stages, x)
    return empty and bool(json.loads(Path(path).read_text())["traceEvents"])


def test_an_error_inside_is_not_hidden(tmp_path: Path) -> None:
    assert run_ranks(_recovers, 2, str(tmp_path / "trace.json")) == [True, True]
