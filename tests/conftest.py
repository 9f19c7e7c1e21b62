"""House rules for every test: a deadline that prints all stacks, and nothing left behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist
import tqdm

from tests import harness

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
hypothesis.settings.register_profile("epl", deadline=None)  # nothing is timed: other work may run beside
hypothesis.settings.load_profile("epl")
tqdm.tqdm.monitor_interval = 0  # progress bars (of transformers, of torch's compiler) would leave a thread behind
DEADLINE = 120.0


class DeadlinePassed(Exception):
    pass


@pytest.fixture(autouse=True)
def deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that takes too long, with the stacks of this process and of every rank."""
    marker = request.node.get_closest_marker("deadline")
    seconds = marker.args[0] if marker else DEADLINE

    def passed(signum: int, frame: object) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            own = file.read()
        raise DeadlinePassed(f"{seconds} s are over\n--- this process\n{own}\n{harness.live_stacks()}")

    before = signal.signal(signal.SIGALRM, passed)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test ends with the processes, threads, process groups and environment it began with."""
    children, threads, environment = _children(), set(threading.enumerate()), dict(os.environ)
    yield
    problems = []
    if dist.is_initialized():
        problems.append("the default process group is still there")
        dist.destroy_process_group()
    if left := _children() - children:
        problems.append(f"child processes: {[_command(pid) for pid in left]}")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    started = set(threading.enumerate()) - threads
    for thread in started:  # those of a pool that was let go of (transformers' loading) end a moment later
        thread.join(timeout=2)
    if started := {t for t in started if t.is_alive()}:
        problems.append(f"threads: {started}")
    if changed := {k for k in os.environ.keys() | environment.keys() if os.environ.get(k) != environment.get(k)}:
        changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # set by pytest, and by torch's compiler
        if changed:
            problems.append(f"environment variables: {sorted(changed)}")
            os.environ.clear()
            os.environ.update(environment)
    assert not problems, f"left behind: {'; '.join(problems)}"


def _children() -> set[int]:
    """Direct children that still run, without multiprocessing's own servers, which serve the whole session."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may end while we look
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    own_servers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    return {pid for pid in found if not any(server in _command(pid) for server in own_servers)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return f"<gone {pid}>"


def pytest_collection_finish() -> None:
    """What has been imported stays: full collections in the tests need not walk through it each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the whole products to `make test-full` (which says -m full)."""
    if config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
