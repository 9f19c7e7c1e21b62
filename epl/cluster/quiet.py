"""The last thing before the interpreter ends: Gloo's threads must have let go of every tensor.

A collective is done for the one who waits before it is done for the thread that carried it out: the thread still has the
tensors, and lets go of them a moment later, for which it takes the GIL. If the interpreter has begun to end by then, Python
ends the thread inside a C++ destructor, and the whole process dies of SIGABRT ("terminate called without an active
exception") after a run in which nothing went wrong. torch 2.13 neither joins these threads in `destroy_process_group` nor
tells whether they are idle, so we look at what the kernel says of them.
"""

from __future__ import annotations

import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_GLOO = "pt_gloo_runloop"


def wait_for_gloo_threads(patience: float = 2.0) -> bool:
    """Whether Gloo's threads came to rest; a thread in a collective that never ends is given up after `patience` seconds.

    Where there is no /proc (not Linux) nothing can be seen, and a short pause has to do.
    """
    if not _THREADS.exists():
        time.sleep(0.05)
        return False
    deadline = time.monotonic() + patience
    before: dict[str, str] = {}
    while True:
        # Asleep is not enough: a thread that waits for the GIL sleeps too, as long as we have it. It gets the GIL while we
        # sleep, and then it has been switched to since the last look.
        now = {thread: state for thread in _gloo_threads() if (state := _sleep_of(thread)) is not None}
        if all(state and before.get(thread) == state for thread, state in now.items()):
            return True
        if time.monotonic() > deadline:
            return False
        before = now
        time.sleep(0.002)


def _gloo_threads() -> list[str]:
    return [task.name for task in _THREADS.iterdir() if _read(task / "comm").strip() == _GLOO]


def _sleep_of(thread: str) -> str | None:
    """A text that stays the same as long as the thread sleeps; empty if it does not, None if it is gone."""
    status = dict(line.split(":", 1) for line in _read(_THREADS / thread / "status").splitlines() if ":" in line)
    if not status:
        return None
    if not status["State"].strip().startswith("S"):
        return ""
    return f"{status['voluntary_ctxt_switches']} {status['nonvoluntary_ctxt_switches']}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has just ended
        return ""
