"""Seals a forked process: nothing it does is seen outside of it, but what it says through one connection.

open files, sockets        lead to nowhere: process groups cannot be touched, and places in files stay where they are
shared memory              can be read only: a batch from a loader's workers, `multiprocessing.Value`
opening for writing, removing, connecting, starting processes      is told before it happens
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REACHES_OUT = {
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn"),
    *("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"),
    *("os.utime", "os.kill", "os.killpg", "os.setxattr", "os.removexattr", "signal.pthread_kill", "sqlite3.connect"),
    *("socket.bind", "socket.connect", "socket.sendmsg", "socket.sendto", "syslog.syslog"),
}


def die_after(seconds: float) -> None:
    """End this process then, whatever it does and whether or not its parent still lives; signals are for the parent to handle."""
    import resource  # there is none on Windows

    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def cut_off(keep: int, reaches_out: Callable[[str], NoReturn]) -> None:
    """Leave this process one open file; `reaches_out(event)` is called instead of anything that would be seen outside."""
    _protect_shared_memory()
    nowhere = os.open(os.devnull, os.O_WRONLY)  # reading from it is an error
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in (keep, nowhere):
            os.dup2(nowhere, number)
    sys.stdout = sys.stderr = open(nowhere, "w")  # noqa: SIM115 - for as long as the process lives

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in _REACHES_OUT or (event == "open" and isinstance(args[2], int) and args[2] & _WRITES):
            reaches_out(event)

    sys.addaudithook(audit)


def _protect_shared_memory() -> None:
    """Who writes to memory that other processes see dies of it."""
    protect = ctypes.CDLL(None).mprotect
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split(maxsplit=2)[:2]
        if rights[1] == "w" and rights[3] == "s":
            start, end = (int(address, 16) for address in span.split("-"))
            if protect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.PROT_READ):
                raise OSError(f"{line} could not be protected")
