from __future__ import annotations

import json
from pathlib import Path

from epl.launch.logs import RankFiles
from epl.launch.outcome import Cause, RankEnd, Record, explain, first_cause, first_failure, last_traceback, read_end

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: boom'


def end(rank: int, code: int = 1, *, at: float, record: str = "", recorded: float = 0.0, told: bool = False) -> RankEnd:
    kept = Record(record, TRACEBACK, recorded or at) if record else None
    return RankEnd(rank, None if code < 0 else code, -code if code < 0 else None, at, told, kept)


def failing(*ends: RankEnd) -> int | None:
    first = first_failure(ends)
    return None if first is None else first.rank


def test_the_first_in_time() -> None:
    assert failing(end(0, at=2.0, record="ValueError: a"), end(1, at=1.0, record="ValueError: b")) == 1
    assert failing(end(0, 0, at=1.0), end(1, 0, at=2.0)) is None


def test_an_exception_counts_from_when_it_was_raised() -> None:
    slow = end(1, at=9.0, record="ValueError: first", recorded=1.0)
    assert failing(end(0, at=5.0, record="ValueError: later"), slow) == 1


def test_a_rank_that_only_lost_its_peer_is_not_the_cause() -> None:
    lost = end(0, at=1.0, record="RuntimeError: Connection closed by peer [127.0.0.1]:4")
    assert failing(lost, end(1, -9, at=1.1)) == 1
    assert failing(lost, end(1, 3, at=2.0)) == 1
    assert failing(lost, end(1, 0, at=0.5)) == 0


def test_ranks_that_we_ended_are_not_the_cause() -> None:
    assert failing(end(0, -15, at=1.0, told=True), end(1, -11, at=2.0)) == 1
    # it had failed already when it was told to stop
    assert (
        failing(end(0, -15, at=3.0, told=True, record="ValueError: a", recorded=0.5), end(1, at=2.0, record="E: b"))
        == 0
    )


def test_over_machines() -> None:
    def cause(machine: int, at: float, consequence: bool = False, final: bool = False) -> Cause:
        return Cause(machine, machine, 1, "failed", "", at, consequence, "logs", final)

    assert first_cause([]) is None
    assert first_cause([cause(0, 1.0, consequence=True), cause(1, 2.0)]) == cause(1, 2.0)
    assert first_cause([cause(0, 1.0), cause(1, 2.0, final=True)]) == cause(1, 2.0, final=True)
    assert Cause.loads(cause(1, 2.5).dumps()) == cause(1, 2.5)


def files(tmp_path: Path, **texts: str) -> RankFiles:
    for name, text in texts.items():
        (tmp_path / name.replace("_", ".")).write_text(text)
    return RankFiles(tmp_path)


def test_reading(tmp_path: Path) -> None:
    exit_json = json.dumps({"code": None, "signal": 9, "time": 1.5, "told_to_stop": False})
    read = read_end(1, files(tmp_path, exit_json=exit_json, error_json='{"message": {"mess'), 1)  # cut off
    assert read == RankEnd(1, None, 9, 1.5, False, None)
    assert (read.exit_code, read.failed) == (137, True)


def test_reading_without_files_trusts_the_agent(tmp_path: Path) -> None:
    assert read_end(0, RankFiles(tmp_path), -9).exit_code == 137
    assert read_end(0, RankFiles(tmp_path), 4).exit_code == 4
    assert read_end(0, RankFiles(tmp_path), None).told_to_stop


def test_a_record_of_torch_itself(tmp_path: Path) -> None:
    theirs = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": TRACEBACK, "timestamp": "17"}}}
    read = read_end(0, files(tmp_path, error_json=json.dumps(theirs)), 1)
    assert read.record is not None
    assert read.record.time == (tmp_path / "error.json").stat().st_mtime


def test_explained_by_the_record_then_the_log_then_the_code(tmp_path: Path) -> None:
    there = files(tmp_path, stderr_log=f"noise\n{TRACEBACK}\nmore noise\n")
    recorded = explain(end(1, at=1.0, record="KeyError: 'k'"), there, 0, live=False)
    assert (recorded.what, recorded.detail) == ("failed with KeyError: 'k' (exit code 1)", TRACEBACK)
    found = explain(end(1, at=1.0), there, 0, live=False)
    assert (found.what, found.detail) == ("failed with ValueError: boom (exit code 1)", TRACEBACK)
    killed = explain(end(1, -9, at=1.0), there, 0, live=True)
    assert (killed.what, killed.detail) == ("was killed by SIGKILL (exit code 137)", "")
    there = files(tmp_path, stderr_log="run.sh: nosuch: command not found\n")
    bare = explain(end(1, 127, at=1.0), there, 0, live=False)
    assert (bare.what, bare.detail) == ("ended by itself (exit code 127)", "run.sh: nosuch: command not found")


def test_what_was_shown_live_is_not_repeated(tmp_path: Path) -> None:
    prefixed = "\n".join(f"[rank0]: {line}" for line in TRACEBACK.splitlines())  # torch.distributed's excepthook
    there = files(tmp_path, stderr_log=prefixed)
    assert explain(end(0, at=1.0, record="ValueError: boom"), there, 0, live=True).detail == ""
    assert explain(end(0, at=1.0, record="ValueError: boom"), there, 0, live=False).detail == TRACEBACK


def test_last_traceback() -> None:
    assert last_traceback("nothing") == ""
    assert last_traceback(f"{TRACEBACK}1\n\n{TRACEBACK}2\ntail") == f"{TRACEBACK}2"
    assert last_traceback("Traceback (most recent call last):\n  cut") == ""


def test_a_rank_that_raised_and_was_then_ended_failed_by_itself():
    # On a busy machine the rank that raised may still tidy up when the others, which lost it, are gone already: the launcher
    # ends it, and its code was reported as that of SIGTERM.
    raised = RankEnd(1, None, 15, 2.0, True, Record("ValueError: the cause", "Traceback …", 1.0))
    assert raised.exit_code == 1
    assert RankEnd(1, None, 15, 2.0, True, None).exit_code == 143
