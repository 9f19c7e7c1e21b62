"""Where each rank's output is kept.

<log_dir>/attempt_0/rank_0/stdout.log
                          /stderr.log
                          /error.json   the exception that ended it, if one did   (failure.py)
                          /exit.json    how and when it ended                     (keeper.py)
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from epl.errors import LaunchError
from epl.launch.options import Options


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank in one attempt."""

    directory: Path

    @property
    def stdout(self) -> Path:
        return self.directory / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.directory / "stderr.log"

    @property
    def error(self) -> Path:
        return self.directory / "error.json"

    @property
    def exit(self) -> Path:
        return self.directory / "exit.json"


@dataclass(frozen=True)
class JobLogs:
    """The directory of one job."""

    root: Path

    def of(self, attempt: int, rank: int) -> RankFiles:
        return RankFiles(self.root / f"attempt_{attempt}" / f"rank_{rank}")


def open_logs(options: Options) -> JobLogs:
    """A directory ready for this job: the one asked for, or a new one under `experiments/`."""
    try:
        if options.log_dir is None:
            return JobLogs(_new_directory(default_name(options, time.localtime())))
        options.log_dir.mkdir(parents=True, exist_ok=True)
        for rank in options.local_ranks:  # a directory used again holds the last job only
            for old in options.log_dir.glob(f"attempt_*/rank_{rank}"):
                shutil.rmtree(old)
        return JobLogs(options.log_dir)
    except OSError as error:
        raise LaunchError(f"cannot write logs: {error}; name a directory that can be written with --log_dir") from error


def default_name(options: Options, now: time.struct_time) -> Path:
    """`experiments/<date>_<N>w<G>g_<script>[_label]`."""
    name = "_".join(
        [
            time.strftime("%Y%m%d-%H%M%S", now),
            f"{options.num_workers}w{options.gpu_per_worker}g",
            options.script.stem,
            *([options.task_label] if options.task_label else []),
        ]
    )
    return Path("experiments") / name


def _new_directory(wanted: Path) -> Path:
    wanted.parent.mkdir(parents=True, exist_ok=True)
    path, number = wanted, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:  # another job of the same second
            number += 1
            path = wanted.with_name(f"{wanted.name}_{number}")
