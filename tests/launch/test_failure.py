from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from epl.launch.failure import forget_failure, record_failure
from epl.launch.outcome import read_record


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_first_record_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert record_failure(raised(ValueError("first")))
    assert not record_failure(raised(ValueError("second")))
    record = read_record(path)
    assert record is not None
    assert record.message == "ValueError: first"
    assert "raise error\nValueError: first" in record.traceback
    forget_failure()
    assert record_failure(raised(ValueError("third")))


def test_without_a_launcher_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert not record_failure(ValueError())
    forget_failure()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such" / "error.json"))
    assert not record_failure(ValueError())


def test_sys_exit_has_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    record_failure(raised(SystemExit(3)))
    record = read_record(tmp_path / "error.json")
    assert record is not None
    assert (record.message, record.traceback) == ("SystemExit: 3", "")


def test_torchrun_understands_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    record_failure(raised(KeyError("k")))
    theirs = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert theirs.timestamp == int(json.loads(path.read_text())["time"])
    assert "KeyError: 'k'" in str(theirs.message)
