"""Loaders with workers end a moment after their last batch; the house rule "nothing left behind" is checked after that."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def workers_have_ended() -> Iterator[None]:
    yield
    gc.collect()  # an error's traceback may hold the last reference to a loader's iterator
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (multiprocessing.active_children() or _feeders()):
        time.sleep(0.01)


def _feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "QueueFeederThread"]
