"""A whole job on this machine: attempts, until one succeeds or none is left."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from epl.launch.command import rank_command, rank_variables, write_shims
from epl.launch.live import LiveView
from epl.launch.logs import JobLogs, open_logs
from epl.launch.machines import LOOPBACK, MachineLostError, Machines, StoppedError, join
from epl.launch.options import Options
from epl.launch.outcome import Cause, explain, first_cause, first_failure, read_end
from epl.launch.stop import StopRequest

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def run_job(options: Options) -> int:
    """Run the job and wait for it; its exit code."""
    logs = open_logs(options)
    _announce(options, logs)
    with StopRequest() as stop, tempfile.TemporaryDirectory(prefix="epl-launch-") as shims:
        write_shims(Path(shims))
        with _elastic_settings():
            try:
                machines = join(options, stop)
                code = _attempts(options, logs, machines, stop, Path(shims))
                machines.leave()
            except StoppedError:
                assert stop.signal is not None
                _say(f"stopped by {stop.signal.name} before the ranks started")
                return 128 + stop.signal
            except MachineLostError as error:
                _say(f"{error}; this machine's ranks are ended. Logs: {logs.root}")
                return 1
    return code


def _attempts(options: Options, logs: JobLogs, machines: Machines, stop: StopRequest, shims: Path) -> int:
    variables = rank_variables(options, os.environ, shims, cores=len(os.sched_getaffinity(0)))
    attempt = 0
    while cause := _one_attempt(options, logs, machines, stop, variables, attempt):
        _report(cause, options, attempt)
        if cause.final or attempt == options.max_restarts:
            return cause.exit_code
        attempt += 1
    return 0


def _one_attempt(
    options: Options,
    logs: JobLogs,
    machines: Machines,
    stop: StopRequest,
    variables: Mapping[str, str],
    number: int,
) -> Cause | None:
    """Run every rank once; the first cause on any machine, or None if all succeeded."""
    from epl.launch.agent import Attempt, host_rank_store, run_attempt

    host = options.machines[0].host if options.machines else LOOPBACK
    store: TCPStore | None = host_rank_store(host) if options.machine_rank == 0 else None
    port = machines.meet(number, str(store.port) if store else None)
    attempt = Attempt(number, rank_command(options), variables, (host, int(port)), logs)
    with _live_view(options, logs, number):
        agent_codes = run_attempt(options, attempt, lambda: stop.signal is not None or machines.is_down(number))
    causes = machines.exchange(number, _local_cause(options, logs, stop, number, agent_codes))
    return first_cause(causes)


def _local_cause(
    options: Options, logs: JobLogs, stop: StopRequest, attempt: int, agent_codes: Mapping[int, int]
) -> Cause | None:
    if stop.signal is not None:
        return Cause(
            machine=options.machine_rank,
            rank=None,
            exit_code=128 + stop.signal,
            what=f"stopped by {stop.signal.name}",
            detail="",
            time=time.time(),
            consequence=False,
            logs=str(logs.root),
            final=True,
        )
    ends = [read_end(rank, logs.of(attempt, rank), agent_codes.get(rank)) for rank in options.local_ranks]
    end = first_failure(ends)
    if end is None or not (agent_codes or end.record):
        return None  # all well here, or ended because of another machine, which will say why
    return explain(end, logs.of(attempt, end.rank), options.machine_rank, live=_is_live(options, end.rank))


def _is_live(options: Options, rank: int) -> bool:
    return options.debug or rank == 0


@contextlib.contextmanager
def _live_view(options: Options, logs: JobLogs, attempt: int) -> Iterator[None]:
    """Rank 0's output on this terminal; with --debug every rank's, behind its number."""
    sys.stdout.flush()
    view = LiveView()
    for rank in options.local_ranks:
        if _is_live(options, rank):
            files, prefix = logs.of(attempt, rank), f"[{rank}]: " if options.debug else ""
            view.follow(files.stdout, 1, prefix)
            view.follow(files.stderr, 2, prefix)
    view.start()
    try:
        yield
    finally:
        view.stop()


@contextlib.contextmanager
def _elastic_settings() -> Iterator[None]:
    """Elastic's settings in our environment, and its loggers silent: what users need to know, we say."""
    import torch.distributed.elastic  # noqa: F401  (its loggers exist now)

    from epl.launch.agent import ELASTIC_SETTINGS

    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    loggers = [logging.getLogger(name) for name in names]
    before = {name: os.environ.get(name) for name in ELASTIC_SETTINGS}
    disabled = [logger.disabled for logger in loggers]
    os.environ.update(ELASTIC_SETTINGS)
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was in zip(loggers, disabled, strict=True):
            logger.disabled = was
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _announce(options: Options, logs: JobLogs) -> None:
    workers = f"{options.num_workers} worker{'s' if options.num_workers > 1 else ''}"
    processes = f"{options.gpu_per_worker} process{'es' if options.gpu_per_worker > 1 else ''}"
    here = ""
    if options.machine_count > 1:
        first, last = options.local_ranks[0], options.local_ranks[-1]
        here = f"; this is machine {options.machine_rank}, ranks {first} to {last}"
        if options.machine_rank > 0 and not options.debug:
            here += " (rank 0 is shown on machine 0)"
    _say(f"{workers} × {processes} of {options.script}{here}; logs: {logs.root}")


def _report(cause: Cause, options: Options, attempt: int) -> None:
    """Say once what went wrong, and whether it is tried again."""
    where = f" (machine {cause.machine})" if options.machine_count > 1 else ""
    if cause.rank is None:
        own = cause.machine == options.machine_rank
        _say(f"{cause.what}{'' if own else f' on machine {cause.machine}'}; all ranks are ended. Logs: {cause.logs}")
        return
    number = f" in attempt {attempt + 1} of {options.max_restarts + 1}" if options.max_restarts else ""
    _say(f"rank {cause.rank}{where} {cause.what}{number}" + (":" if cause.detail else ""))
    if cause.detail:
        print(cause.detail, file=sys.stderr)
    _say(f"logs of rank {cause.rank}{where}: {cause.logs}")
    if attempt < options.max_restarts:
        _say(f"starting all ranks again: attempt {attempt + 2} of {options.max_restarts + 1}")


def _say(text: str) -> None:
    print(f"epl-launch: {text}", file=sys.stderr, flush=True)
