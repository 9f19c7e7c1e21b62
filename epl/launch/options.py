"""What `epl-launch` was asked to do, checked all at once."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epl.errors import LaunchError, list_problems

WITH_VALUE = {
    "--num_workers": ("N", "workers (machines, when --machine_list is given)"),
    "--gpu_per_worker": ("G", "devices of each worker; one process per device"),
    "--machine_list": ("ip:port,…", "one entry per worker, the same on every machine; they meet at the first entry"),
    "--machine_rank": ("i", "which entry of --machine_list this machine is"),
    "--log_dir": ("D", "where output is kept (default: experiments/<date>_<N>w<G>g_<script>[_label])"),
    "--task_label": ("L", "a word added to the name of the default log directory"),
    "--max_restarts": ("n", "start the whole job again after a failure, at most n times (default: 0)"),
}


@dataclass(frozen=True)
class Machine:
    """One entry of --machine_list."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Options:
    """A job as it was asked for. Without --machine_list every worker is on this machine and `machines` is empty."""

    num_workers: int
    gpu_per_worker: int
    script: Path
    script_args: tuple[str, ...] = ()
    machines: tuple[Machine, ...] = ()
    machine_rank: int = 0
    log_dir: Path | None = None
    task_label: str = ""
    debug: bool = False
    max_restarts: int = 0

    @property
    def machine_count(self) -> int:
        return max(1, len(self.machines))

    @property
    def local_size(self) -> int:
        """How many ranks run on this machine."""
        return self.num_workers * self.gpu_per_worker // self.machine_count

    @property
    def local_ranks(self) -> range:
        """The ranks of this machine: rank 0 is on machine 0, and so on in the order of --machine_list."""
        return range(self.machine_rank * self.local_size, (self.machine_rank + 1) * self.local_size)


