"""What the loaders need from communication: two calls on small Python values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from epl.errors import DataError


class Exchange(Protocol):
    """Talks with all ranks that feed the same model; every rank makes the same calls in the same order."""

    def all_gather(self, value: object) -> list[object]:
        """Every rank's value, in rank order."""

    def broadcast(self, value: object) -> object:
        """Rank 0's value."""


class NoOthers:
    """The exchange of a rank that is alone."""

    def all_gather(self, value: object) -> list[object]:
        return [value]

    def broadcast(self, value: object) -> object:
        return value


def gather_or_fail(exchange: Exchange, make: Callable[[], object], what: str) -> list[object]:
    """Every rank's `make()`; if it raises on some rank, that rank raises its own error and the others a `DataError`.

    So a rank whose dataset or sampler fails does not leave the others waiting for its word.
    """
    try:
        said: tuple[bool, object] = (True, make())
    except Exception as error:
        exchange.all_gather((False, f"{type(error).__name__}: {error}"))
        raise
    words: list[tuple[bool, object]] = exchange.all_gather(said)  # type: ignore[assignment]
    failed = {rank: text for rank, (fine, text) in enumerate(words) if not fine}
    if failed:
        rank, text = next(iter(failed.items()))
        raise DataError(f"{what} failed on rank {rank}: {text}\nIts own traceback is in that rank's log.")
    return [value for _, value in words]
