"""Signals to a launcher that is a process of its own."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from .conftest import Write, processes_of, start, wait_for

SLEEP = """
import os, pathlib, time
pathlib.Path(__file__).with_name("started" + os.environ["RANK"]).write_text("yes")
time.sleep(120)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_cleanly(write: Write, tmp_path: Path, signum: signal.Signals, code: int) -> None:
    write("train.py", SLEEP)
    write("run.sh", "python train.py\n")
    script = "run.sh" if signum == signal.SIGINT else "train.py"
    options = ["--num_workers", 1, "--gpu_per_worker", 2, "--log_dir", tmp_path / "logs", "--max_restarts", 3]
    with start(tmp_path, *options, script) as job:
        wait_for(tmp_path / "started0")
        wait_for(tmp_path / "started1")
        job.send_signal(signum)
        out, err = job.communicate(timeout=20)
    assert job.returncode == code
    assert out == ""
    assert err.splitlines()[1:] == [
        f"epl-launch: stopped by {signum.name}; all ranks are ended. Logs: {tmp_path / 'logs'}"
    ]
    assert processes_of(tmp_path) == {}


def test_a_launcher_that_is_killed_takes_its_ranks_along(write: Write, tmp_path: Path) -> None:
    write("train.py", SLEEP)
    options = ["--num_workers", 1, "--gpu_per_worker", 1, "--log_dir", tmp_path / "logs"]
    with start(tmp_path, *options, "train.py") as job:
        wait_for(tmp_path / "started0")
        job.kill()
        job.communicate(timeout=20)
    end = time.monotonic() + 10
    while processes_of(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_of(tmp_path) == {}
