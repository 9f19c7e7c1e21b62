"""Runs a function on several ranks of this machine, one thread each, in fresh processes.

    values = run_ranks(measure, 2, workload)      # measure(workload) on ranks 0 and 1, with what torchrun would set

Processes are forked from a server that has torch and epl imported: starting them takes a third of a second, and what they
use for the libraries is the same in all of them. Rank 0 may call `say(text)` to show how far it is.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
_say: Callable[[str], None] = lambda text: None  # noqa: E731


class RankFailed(RuntimeError):
    """A rank raised or died; the text is its traceback."""


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`function(*args)` on every rank; the values by rank, or the first failure."""
    context = _context()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, so that no port has to be guessed
    processes, values, waiting = [], [None] * ranks, {}
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(function, args, rank, ranks, store.port, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            waiting[ours] = rank
        while waiting:
            for connection in multiprocessing.connection.wait(list(waiting)):
                rank = waiting[connection]
                try:
                    kind, payload = connection.recv()
                except EOFError:
                    kind, payload = "error", "it ended without a word (killed?)"
                if kind == "said":
                    show(payload)
                    continue
                if kind == "error":
                    raise RankFailed(f"rank {rank} of {ranks}: {payload}")
                values[rank] = payload
                del waiting[connection]
        return values
    finally:
        clear()
        for process in processes:
            if waiting:
                process.kill()
            process.join()


def say(text: str) -> None:
    """Show where the measurement is; heard from rank 0 only."""
    _say(text)


def show(text: str) -> None:
    """In the terminal the line before is replaced; in a log there is one line each."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def clear() -> None:
    """Take the last progress line away."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo is imported by the first optimizer anyway; here it counts as library, not as the model's memory.
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel.distributed", "epl"])
    for name in [name for name in os.environ if name.startswith("EPL_")]:
        del os.environ[name]  # settings of the user's would change what is measured
    # The server reads these when it starts. Python 3.11's ignores sys.path for what it preloads, and would look into the
    # working directory first.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    return context


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    ranks: int,
    port: int,
    connection: multiprocessing.connection.Connection,
) -> None:
    global _say
    import torch

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "benchmark",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    torch.set_num_threads(1)
    if rank == 0:
        _say = lambda text: connection.send(("said", text))  # noqa: E731
    try:
        outcome = ("value", function(*args))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    connection.send(outcome)
    connection.close()
    sys.stderr.flush()
    os._exit(0 if outcome[0] == "value" else 1)  # a rank that failed goes at once, so that its peers notice
