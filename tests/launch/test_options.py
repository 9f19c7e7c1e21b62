from __future__ import annotations

from pathlib import Path

import pytest

from epl.errors import LaunchError
from epl.launch.cli import main
from epl.launch.options import Machine, parse

from .conftest import Write

TWO = ["--num_workers", "2", "--gpu_per_worker", "4"]
LIST = ["--machine_list", "10.0.0.1:29500,10.0.0.2:29500"]


@pytest.fixture
def script(write: Write) -> str:
    return str(write("train.py", "pass"))


def refused(*argv: str) -> str:
    with pytest.raises(LaunchError) as caught:
        parse(argv)
    return str(caught.value)


def test_what_follows_the_script_is_the_scripts_own(script: str) -> None:
    tail = ["--num_workers", "9", "--debug", "--help", "--", "-x", "$HOME", "other.py"]
    options = parse([*TWO, script, *tail])
    assert options.script_args == tuple(tail)
    assert (options.num_workers, options.gpu_per_worker, options.debug) == (2, 4, False)


def test_all_options(script: str) -> None:
    options = parse(
        [
            "--num_workers=2",
            "--gpu_per_worker",
            "4",
            *LIST,
            "--machine_rank",
            "1",
            "--log_dir",
            "d",
            "--task_label",
            "a.b-c",
        ]
        + ["--debug", "--max_restarts", "3", script]
    )
    assert options.machines == (Machine("10.0.0.1", 29500), Machine("10.0.0.2", 29500))
    assert (options.machine_rank, options.log_dir, options.task_label) == (1, Path("d"), "a.b-c")
    assert (options.debug, options.max_restarts) == (True, 3)
    assert list(options.local_ranks) == [4, 5, 6, 7]


def test_without_a_machine_list_every_worker_is_here(script: str) -> None:
    options = parse([*TWO, script])
    assert (options.machine_count, options.local_size, list(options.local_ranks)) == (1, 8, list(range(8)))


def test_all_problems_at_once() -> None:
    text = refused("--num_workers", "zero", "--machine_list", "a:1,b:99999,c:3", "--max_restarts", "-1", "no/such.py")
    assert "7 problems" in text
    for part in (
        "--num_workers: expected a whole number of at least 1, found 'zero'",
        "--gpu_per_worker is missing",
        "--max_restarts: expected a whole number of at least 0, found '-1'",
        "found 'b:99999'",
        "no/such.py",
        "nothing there",
    ):
        assert part in text


def test_an_unknown_option_names_the_nearest(script: str) -> None:
    text = refused("--num_worker", "2", "--gpu_per_worker", "1", script)
    assert "unknown option --num_worker: did you mean --num_workers?" in text
    assert "the script" not in text.replace("Options of the script go after the script.", "")


def test_machine_list_and_rank(script: str) -> None:
    assert "one entry per worker, 3 as --num_workers says, found 2" in refused(
        "--num_workers", "3", "--gpu_per_worker", "1", *LIST, "--machine_rank", "0", script
    )
    assert "expected 0 to 1 for 2 machines, found 2" in refused(*TWO, *LIST, "--machine_rank", "2", script)
    assert "--machine_rank needs --machine_list" in refused(*TWO, "--machine_rank", "0", script)
    assert "each machine once, found again: h:1" in refused(
        *TWO, "--machine_list", "h:1,h:1", "--machine_rank", "0", script
    )
    assert parse([*TWO, "--machine_list", "[::1]:5,h:6", "--machine_rank", "0", script]).machines[0] == Machine(
        "::1", 5
    )


def test_a_machine_list_without_a_rank_is_refused_with_each_machines_own_call(script: str) -> None:
    text = refused(*TWO, *LIST, script)
    assert "`--machine_rank 0` on 10.0.0.1, `--machine_rank 1` on 10.0.0.2" in text
    one = ["--num_workers", "1", "--gpu_per_worker", "1", "--machine_list", "127.0.0.1:29500"]
    assert parse([*one, script]).machine_rank == 0


def test_scripts(write: Write, tmp_path: Path) -> None:
    plain = write("notes.txt", "hello")
    assert "expected a .py or .sh file" in refused(*TWO, str(plain))
    assert "a directory" in refused(*TWO, str(tmp_path))
    assert "the script is missing" in refused(*TWO)
    own = write("run", "#!/bin/sh\n")
    assert "chmod +x" in refused(*TWO, str(own))
    own.chmod(0o755)
    assert parse([*TWO, str(own)]).script == own


def test_labels_and_log_directories(script: str) -> None:
    assert "found 'a/b'" in refused(*TWO, "--task_label", "a/b", script)
    assert "found the file" in refused(*TWO, "--log_dir", script, script)
    assert "expected one argument" in refused(*TWO, "--log_dir")


def test_the_command_says_it_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--num_workers", "1", "nothing.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("epl-launch: cannot launch: 2 problems\n  1. --gpu_per_worker is missing")
    assert "Traceback" not in err


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    names = ("num_workers", "gpu_per_worker", "machine_list", "machine_rank", "log_dir", "task_label", "debug")
    assert all(f"--{name}" in out for name in (*names, "max_restarts"))
