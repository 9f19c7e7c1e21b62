"""Runs a function on several ranks and brings back their values, or the first real traceback.

    values = run_ranks(train, 4, "sgd")      # train("sgd") on ranks 0..3; a list by rank

Ranks are fresh processes forked from a warm server, so nothing leaks from one case into the next. A rank that hangs is made to
print every thread's stack before it is ended, and the case fails with these stacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
_preloaded = ["tests.preload"]
_live: list[_Rank] = []  # ranks of the running case, for the per-test deadline to ask for stacks


class RankFailure(AssertionError):
    """Some rank raised, died or hung. `rank`, `kind` (the exception's class name) and `text` describe the first one."""

    def __init__(self, message: str, *, rank: int, kind: str, text: str, others: Mapping[int, str]) -> None:
        super().__init__(message)
        self.rank, self.kind, self.text, self.others = rank, kind, text, dict(others)


@dataclasses.dataclass
class _Rank:
    rank: int
    process: multiprocessing.process.BaseProcess
    connection: multiprocessing.connection.Connection
    stacks: Path
    outcome: tuple[str, Any, float] | None = None  # ("value" | "error" | "died" | "hung", payload, when)


def run_ranks(
    function: Callable[..., Any],
    nranks: int,
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    per_rank_env: Callable[[int], Mapping[str, str]] | None = None,
) -> list[Any]:
    """`function(*args)` on every rank, with the variables that torchrun would set; values by rank."""
    ranks = finish_ranks(function, nranks, *args, timeout=timeout, env=env, per_rank_env=per_rank_env)
    failures = {r.rank: r.outcome for r in ranks if r.outcome is not None and r.outcome[0] != "value"}
    if failures:
        raise _failure(failures, nranks)
    return [r.outcome[1] for r in ranks if r.outcome is not None]


def rank_errors(function: Callable[..., Any], nranks: int, *args: Any, **options: Any) -> list[tuple[str, str] | None]:
    """For each rank (class name, message) of the error it ended with, or None; for tests of errors on every rank."""
    ranks = finish_ranks(function, nranks, *args, **options)
    found: list[tuple[str, str] | None] = []
    for r in ranks:
        assert r.outcome is not None
        kind, payload, _ = r.outcome
        if kind in ("hung", "died"):
            raise AssertionError(f"rank {r.rank} {kind}: {payload}")
        found.append((payload[0], payload[1]) if kind == "error" else None)
    return found


def finish_ranks(
    function: Callable[..., Any],
    nranks: int,
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    per_rank_env: Callable[[int], Mapping[str, str]] | None = None,
) -> list[_Rank]:
    """Start the ranks, wait for all of them, end what is left; each rank with its outcome."""
    # The parent hosts the store, as torchrun's agent does: no port has to be guessed.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="epl_ranks_") as folder:
        try:
            for rank in range(nranks):
                variables = _torchrun_variables(rank, nranks, store.port) | dict(env or {})
                if per_rank_env is not None:
                    variables |= per_rank_env(rank)
                _live.append(_start(rank, function, args, variables, Path(folder)))
            _collect(_live, time.monotonic() + timeout, timeout)
            return list(_live)
        finally:
            for r in _live:
                if r.process.is_alive():
                    r.process.kill()
                r.process.join()
                r.connection.close()
            _live.clear()


def preload(module: str) -> None:
    """Have ranks start with this module in memory, too. For test modules to call while they are imported: the server that ranks
    are forked from starts with the first of them."""
    _preloaded.append(module)


def live_stacks() -> str:
    """The stacks of every rank that is running now."""
    return "\n".join(f"--- rank {r.rank}\n{_ask_stacks(r)}" for r in _live if r.process.is_alive())


def _torchrun_variables(rank: int, nranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    return context


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Python 3.11's fork server ignores sys.path for what it preloads, but honours PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _start(
    rank: int, function: Callable[..., Any], args: tuple[Any, ...], env: Mapping[str, str], folder: Path
) -> _Rank:
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    stacks = folder / f"stacks_{rank}.txt"
    process = context.Process(target=_rank_main, args=(function, args, dict(env), theirs, str(stacks)))
    with _importable():
        process.start()
    theirs.close()
    return _Rank(rank, process, ours, stacks)


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    env: Mapping[str, str],
    connection: multiprocessing.connection.Connection,
    stacks: str,
) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    file = open(stacks, "w")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    try:
        value = io.BytesIO()
        torch.save(function(*args), value)  # bytes: tensors would otherwise travel through shared memory
        outcome = ("value", value.getvalue(), time.time())
    except BaseException as error:
        outcome = ("error", (type(error).__name__, str(error), traceback.format_exc()), time.time())
    connection.send(outcome)
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must go at once, as a crashed script does: its peers notice by the closed sockets.
    os._exit(0 if outcome[0] == "value" else 1)


def _collect(ranks: list[_Rank], deadline: float, timeout: float) -> None:
    waiting = {r.connection: r for r in ranks}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready:
            r = waiting.pop(connection)  # type: ignore[call-overload]
            try:
                kind, payload, when = r.connection.recv()
                if kind == "value":
                    payload = torch.load(io.BytesIO(payload), weights_only=False)
                r.outcome = (kind, payload, when)
            except EOFError:
                r.process.join(5)
                r.outcome = ("died", f"exit code {r.process.exitcode}, no value returned", time.time())
        if not ready:
            for r in waiting.values():
                r.outcome = ("hung", f"no answer within {timeout} s\n{_ask_stacks(r)}", float("inf"))
            return


def _ask_stacks(r: _Rank) -> str:
    if r.process.pid is None or not r.process.is_alive():
        return "(gone)"
    os.kill(r.process.pid, signal.SIGUSR1)
    for _ in range(20):
        time.sleep(0.05)
        if r.stacks.exists() and r.stacks.stat().st_size:
            return r.stacks.read_text()
    return "(no answer: the process is not running Python)"


def _failure(failures: Mapping[int, tuple[str, Any, float]], nranks: int) -> RankFailure:
    order = sorted(failures.items(), key=lambda item: item[1][2])
    texts = {rank: payload[2] if kind == "error" else str(payload) for rank, (kind, payload, _) in order}
    first, (kind, payload, _) = order[0]
    name = payload[0] if kind == "error" else kind
    others = {rank: text for rank, text in texts.items() if rank != first}
    also = "".join(f"\n--- rank {rank}, later\n{text}" for rank, text in others.items())
    message = f"rank {first} of {nranks} failed first ({name})\n{texts[first]}{also}"
    return RankFailure(message, rank=first, kind=name, text=texts[first], others=others)
