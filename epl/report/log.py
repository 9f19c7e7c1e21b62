"""What epl tells the user while it runs: notices once, from rank 0; warnings with the rank that gives them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

logger = logging.getLogger("epl")
_said: set[str] = set()


class _Handler(logging.Handler):
    """Writes to whatever sys.stderr is now: people, and pytest, replace it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._prefix = "epl: " if rank == 0 else f"epl, rank {rank}: "

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        lines = f"{level}{record.getMessage()}".splitlines()
        print("\n".join(self._prefix + line for line in lines), file=sys.stderr, flush=True)


def set_up_log(rank: int) -> None:
    """Rank 0 speaks from INFO on, the others from WARNING on; a handler or level the user has set is left alone."""
    _said.clear()
    ours = [handler for handler in logger.handlers if isinstance(handler, _Handler)]
    for handler in ours:
        logger.removeHandler(handler)
    if not logger.handlers:
        logger.addHandler(_Handler(rank))
        logger.propagate = False
    if ours or logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def notice(text: str, what: str = "") -> None:
    """Tell the user something worth knowing, once, on rank 0. `what`: what is said once, if its text may differ (by sizes)."""
    if (what or text) not in _said:
        _said.add(what or text)
        logger.info(text)


def warn(text: str) -> None:
    """Tell the user of something that is probably not meant, once per rank."""
    if text not in _said:
        _said.add(text)
        logger.warning(text)


class Patience:
    """Tells the user, every now and then, how far something is that takes long."""

    def __init__(self, seconds: float = 2.0) -> None:
        """`seconds`: until the first word; each pause is twice as long as the one before."""
        self._began, self._next = time.monotonic(), seconds

    def tell(self, so_far: Callable[[], str]) -> None:
        """`so_far()`, if it is time."""
        passed = time.monotonic() - self._began
        if passed > self._next:
            self._next = 2 * passed
            logger.info(f"{so_far()}, after {passed:.0f} s")
