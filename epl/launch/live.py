"""Shows on this terminal what ranks write to their logs, while they write it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

INTERVAL = 0.05


@dataclass
class _Followed:
    path: Path
    fd: int
    prefix: bytes
    file: BinaryIO | None = None
    unfinished: bytes = b""


class LiveView:
    """Copies logs to the terminal from `start` to `stop`, byte by byte, or line by line behind a prefix.

    torch's own (`TailLog`) never flushes, so a pipe would see nothing until the end, and puts its prefix into the
    middle of lines that are written in pieces.
    """

    def __init__(self) -> None:
        self._followed: list[_Followed] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="epl-launch live view", daemon=True)

    def follow(self, path: Path, fd: int, prefix: str = "") -> None:
        """Show `path` on file descriptor `fd`; call it before `start`."""
        self._followed.append(_Followed(path, fd, prefix.encode()))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when everything written so far has been shown."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            last = self._stopping.wait(INTERVAL)
            for followed in list(self._followed):
                try:
                    self._copy(followed, last)
                except OSError:  # the reader of our output is gone (`| head`); the logs are still kept
                    self._close(followed)
            if last:
                for followed in list(self._followed):
                    self._close(followed)
                return

    def _close(self, followed: _Followed) -> None:
        self._followed.remove(followed)
        if followed.file is not None:
            followed.file.close()

    def _copy(self, followed: _Followed, last: bool) -> None:
        if followed.file is None:
            if not followed.path.exists():
                return
            followed.file = followed.path.open("rb")
        text = followed.unfinished + followed.file.read()
        followed.unfinished = b""
        if followed.prefix:
            whole, newline, rest = text.rpartition(b"\n")
            if last and rest:
                whole, newline, rest = text, b"\n", b""
            followed.unfinished = rest
            text = b"".join(followed.prefix + line + b"\n" for line in whole.split(b"\n")) if newline else b""
        while text:
            text = text[os.write(followed.fd, text) :]
