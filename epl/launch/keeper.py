"""Each rank's parent process: starts its command, notes how and when it ended, and leaves nothing of it behind.

    launcher ── keeper (rank 0) ── python script.py ── its own children
             └─ keeper (rank 1) ── bash run.sh ── python script.py ── …

torch's agent ends the process it started and that process's group only if it still runs, waits 30 s before it insists,
and sees the end of a process up to 0.1 s late, too coarse to tell which rank failed first. All of that is done here.
Started by path, with the standard library only, so that it costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE = 5.0  # seconds between asking (SIGTERM) and insisting (SIGKILL)
LINGER = 2.0  # seconds that helpers of a rank which succeeded may take to end by themselves
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def keep(launcher: int, command: list[str], directory: Path) -> int:
    """The exit code of `command` (128 + signal), after everything it started has ended; its files go to `directory`."""
    exit_file = directory / "exit.json"
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it; elsewhere the process group must do
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of this rank come to us, not to init
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)  # a launcher killed by -9 takes its ranks along
    told_to_stop = False
    child: subprocess.Popen[bytes] | None = None

    def stop(signum: int, frame: object) -> None:
        nonlocal told_to_stop
        told_to_stop = True
        signal.setitimer(signal.ITIMER_REAL, GRACE)
        if child is not None:
            _signal_group(child.pid, signal.SIGTERM)

    def insist(signum: int, frame: object) -> None:
        if child is not None:
            _signal_group(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, insist)
    if os.getppid() != launcher or told_to_stop:
        return 128 + signal.SIGTERM
    with open(directory / "stdout.log", "ab") as out, open(directory / "stderr.log", "ab") as err:
        try:
            # A group of its own: the agent's signal reaches the keeper alone, which passes it on exactly once.
            child = subprocess.Popen(command, stdout=out, stderr=err, process_group=0)
        except OSError as error:
            err.write(f"epl-launch: cannot run {command[0]}: {error}\n".encode())
            _note(exit_file, code=127, signum=None, when=time.time(), told_to_stop=False)
            return 127
    if told_to_stop:  # the signal came while the process was being made
        _signal_group(child.pid, signal.SIGTERM)
    end = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    when = time.time()
    assert end is not None
    exited = end.si_code == os.CLD_EXITED
    code = end.si_status if exited else 128 + end.si_status
    _note(
        exit_file,
        code=end.si_status if exited else None,
        signum=None if exited else end.si_status,
        when=when,
        told_to_stop=told_to_stop,
    )
    if code != 0:
        _signal_group(child.pid, signal.SIGTERM)  # not yet reaped, so this number is still its own
    ended, child = child, None
    ended.wait()
    _end_descendants(patience=0.0 if code or told_to_stop else LINGER)
    return code


def _note(exit_file: Path, *, code: int | None, signum: int | None, when: float, told_to_stop: bool) -> None:
    data = {"code": code, "signal": signum, "time": when, "told_to_stop": told_to_stop}
    unfinished = exit_file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(data))
    unfinished.replace(exit_file)


def _end_descendants(patience: float) -> None:
    """Wait, ask, insist, until nothing that this rank started is left."""
    if _gone_within(patience):
        return
    for pid in _children():
        _signal(pid, signal.SIGTERM)
    if _gone_within(GRACE / 2):
        return
    while left := _children():
        for pid in left:
            _signal(pid, signal.SIGKILL)
        _gone_within(0.1)


def _gone_within(seconds: float) -> bool:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not _children():
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)


def _children() -> list[int]:
    """Processes whose parent we are, born or inherited. (Not every kernel has `/proc/…/children`.)"""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            if int(entry.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.parent.name))
    return found


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _signal_group(pgid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2:], Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent))
