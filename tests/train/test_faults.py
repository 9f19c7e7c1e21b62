"""Ranks that part ways: every one gets an error that says who, where and why, within seconds; never a hang."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import epl
from epl.errors import DeadlineError, RanksDisagreeError
from tests.harness import ROOT, rank_errors


def _ready(timeout: float = 30) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    epl.init(epl.Config({"communication.timeout": timeout}))
    epl.set_default_strategy(epl.replicate(1))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epl.parallelize(model, optimizer)
    return model, optimizer, epl.Env.get().cluster.rank


def _metric_on_rank_0_only():
    model, _, rank = _ready()
    loss = model(torch.ones(1, 2)).sum()
    if rank == 0:
        epl.global_mean(loss)
    loss.backward()


def _one_backward_less():
    model, _, rank = _ready()
    for step in range(3):
        if not (rank == 1 and step == 2):
            model(torch.ones(1, 2)).sum().backward()
    epl.global_mean(1.0)


@pytest.mark.parametrize(
    ("function", "kinds"),
    [(_metric_on_rank_0_only, {"epl.global_mean", "backward"}), (_one_backward_less, {"epl.global_mean", "backward"})],
)
def test_ranks_at_different_places_all_raise_with_both_places(function, kinds):
    errors = rank_errors(function, 2)
    assert errors[0] == errors[1]
    name, message = errors[0]
    assert name == RanksDisagreeError.__name__
    for kind in kinds:
        assert kind in message
    assert message.count("test_faults.py:") == 2


def _silent(seconds: float):
    model, _, rank = _ready(timeout=4)
    model(torch.ones(1, 2)).sum().backward()
    if rank == 1:
        time.sleep(seconds)
        os._exit(0)
    model(torch.ones(1, 2)).sum().backward()


def test_a_silent_rank_is_named_at_the_deadline():
    from tests.harness import finish_ranks

    start = time.monotonic()
    ranks = finish_ranks(_silent, 3, 12.0, timeout=40)
    assert time.monotonic() - start < 30
    for rank in (0, 2):
        kind, (name, message, _), _ = ranks[rank].outcome
        assert (kind, name) == ("error", DeadlineError.__name__)
        assert "Silent: rank 1" in message
        assert "backward of Linear" in message


SCRIPT = """
    import os, sys, time
    import torch
    from torch import nn
    import epl
    epl.init()
    rank = epl.Env.get().cluster.rank
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = epl.parallelize(model, optimizer)
    for step in range(1000):
        optimizer.zero_grad()
        if step == 5 and rank == 1:
            FAULT
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def _launch(tmp_path: Path, fault: str) -> tuple[int, str, str, float]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("FAULT", fault))
    command = [sys.executable, "-m", "epl.launch", "--num_workers", "1", "--gpu_per_worker", "2"]
    command += ["--log_dir", str(tmp_path / "logs"), str(script)]
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    logs = "".join(p.read_text() for p in sorted((tmp_path / "logs").rglob("*")) if p.is_file())
    return done.returncode, done.stderr, logs, time.monotonic() - start


def test_a_rank_that_raises_ends_the_job_with_its_traceback(tmp_path):
    code, stderr, logs, seconds = _launch(tmp_path, "raise ValueError('the cause')")
    assert code == 1
    assert "ValueError: the cause" in stderr
    assert "rank 1" in stderr
    assert seconds < 40
    # The other rank's own log quotes it too, wherever it was waiting.
    assert logs.count("ValueError: the cause") >= 2


def test_a_rank_that_is_killed_ends_the_job(tmp_path):
    code, stderr, _, seconds = _launch(tmp_path, "os.kill(os.getpid(), 9)")
    assert code == 128 + 9
    assert "rank 1" in stderr
    assert "SIGKILL" in stderr
    assert seconds < 40


def test_a_rank_that_ended_early_is_named(tmp_path):
    code, stderr, _, seconds = _launch(tmp_path, "sys.exit(0)")
    assert code == 1
    assert "the script of rank 1 has ended" in stderr
    assert seconds < 40
