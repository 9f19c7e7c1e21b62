"""Running the launcher in a test: in this process where it can be (torch is imported already), else as a command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from epl.launch.cli import main

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Launch = Callable[..., Ended]
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_rank_left(tmp_path: Path) -> Iterator[None]:
    """Every process of a rank carries its error file's path, which is below tmp_path."""
    yield
    end = time.monotonic() + 5
    while (left := processes_of(tmp_path)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def processes_of(tmp_path: Path) -> dict[int, str]:
    mark, found = os.fsencode(tmp_path), {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            if int(entry.name) != os.getpid() and mark in command + (entry / "environ").read_bytes():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode()
        except OSError:
            continue
    return {pid: command for pid, command in found.items() if command}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a script into tmp_path."""

    def do(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).lstrip())
        return path

    return do


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Launch:
    """`launch(script, *args, n=2, options=[…])`: one worker of n processes, logs in tmp_path/logs."""
    monkeypatch.chdir(tmp_path)

    def do(script: Path | str, *args: str, n: int = 2, options: list[str] | None = None) -> Ended:
        common = ["--num_workers", "1", "--gpu_per_worker", str(n), "--log_dir", str(tmp_path / "logs")]
        capfd.readouterr()
        code = main([*common, *(options or []), str(script), *args])
        return Ended(code, *capfd.readouterr())

    return do


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "epl.launch", *map(str, args)]


def start(tmp_path: Path, *args: object) -> subprocess.Popen[str]:
    """The launcher as a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        command(*args),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_signals,
    )


def _hear_signals() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, the launcher stays with that: a suite that runs so must not pass it on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(path: Path, seconds: float = 40) -> str:
    """The text of a file that a rank writes."""
    end = time.monotonic() + seconds
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)
    return path.read_text()
