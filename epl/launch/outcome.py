"""Which rank failed first, and why: read from what keeper and entry left beside the logs."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epl.launch.logs import RankFiles

_TAIL = 64 * 1024
_TAIL_LINES = 10

# Errors that only say that another rank is gone. A rank that fails with one is never the cause while any other failed.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|peerlosterror|connectfullmesh"
    r"|distnetworkerror|ncclremoteerror|remote process exited",
    re.IGNORECASE,
)


# torch.distributed replaces sys.excepthook by one that puts the rank before each line.
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


@dataclass(frozen=True)
class Record:
    """The exception that ended a rank, as error.json has it."""

    message: str
    traceback: str
    time: float


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. `code` or `signal` is set; `told_to_stop` means the launcher asked it to."""

    rank: int
    code: int | None
    signal: int | None
    time: float
    told_to_stop: bool
    record: Record | None

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 + signal. A rank that had raised and was ended while it still tidied up failed by itself."""
        if self.told_to_stop and self.record is not None:
            return 1
        return self.code if self.code is not None else 128 + (self.signal or 0)

    @property
    def failed_at(self) -> float:
        """When it went wrong: an exception is recorded at once, the process may take long to end after it."""
        return self.record.time if self.record else self.time

    @property
    def says_peer_is_gone(self) -> bool:
        return self.record is not None and bool(_CONSEQUENCE.search(self.record.message))


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed, in a form that one launcher can send to another. `rank` None: the launcher itself."""

    machine: int
    rank: int | None
    exit_code: int
    what: str
    detail: str
    time: float
    consequence: bool
    logs: str
    final: bool = False

    def dumps(self) -> str:
        return json.dumps(self.__dict__)

    @staticmethod
    def loads(text: str | bytes) -> Cause:
        return Cause(**json.loads(text))


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank whose failure the others' failures follow from; None if all succeeded."""
    failed = [end for end in ends if end.failed]
    own = [end for end in failed if end.record or not end.told_to_stop]
    return min(own or failed, key=lambda end: (end.says_peer_is_gone, end.failed_at), default=None)


def first_cause(causes: Sequence[Cause]) -> Cause | None:
    """The same over machines: a request to stop is what it is, else the first that is not a consequence."""
    return min(causes, key=lambda cause: (not cause.final, cause.consequence, cause.time), default=None)


def read_end(rank: int, files: RankFiles, agent_code: int | None) -> RankEnd:
    """How `rank` ended, by its files; by the agent's word (a negative number is a signal) if it left none."""
    record = read_record(files.error)
    if data := _read_json(files.exit):
        return RankEnd(rank, data["code"], data["signal"], data["time"], data["told_to_stop"], record)
    if agent_code is None:  # ended by us before it began
        return RankEnd(rank, None, signal.SIGTERM, math.inf, True, record)
    if agent_code < 0:
        return RankEnd(rank, None, -agent_code, math.inf, False, record)
    return RankEnd(rank, agent_code, None, math.inf, False, record)


def read_record(path: Path) -> Record | None:
    """The exception in an error file of ours or of torch's `@record`; None if there is none that can be read."""
    data = _read_json(path)
    message = data.get("message")
    if not isinstance(message, dict):
        return None
    return Record(
        message=str(message.get("message", "")),
        traceback=str(message.get("extraInfo", {}).get("py_callstack", "")),
        time=data.get("time") or path.stat().st_mtime,
    )


def explain(end: RankEnd, files: RankFiles, machine: int, *, live: bool) -> Cause:
    """The cause that `end` is; a traceback that its live output has already shown is not repeated."""
    stderr = _tail(files.stderr)
    if end.signal is not None and end.record is None:
        what, detail = f"was killed by {_signal_name(end.signal)}", ""
    elif end.record is not None and end.record.traceback:
        what, detail = f"failed with {_first_line(end.record.message)}", end.record.traceback
    else:
        detail = "" if end.record else last_traceback(stderr)
        what = f"failed with {_first_line(detail.splitlines()[-1])}" if detail else "ended by itself"
    if not detail and not live:
        detail = "\n".join(stderr.splitlines()[-_TAIL_LINES:])
    if live and detail.strip() in stderr:
        detail = ""
    return Cause(
        machine=machine,
        rank=end.rank,
        exit_code=end.exit_code,
        what=f"{what} (exit code {end.exit_code})",
        detail=detail.strip(),
        time=end.failed_at,
        consequence=end.says_peer_is_gone,
        logs=str(files.directory),
    )


def last_traceback(text: str) -> str:
    """The last Python traceback in `text`, or "". (An exception's message counts up to its first line.)"""
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return ""
    lines = text[start:].splitlines()
    for number, line in enumerate(lines[1:], 1):
        if line and not line[0].isspace():
            return "\n".join(lines[: number + 1])
    return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # ValueError: cut off while it was written
        return {}
    return data if isinstance(data, dict) else {}


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return _TORCH_PREFIX.sub("", text)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
