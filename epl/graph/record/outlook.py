"""At which sizes a forward is looked at before they come, so that a stream of growing lengths is not worked out at each of them.

Results are foreseen between sizes that were seen (epl.graph.record.shapes), and lengths that only ever grow are never between. So
when a third size of some input goes beyond those before it, the forward is first run at twice that size, or half of it: the
sizes up to there, and that one itself, are between. A forward that fails there (positions have an end) is looked at a little further only, then not at all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from epl.graph.record.shapes import ENOUGH, law_of

Sizes = tuple[int, ...]
"""Of all dims of all inputs, in order."""


@dataclass
class _Stream:
    seen: list[Sizes] = field(default_factory=list)
    """In order; of those that lie between others only the first."""
    reach: float = 1.0
    """How far beyond the last size to look, as a part of it."""


class Outlook:
    """The sizes that calls of one model came in, by what else is the same for them."""

    def __init__(self) -> None:
        self._streams: dict[Hashable, _Stream] = {}

    def beyond(self, kind: Hashable, sizes: Sizes) -> Sizes | None:
        """Note a call; the sizes at which to look at the forward too, if there are any."""
        stream = self._streams.setdefault(kind, _Stream())
        before = list(zip(*stream.seen, strict=True))
        outside = [not min(column) <= size <= max(column) for column, size in zip(before, sizes, strict=bool(before))]
        if sizes in stream.seen or (len(stream.seen) >= ENOUGH and not any(outside)):
            return None
        stream.seen.append(sizes)
        if len(stream.seen) < ENOUGH or not stream.reach:
            return None
        return self._further(stream, list(zip(*stream.seen, strict=True)), sizes)

    def seen(self, kind: Hashable, sizes: Sizes) -> None:
        """The forward was looked at there."""
        self._streams[kind].seen.append(sizes)

    def failed(self, kind: Hashable) -> None:
        """The forward does not work there."""
        stream = self._streams[kind]
        stream.reach = 0.25 if stream.reach > 0.25 else 0.0

    def _further(self, stream: _Stream, columns: Sequence[Sizes], sizes: Sizes) -> Sizes | None:
        found: list[int] = []
        for place, (column, size) in enumerate(zip(columns, sizes, strict=True)):
            law = law_of(column, columns[:place])  # a mask as long as the tokens, or by one longer, stays so
            found.append(law(found) if law is not None else _beyond(column, size, stream.reach))
        return tuple(found) if tuple(found) != sizes else None


def _beyond(column: Sizes, size: int, reach: float) -> int:
    """A size further away than the last one, if that is the largest or smallest of at least three; else the last one."""
    others = set(column) - {size}
    if len(others) < ENOUGH - 1 or min(others) < size < max(others):
        return size
    step = math.gcd(*others, size)
    if size > max(others):
        return size + max(step, int(size * reach) // step * step)
    return max(step, 2 if size >= 2 else 1, int(size / (1 + reach)) // step * step)
