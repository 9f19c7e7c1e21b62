"""Measuring several variants of the same work: time interleaved in the same processes, memory in fresh ones."""

from __future__ import annotations

import ctypes
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .ranks import say


def interleave(variants: Mapping[str, Callable[[], object]], rounds: int, label: str = "") -> dict[str, list[float]]:
    """Seconds of every variant in every round; called on all ranks together.

    A round runs each variant once, all ranks starting together. The order is shuffled, and turned round in every second
    round, so that no variant is always the one that finds the caches, or the machine, in a certain state.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    shuffler = random.Random(0)  # the same order on every rank
    order = list(variants)
    for done in range(rounds):
        if done % 2:
            order.reverse()
        else:
            shuffler.shuffle(order)
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - start)
        say(f"{label}: {done + 1} of {rounds} rounds, the last took {sum(s[-1] for s in seconds.values()):.2f} s")
    return seconds


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """For every variant and round the seconds of the rank that took longest."""
    return {name: [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}


def peak_memory(work: Callable[[], object]) -> int:
    """Bytes of resident memory that `work` needs at its peak, above what the process has before; once per process."""
    _use_torch_once()
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def return_freed_memory() -> None:
    """Have glibc give large blocks back once they are free: else the peak is as much its luck as it is what was needed."""
    glibc = ctypes.CDLL(None)
    if hasattr(glibc, "mallopt"):
        glibc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD, which then no longer grows by itself
        glibc.mallopt(-1, 1 << 16)  # M_TRIM_THRESHOLD


def limit_memory(room: int) -> None:
    """From here on this process gets no more than so many bytes above what it has: then torch says that it cannot allocate."""
    _use_torch_once()
    limit = _status("VmData") + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def bytes_sent(work: Callable[[], object]) -> int:
    """Bytes that this process writes while it works: over gloo's sockets, if it writes no files."""
    before = _written()
    work()
    return _written() - before


def _written() -> int:
    return _number_after("wchar", Path("/proc/self/io"))


def _use_torch_once() -> None:
    """What torch sets up when first used belongs to the library, not to the model."""
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(1))


def _status(field: str) -> int:
    return _number_after(field, Path("/proc/self/status")) << 10


def _number_after(field: str, path: Path) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{field}:"))
