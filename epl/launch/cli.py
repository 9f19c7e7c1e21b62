"""The `epl-launch` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from epl.errors import LaunchError
from epl.launch.job import run_job
from epl.launch.options import parse

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the whole job: 0, the first failing rank's, 128 + signal, or 2 for what cannot be launched."""
    try:
        return run_job(parse(sys.argv[1:] if argv is None else argv))
    except LaunchError as error:
        print(f"epl-launch: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
