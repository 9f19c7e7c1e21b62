from __future__ import annotations

import time
from pathlib import Path

import pytest

from epl.errors import LaunchError
from epl.launch.logs import default_name, open_logs
from epl.launch.options import Options


def options(**changes: object) -> Options:
    return Options(2, 4, Path("some/train.sh"), **changes)  # type: ignore[arg-type]


def test_default_name() -> None:
    now = time.struct_time((2026, 3, 4, 5, 6, 7, 0, 0, 0))
    assert default_name(options(), now) == Path("experiments/20260304-050607_2w4g_train")
    assert default_name(options(task_label="try1"), now).name == "20260304-050607_2w4g_train_try1"


def test_two_jobs_of_one_second_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({open_logs(options()).root for _ in range(3)}) == 3


def test_a_directory_used_again_holds_the_last_job_only(tmp_path: Path) -> None:
    logs = open_logs(options(log_dir=tmp_path / "d"))
    logs.of(1, 0).directory.mkdir(parents=True)
    (tmp_path / "d" / "mine.txt").touch()
    elsewhere = logs.of(0, 99).directory  # another machine's rank, on a shared disk
    elsewhere.mkdir(parents=True)
    assert open_logs(options(log_dir=tmp_path / "d")) == logs
    assert not logs.of(1, 0).directory.exists()
    assert elsewhere.exists()
    assert (tmp_path / "d" / "mine.txt").exists()


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="--log_dir"):
        open_logs(options(log_dir=tmp_path / "file" / "below"))
