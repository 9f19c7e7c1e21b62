"""Running an example as a user does: a command of its own, in a folder of its own."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAUNCH = (sys.executable, "-m", "epl.launch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def run(*command: str | Path, folder: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The finished command, whatever its exit code; one thread per process, epl as it is in this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"} | dict(env or {})
    return subprocess.run(
        [str(word) for word in command], cwd=folder, env=variables, capture_output=True, text=True, timeout=110
    )


def output(*command: str | Path, folder: Path, env: Mapping[str, str] | None = None) -> str:
    """What a command that succeeds writes to its standard output."""
    ended = run(*command, folder=folder, env=env)
    assert ended.returncode == 0, f"{command} ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def printed_by(script: str) -> str:
    """What a script prints when this very process runs it; for `run_ranks`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(script, run_name="__main__")
    return out.getvalue()
