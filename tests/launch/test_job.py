"""Whole jobs on this machine. The scripts do without torch, where they can, and start in a moment."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from .conftest import Launch, Write, processes_of


def test_success(launch: Launch, write: Write, tmp_path: Path) -> None:
    script = write(
        "train.py",
        """
        import json, os, sys
        print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items()}]))
        print("to stderr", file=sys.stderr)
        """,
    )
    args = ["--num_workers", "7", "${local_rank}", "$$", "a b", "--", "--debug"]
    ended = launch(script, *args)
    assert ended.code == 0
    logs = tmp_path / "logs" / "attempt_0"
    assert ended.out == (logs / "rank_0" / "stdout.log").read_text()  # rank 0, and nobody else
    assert ended.err == f"epl-launch: 1 worker × 2 processes of {script}; logs: {tmp_path / 'logs'}\nto stderr\n"
    for rank in range(2):
        words, environment = json.loads((logs / f"rank_{rank}" / "stdout.log").read_text())
        assert words == args
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "EPL_LAUNCH_NUM_WORKERS": "1",
            "EPL_LAUNCH_GPU_PER_WORKER": "2",
            "PYTHONUNBUFFERED": "1",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        assert expected.items() <= environment.items()
        assert int(environment["OMP_NUM_THREADS"]) >= 1
        assert int(environment["MASTER_PORT"]) > 0


def test_default_logs_and_several_workers_on_one_machine(
    launch: Launch, write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from epl.launch.cli import main

    write("train.py", "import os; print(os.environ['RANK'], os.environ['GROUP_RANK'])")
    assert main(["--num_workers", "2", "--gpu_per_worker", "2", "--task_label", "x", "train.py"]) == 0
    (found,) = (tmp_path / "experiments").iterdir()
    assert found.name.endswith("_2w2g_train_x")
    assert (found / "attempt_0" / "rank_3" / "stdout.log").read_text() == "3 0\n"


def test_the_first_traceback_is_shown_once_with_its_rank(launch: Launch, write: Write, tmp_path: Path) -> None:
    script = write(
        "train.py",
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        print("rank 0 works", flush=True)
        time.sleep(60)
        """,
    )
    began = time.monotonic()
    ended = launch(script)
    assert time.monotonic() - began < 20
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1
    assert "epl-launch: rank 1 failed with ValueError: boom (exit code 1):\nTraceback" in ended.err
    assert f'File "{script}", line 3' in ended.err
    assert f"epl-launch: logs of rank 1: {tmp_path / 'logs' / 'attempt_0' / 'rank_1'}\n" in ended.err
    assert "epl/launch" not in ended.err
    assert "ChildFailedError" not in ended.err


def test_a_traceback_of_rank_0_is_seen_live_and_not_again(launch: Launch, write: Write) -> None:
    ended = launch(write("train.py", "import os\nif os.environ['RANK'] == '0': raise ValueError('boom')"))
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1
    assert "epl-launch: rank 0 failed with ValueError: boom (exit code 1)\n" in ended.err


def test_a_rank_that_loses_its_peer_is_not_blamed(launch: Launch, write: Write) -> None:
    """Rank 1 dies without a word; rank 0 notices and raises, and its exception is on file before rank 1's exit."""
    script = write(
        "train.py",
        """
        import os, socket, time
        path = os.path.join(os.path.dirname(__file__), "meet")
        if os.environ["RANK"] == "1":
            server = socket.socket(socket.AF_UNIX)
            server.bind(path + ".new"); server.listen(); os.rename(path + ".new", path)
            peer, _ = server.accept()
            os._exit(7)
        client = socket.socket(socket.AF_UNIX)
        while not os.path.exists(path):
            time.sleep(0.01)
        client.connect(path)
        if not client.recv(1):
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        """,
    )
    ended = launch(script)
    assert ended.code == 7
    assert "epl-launch: rank 1 ended by itself (exit code 7)" in ended.err


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "ended by itself (exit code 3)"),
        ("os._exit(5)", 5, "ended by itself (exit code 5)"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL (exit code 137)"),
        ("os.kill(os.getpid(), 15)", 143, "was killed by SIGTERM (exit code 143)"),
    ],
)
def test_the_exit_code_is_the_failing_ranks(launch: Launch, write: Write, end: str, code: int, words: str) -> None:
    text = f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(60)"
    ended = launch(write("train.py", text))
    assert (ended.code, f"epl-launch: rank 1 {words}" in ended.err) == (code, True), ended.err


def test_debug_shows_every_rank(launch: Launch, write: Write) -> None:
    script = write("train.py", "import os, sys\nprint('out', end=''); print('err', file=sys.stderr)")
    ended = launch(script, options=["--debug"])
    assert sorted(ended.out.splitlines()) == ["[0]: out", "[1]: out"]
    assert sorted(ended.err.splitlines()[1:]) == ["[0]: err", "[1]: err"]