def parse(argv: Sequence[str]) -> Options:
    """The options in `argv`; what follows the script is the script's own. One LaunchError names every problem."""
    parser = _parser()
    head, script, script_args = _split(argv)
    try:
        values, unknown = parser.parse_known_args(head)
    except argparse.ArgumentError as error:
        raise LaunchError(f"{error}. `epl-launch --help` shows every option.") from None
    problems = [_unknown(name) for name in unknown if name.startswith("-")]
    num_workers = _integer("--num_workers", values.num_workers, 1, problems)
    gpu_per_worker = _integer("--gpu_per_worker", values.gpu_per_worker, 1, problems)
    max_restarts = _integer("--max_restarts", values.max_restarts or "0", 0, problems)
    machines = _machines(values.machine_list or "", num_workers, problems)
    machine_rank = _machine_rank(values.machine_rank, machines, problems)
    if values.task_label and not re.fullmatch(r"[\w.-]+", values.task_label):
        problems.append(
            f"--task_label becomes part of a directory name: expected letters, digits, '_', '.', '-', "
            f"found {values.task_label!r}"
        )
    if values.log_dir and Path(values.log_dir).exists() and not Path(values.log_dir).is_dir():
        problems.append(f"--log_dir: expected a directory or a new path, found the file {values.log_dir}")
    if not unknown:  # after an unknown option nobody knows which word was meant as the script
        problems += _script_problems(script)
    if problems:
        raise LaunchError(list_problems("cannot launch", problems))
    assert script is not None
    return Options(
        num_workers=num_workers,
        gpu_per_worker=gpu_per_worker,
        script=Path(script),
        script_args=tuple(script_args),
        machines=machines,
        machine_rank=machine_rank,
        log_dir=Path(values.log_dir) if values.log_dir else None,
        task_label=values.task_label or "",
        debug=values.debug,
        max_restarts=max_restarts,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="epl-launch",
        usage="epl-launch --num_workers N --gpu_per_worker G [options] script [arguments of the script]",
        description="Run a training script (.py or .sh) once per device, and wait for all of them.",
        epilog="Everything after the script is handed to it unchanged. Exit code: 0, or that of the rank that failed "
        "first (128 + signal), or 2 if the job could not be launched as asked.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    for name, (metavar, meaning) in WITH_VALUE.items():
        # Numbers stay text here: _integer reports all wrong ones together, argparse would stop at the first.
        parser.add_argument(name, metavar=metavar, help=meaning)
    parser.add_argument("--debug", action="store_true", help="show every rank live, each line with its [rank]:")
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Our words, the script, its words: the script is the first word that is no option and no option's value."""
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        at += 2 if argv[at] in WITH_VALUE else 1
    at = min(at, len(argv))
    return list(argv[:at]), argv[at] if at < len(argv) else None, list(argv[at + 1 :])


def _unknown(name: str) -> str:
    name = name.split("=")[0]
    nearest = difflib.get_close_matches(name, [*WITH_VALUE, "--debug"], n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "`epl-launch --help` shows every option."
    return f"unknown option {name}: {hint} Options of the script go after the script."


def _integer(name: str, text: str | None, least: int, problems: list[str]) -> int:
    if text is None:
        problems.append(f"{name} is missing: add `{name} 1` (or how many there are)")
    elif not re.fullmatch(r"\d+", text) or int(text) < least:
        problems.append(f"{name}: expected a whole number of at least {least}, found {text!r}")
    else:
        return int(text)
    return least


def _machines(text: str, num_workers: int, problems: list[str]) -> tuple[Machine, ...]:
    if not text:
        return ()
    machines = []
    for entry in text.split(","):
        match = re.fullmatch(r"\s*(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>\d+)\s*", entry)
        if match and 0 < int(match["port"]) < 65536:
            machines.append(Machine(match["v6"] or match["host"], int(match["port"])))
        else:
            problems.append(f"--machine_list: expected entries like 10.0.0.1:29500 (port 1 to 65535), found {entry!r}")
    if len(text.split(",")) != num_workers:
        problems.append(
            f"--machine_list: expected one entry per worker, {num_workers} as --num_workers says, "
            f"found {len(text.split(','))}; change one of the two"
        )
    if repeated := sorted({str(m) for m in machines if machines.count(m) > 1}):
        problems.append(f"--machine_list: each machine once, found again: {', '.join(repeated)}")
    return tuple(machines)


def _machine_rank(text: str | None, machines: tuple[Machine, ...], problems: list[str]) -> int:
    if text is None:
        if len(machines) > 1:
            problems.append(
                "--machine_list needs --machine_rank, so that each machine knows which entry it is: "
                + ", ".join(f"`--machine_rank {i}` on {machine.host}" for i, machine in enumerate(machines))
            )
        return 0
    if not machines:
        problems.append("--machine_rank needs --machine_list ip:port,… (or leave it out: all workers run here)")
        return 0
    rank = _integer("--machine_rank", text, 0, problems)
    if rank >= len(machines):
        problems.append(f"--machine_rank: expected 0 to {len(machines) - 1} for {len(machines)} machines, found {rank}")
    return rank


def _script_problems(script: str | None) -> list[str]:
    if script is None:
        return ["the script is missing: name a .py or .sh file after the options"]
    path = Path(script)
    if not path.is_file():
        found = "a directory" if path.is_dir() else "nothing there"
        return [f"the script {script}: expected a file, found {found} (looked from {Path.cwd()})"]
    if not os.access(path, os.R_OK):
        return [f"the script {script} cannot be read: `chmod u+r {script}`"]
    if path.suffix in (".py", ".sh") or runs_by_itself(path):
        return []
    return [
        f"the script {script}: expected a .py or .sh file, or an executable that starts with #!, found neither; "
        f"rename it, or give it a first line such as `#!/usr/bin/env bash` and `chmod +x {script}`"
    ]


def runs_by_itself(path: Path) -> bool:
    """Whether the file is executable and names its own interpreter."""
    if not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        return file.read(2) == b"#!"
