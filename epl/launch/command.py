"""How a script becomes a process: its command line, its variables, and what `python` means inside a shell script."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from epl.launch.options import Options

_HERE = Path(__file__).resolve().parent
ENTRY = _HERE / "entry.py"
KEEPER = _HERE / "keeper.py"

# A shim, not a symbolic link: a linked interpreter looks for its venv where the link is.
_SHIM = """#!/bin/sh
# `python` inside a script started by epl-launch: the launcher's own interpreter; a .py also gets its error recorded.
case "$1" in
    *.py) exec {python} {entry} "$@" ;;
    -u) case "$2" in *.py) shift; exec {python} -u {entry} "$@" ;; esac ;;
esac
# The script goes on, so it has survived what an earlier program may have recorded.
[ -z "$TORCHELASTIC_ERROR_FILE" ] || rm -f -- "$TORCHELASTIC_ERROR_FILE"
exec {python} "$@"
"""


def rank_command(options: Options) -> list[str]:
    """The command of every rank: its keeper, which runs the script."""
    script = str(options.script)
    if options.script.suffix == ".py":
        command = [sys.executable, str(ENTRY), script]
    elif options.script.suffix == ".sh":
        command = ["bash", script]
    else:
        command = [os.path.abspath(script)]
    # -I -S: the keeper needs the standard library only, whatever the user's variables say.
    return [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid()), *command, *options.script_args]


def rank_variables(options: Options, environ: Mapping[str, str], shims: Path, cores: int) -> dict[str, str]:
    """What every rank gets on top of the launcher's environment and elastic's variables."""
    variables = {
        "EPL_LAUNCH_NUM_WORKERS": str(options.num_workers),
        "EPL_LAUNCH_GPU_PER_WORKER": str(options.gpu_per_worker),
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_NUM_THREADS" not in environ:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // options.local_size))
    if options.script.suffix != ".py":
        variables["PATH"] = os.pathsep.join([str(shims), environ.get("PATH", os.defpath)])
    return variables


def write_shims(directory: Path) -> None:
    """Put `python` and `python3` into `directory`; first on PATH, they mean the launcher's own interpreter."""
    text = _SHIM.format(python=shlex.quote(sys.executable), entry=shlex.quote(str(ENTRY)))
    for name in ("python", "python3"):
        shim = directory / name
        shim.write_text(text)
        shim.chmod(0o755)