def test_a_restart_starts_all_ranks_again(launch: Launch, write: Write, tmp_path: Path) -> None:
    script = write(
        "train.py",
        """
        import os, pathlib, time
        mark = pathlib.Path(__file__).with_name("tried")
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            raise ValueError("first time")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(60)
        """,
    )
    ended = launch(script, options=["--max_restarts", "2"])
    assert ended.code == 0
    assert "rank 1 failed with ValueError: first time (exit code 1) in attempt 1 of 3:" in ended.err
    assert "epl-launch: starting all ranks again: attempt 2 of 3" in ended.err
    assert ended.out.splitlines()[-1] == "attempt 1"
    assert (tmp_path / "logs/attempt_0/rank_1/stdout.log").read_text() == "attempt 0\n"
    assert (tmp_path / "logs/attempt_1/rank_1/stdout.log").read_text() == "attempt 1\n"
    assert not (tmp_path / "logs/attempt_2").exists()


def test_restarts_end(launch: Launch, write: Write) -> None:
    ended = launch(write("train.py", "import sys; sys.exit(4)"), n=1, options=["--max_restarts", "1"])
    assert ended.code == 4
    assert ended.err.count("ended by itself (exit code 4) in attempt") == 2
    assert ended.err.count("starting all ranks again") == 1


def test_a_restarted_process_group_finds_only_its_own_attempt(launch: Launch, write: Write) -> None:
    """With one store for all attempts, ranks of the second connected to processes of the first."""
    script = write(
        "train.py",
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("boom")
        dist.all_reduce(total)
        print("total", total.item())
        dist.destroy_process_group()
        """,
    )
    ended = launch(script, options=["--max_restarts", "1"])
    assert ended.code == 0, ended.err
    assert ended.out == "total 4.0\n"
    assert "epl-launch: rank 1 failed with ValueError: boom" in ended.err


def test_a_shell_script_runs_once_per_rank_with_our_python(launch: Launch, write: Write, tmp_path: Path) -> None:
    write("job.py", "import os, sys; print(os.environ['RANK'], sys.argv, sys.prefix)")
    script = write("run.sh", 'echo "shell $RANK"\npython job.py "$@"\npython3 -c "import sys; print(sys.prefix)"\n')
    ended = launch(script, "a b", "--debug")
    assert ended.code == 0
    assert ended.out == f"shell 0\n0 ['job.py', 'a b', '--debug'] {sys.prefix}\n{sys.prefix}\n"
    assert (tmp_path / "logs/attempt_0/rank_1/stdout.log").read_text().startswith("shell 1\n1 ['job.py'")


@pytest.mark.parametrize("python", ["python job.py", "python -B job.py"])
def test_an_exception_inside_a_shell_script(launch: Launch, write: Write, python: str) -> None:
    """The second form is not recorded: the traceback is found in the log."""
    write("job.py", "import os\nif os.environ['RANK'] == '1': raise KeyError('k')")
    write("earlier.py", "raise ValueError('survived')")
    script = write("run.sh", f"set -e\npython earlier.py || true\n{python}\nsleep 60\n")
    ended = launch(script)
    assert ended.code == 1
    assert "epl-launch: rank 1 failed with KeyError: 'k' (exit code 1):\nTraceback" in ended.err


def test_a_shell_script_that_fails_by_itself(launch: Launch, write: Write) -> None:
    ended = launch(write("run.sh", 'test "$RANK" = 0 && sleep 60\nno_such_command\n'))
    assert ended.code == 127
    assert "rank 1 ended by itself (exit code 127)" in ended.err
    assert "no_such_command: command not found" in ended.err


def test_nothing_under_a_shell_survives(launch: Launch, write: Write, tmp_path: Path) -> None:
    """Rank 0 is in a foreground child; rank 1 leaves two in the background, one in a session of its own, and fails."""
    write("sleep.py", "import time; time.sleep(60)")
    script = write(
        "run.sh",
        """
        if [ "$RANK" = 0 ]; then python sleep.py; fi
        python sleep.py &
        setsid python -c 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)' &
        sleep 0.3
        exit 9
        """,
    )
    ended = launch(script)
    assert ended.code == 9
    assert processes_of(tmp_path) == {}


def test_a_rank_that_ignores_sigterm_ends_all_the_same(launch: Launch, write: Write) -> None:
    script = write(
        "train.py",
        """
        import os, pathlib, signal, time
        ready = pathlib.Path(__file__).with_name("ready")
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready.touch()
            time.sleep(60)
        while not ready.exists():
            time.sleep(0.01)
        raise SystemExit(6)
        """,
    )
    began = time.monotonic()
    assert launch(script).code == 6
    assert time.monotonic() - began < 20


def test_a_stop_between_attempts_starts_no_rank(write: Write, tmp_path: Path) -> None:
    from epl.launch.agent import Attempt, run_attempt
    from epl.launch.logs import JobLogs
    from epl.launch.options import Options

    options = Options(1, 1, write("train.py", "pass"))
    attempt = Attempt(1, ["must-not-run"], {}, ("127.0.0.1", 1), JobLogs(tmp_path / "logs"))
    assert run_attempt(options, attempt, must_end=lambda: True) == {}
    assert not (tmp_path / "logs").exists()


def test_an_executable_with_its_own_interpreter(launch: Launch, write: Write) -> None:
    script = write("tool", "#!/bin/sh\necho own $RANK $1\n")
    script.chmod(0o755)
    assert launch("tool", "x").out == "own 0 x\n"


def test_the_launchers_own_surroundings_stay_as_they_are(launch: Launch, write: Write) -> None:
    before = dict(os.environ)
    launch(write("train.py", "pass"), n=1)
    assert dict(os.environ) == before
