from __future__ import annotations

import os
import time
from pathlib import Path

from epl.launch.live import LiveView


def shown(fd: int) -> bytes:
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def test_bytes_come_as_they_are_written_and_lines_behind_a_prefix(tmp_path: Path) -> None:
    (raw_out, raw_in), (line_out, line_in) = os.pipe(), os.pipe()
    path = tmp_path / "log"
    view = LiveView()
    view.follow(path, raw_in)
    view.follow(path, line_in, prefix="[3]: ")
    view.start()
    with path.open("wb", buffering=0) as log:
        log.write(b"10%\r20%")
        end = time.monotonic() + 10
        seen = b""
        while not seen and time.monotonic() < end:
            time.sleep(0.01)
            seen = shown(raw_out)
        assert seen == b"10%\r20%"
        assert shown(line_out) == b""
        log.write(b" done\nnext\nlast \xff")
    view.stop()
    assert shown(raw_out) == b" done\nnext\nlast \xff"
    assert shown(line_out) == b"[3]: 10%\r20% done\n[3]: next\n[3]: last \xff\n"
    for fd in (raw_out, raw_in, line_out, line_in):
        os.close(fd)


def test_a_closed_terminal_and_a_missing_log_do_no_harm(tmp_path: Path) -> None:
    out, into = os.pipe()
    os.close(out)
    (tmp_path / "log").write_text("text")
    view = LiveView()
    view.follow(tmp_path / "log", into)
    view.follow(tmp_path / "missing", into)
    view.start()
    view.stop()
    os.close(into)
