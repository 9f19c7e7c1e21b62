"""The order in which samples are visited, drawn once and the same on every rank.

Samplers are drawn in windows: far enough ahead to compare ranks and to change random states seldom, yet lazily, so that
a sampler without end or length works.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import cast

import torch

from epl.data.exchange import Exchange, gather_or_fail
from epl.data.rng import RngStream, running
from epl.errors import DataError

WINDOW = 1024  # indices drawn at once, at least
_log = logging.getLogger("epl")
_Word = tuple[str, str, int | None, bool]  # place, digest of the first window, steps, whether the order has an end


def lazily(iterable: Iterable[object]) -> Iterator[object]:
    """Iterates only when first asked: torch's own batch sampler asks a sampler for its iterator at the first batch."""
    yield from iterable


class Order(Iterator[object]):
    """What a sampler yields: indices, or with `batches` lists of them."""

    def __init__(
        self, source: Iterator[object], stream: RngStream | None, *, group: int, batches: bool, ahead: bool
    ) -> None:
        self.stream = stream
        self._source: Iterator[object] | None = source
        self._group, self._batches = group, batches
        self._least = WINDOW if ahead else 0
        self._window: deque[object] = deque()

    def __next__(self) -> object:
        if not self._window:
            self._draw()
        if not self._window:
            raise StopIteration
        return self._window.popleft()

    def groups(self) -> Iterator[list[object]]:
        """One list for each global batch; the last one may be shorter."""
        while group := list(itertools.islice(self, self._group)):
            yield group

    def agree(self, exchange: Exchange, *, place: str, steps: int | None) -> bool:
        """Make sure that all ranks visit the same samples in as many steps; False if rank 0's order had to be taken."""

        def word() -> _Word:
            self._draw()
            return place, _digest(self._window), steps, steps is not None or self._source is None

        words = gather_or_fail(exchange, word, f"the sampler of {place}")
        check_places(words)
        if all(w == words[0] for w in words):
            return True
        _, digest, their_steps, finite = cast("_Word", words[0])
        if not finite:
            raise DataError(
                f"{place}: expected a sampler that yields the same order on every rank, found other first indices on "
                f"ranks {_unlike(words)} than on rank 0, and no length by which rank 0's order could be sent around. "
                "Draw from torch's, numpy's or Python's global generators (epl gives all ranks rank 0's state), or "
                "seed the sampler's own generator alike on every rank, or give the sampler a __len__."
            )
        like_first = (digest, their_steps) == (_digest(self._window), steps)
        self._take_first_rank(exchange, like_first=like_first, place=place)
        return False

    def _take_first_rank(self, exchange: Exchange, *, like_first: bool, place: str) -> None:
        """Rank 0's whole order instead of this rank's own. Ranks that look like rank 0 draw theirs too, in vain."""
        try:
            whole = (True, list(self) if like_first else None)
        except Exception as error:
            exchange.broadcast((False, f"{type(error).__name__}: {error}"))
            raise
        fine, order = cast("tuple[bool, object]", exchange.broadcast(whole))
        if not fine:
            raise DataError(f"the sampler of {place} failed on rank 0: {order}")
        self._source, self._window = None, deque(cast("list[object]", order))

    def _draw(self) -> None:
        """Put the next window into `_window`."""
        if self._source is None:
            return
        indices = units = 0
        with running(self.stream):
            while units < self._group or indices < self._least:
                try:
                    unit = next(self._source)
                except StopIteration:
                    self._source = None
                    return
                if self._batches:
                    unit = list(unit)  # type: ignore[call-overload]  # a batch sampler yields iterables of indices
                self._window.append(unit)
                units += 1
                indices += len(unit) if isinstance(unit, list) else 1


def check_places(words: list[object]) -> None:
    """Raise if ranks are not at the same epoch of the same loader; a word is a tuple that starts with its place."""
    places = [w[0] for w in words if isinstance(w, tuple)]
    if len(set(places)) > 1:
        found = "\n".join(f"  rank {rank}: {place}" for rank, place in enumerate(places))
        raise DataError(
            f"expected all ranks to iterate the same loader together, found\n{found}\n"
            "Iterate a loader that epl divides on every rank, not under `if rank == 0`."
        )


def warn_taken(place: str) -> None:
    """Say that rank 0's order is used, and what may be behind it."""
    _log.warning(
        "%s: its sampler yields another order on every rank; rank 0's is used on all of them. If the sampler divides "
        "the samples between ranks itself, leave that to epl: give it the whole dataset.",
        place,
    )


def _digest(window: Iterable[object]) -> str:
    text = repr([unit.tolist() if isinstance(unit, torch.Tensor) else unit for unit in window])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _unlike(words: list[object]) -> list[int]:
    return [rank for rank, word in enumerate(words) if word != words[0]]
