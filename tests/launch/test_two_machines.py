"""Two machines on loopback: machine 1 is a process of its own, machine 0 runs here."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from epl.launch.cli import main

from .conftest import Write, start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def options(tmp_path: Path, port: int, machine: int, gpus: int = 2) -> list[str]:
    return [
        "--num_workers",
        "2",
        "--gpu_per_worker",
        str(gpus),
        "--machine_list",
        f"127.0.0.1:{port},127.0.0.1:{port + 1}",
    ] + ["--machine_rank", str(machine), "--log_dir", str(tmp_path / "logs")]


@pytest.fixture
def chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("chdir")
def test_ranks_in_machine_order_and_a_restart_of_both(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(
        "train.py",
        """
        import os, pathlib, time
        names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        print(*(os.environ[name] for name in names), flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            pathlib.Path("printed_" + os.environ["RANK"]).touch()
            if os.environ["RANK"] == "2":
                # The launcher ends the others as soon as this one fails, be they slow to start: wait for what they print.
                while len(list(pathlib.Path().glob("printed_*"))) < 4:
                    time.sleep(0.01)
                raise ValueError("on machine 1")
            time.sleep(60)
        """,
    )
    port = free_port()
    with start(tmp_path, *options(tmp_path, port, 1), "--max_restarts", 1, "train.py") as other:
        code = main([*options(tmp_path, port, 0), "--max_restarts", "1", "train.py"])
        out, err = other.communicate(timeout=30)
    assert (code, other.returncode) == (0, 0)
    assert out == ""  # rank 0 is not there
    here = capfd.readouterr()
    assert here.out == "0 0 0 4 2 0\n0 0 0 4 2 1\n"
    for text in (here.err, err):
        assert (
            text.count("rank 2 (machine 1) failed with ValueError: on machine 1 (exit code 1) in attempt 1 of 2") == 1
        )
        assert text.count("Traceback") == 1
    for attempt in range(2):
        for rank in range(4):
            log = tmp_path / "logs" / f"attempt_{attempt}" / f"rank_{rank}" / "stdout.log"
            assert log.read_text() == f"{rank} {rank // 2} {rank % 2} 4 2 {attempt}\n"


@pytest.mark.usefixtures("chdir")
def test_machines_that_were_started_differently(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write("train.py", "raise SystemExit('must not run')")
    port = free_port()
    with start(tmp_path, *options(tmp_path, port, 1, gpus=1), "train.py") as other:
        code = main([*options(tmp_path, port, 0), "train.py"])
        err = other.communicate(timeout=30)[1]
    assert (code, other.returncode) == (2, 2)
    expected = "--gpu_per_worker: machine 0 has 2, machine 1 has 1; start all machines alike"
    assert expected in err
    assert expected in capfd.readouterr().err


@pytest.mark.usefixtures("chdir")
def test_a_taken_meeting_port_is_said(write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write("train.py", "pass")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main([*options(tmp_path, port, 0), "train.py"]) == 2
    assert f"port {port} of 127.0.0.1 is taken" in capfd.readouterr().err
