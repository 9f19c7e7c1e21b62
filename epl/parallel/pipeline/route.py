"""Which lane sends which other what, on an edge between stages of any two widths: arithmetic on plain numbers.

    5 rows, widths 2 → 3     makers 0 1 2 | 3 4        lane 0 → 0: rows 0 1      lane 1 → 1: row 3
                             users  0 1 | 2 3 | 4      lane 0 → 1: row 2         lane 1 → 2: row 4

The gradients of the rows go back the same way. A lane without rows of its own (fewer rows than lanes) computes a neighbour's
row at weight 0: the user gets it from the lane that has it, and what it returns does not count; the maker sends no rows, and
learns from the lane that has the row whether there are gradients at all.

The lanes of a stage that is *copied* (a `split`) all have the same rows, all of them, and the same gradients:

    copied makers    each user takes the rows from one lane; every lane gets the gradients of all users      (`sends` is False on the others)
    copied users     each lane takes all rows; a maker gets the gradients of one of them                     (`counts` is False on the others)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from epl.plan.batch import RowDim, Rows, flat, share_rows

Layout = RowDim | Literal["same", "average"]
"""How a tensor carries the batch: the dim with its rows; "same", it does not and is alike on all lanes; or "average", it depends on the
batch without a batch dim (an auxiliary loss), and the average over the lanes, weighted by their rows, is meant."""


@dataclass(frozen=True)
class Share:
    """What one lane sends another of one tensor."""

    tensor: int
    """Its place in the value."""
    weight: float = 1.0
    """Of a whole tensor: what it counts for, forward in the user's sum, backward in the maker's gradient."""
    dim: int | None = None
    """Along which rows are sent; None: the whole tensor."""
    start: int = 0
    """The first row, counted in the maker's tensor."""
    length: int = 0
    at: int = 0
    """The first row, counted in the user's tensor."""
    counts: bool = True
    """Whether the gradients are used: not those of a row at weight 0, nor those that another lane returns too."""
    sends: bool = True
    """Whether the maker's numbers travel: not where another lane has sent the same ones."""


Route = dict[tuple[int, int], tuple[Share, ...]]
"""(lane of the maker, lane of the user) → what goes from one to the other; pairs without anything are left out."""


@dataclass(frozen=True)
class _Side:
    """The lanes of a stage at one end of an edge."""

    rows: list[Rows]
    copied: bool

    @staticmethod
    def of(rows: int, lanes: int, copied: bool) -> _Side:
        return _Side([Rows(0, rows, 1.0)] * lanes if copied else share_rows(rows, 1, lanes), copied and lanes > 1)

    @property
    def lanes(self) -> int:
        return len(self.rows)


@functools.lru_cache(maxsize=4096)
def route(
    rows: int, makers: int, users: int, layouts: tuple[Layout, ...], copied: tuple[bool, bool] = (False, False)
) -> Route:
    """What goes where for a micro batch of so many rows, from a stage of width `makers` to one of width `users`.

    `copied`: whether the lanes of the one and of the other all have the same rows.
    """
    made, used = _Side.of(rows, makers, copied[0]), _Side.of(rows, users, copied[1])
    pairs = [(maker, user) for maker in range(makers) for user in range(users)]
    found = {(m, u): tuple(_shares(m, u, made, used, layouts)) for m, u in pairs}
    return {pair: shares for pair, shares in found.items() if shares}


def _shares(m: int, u: int, made: _Side, used: _Side, layouts: tuple[Layout, ...]) -> Iterator[Share]:
    sends = not made.copied or m == u % made.lanes
    counts = not used.copied or u == m % used.lanes
    if not sends and not counts:
        return
    equal = made.lanes == used.lanes and made.copied == used.copied
    for tensor, layout in enumerate(layouts):
        if layout == "average" and not made.copied:
            yield Share(tensor, weight=made.rows[m].weight, counts=counts)
        elif equal:
            if m == u:
                yield Share(tensor)
        elif isinstance(layout, str):
            if made.copied or m == _source(made.rows, used.rows[u]):
                yield Share(tensor, counts=counts, sends=sends)
        elif _overlap(made.rows[m], used.rows[u]) and not (made.rows[m].padding and used.rows[u].padding):
            start, stop = max(made.rows[m].start, used.rows[u].start), min(made.rows[m].stop, used.rows[u].stop)
            dim, inner = flat(layout)
            length = 0 if made.rows[m].padding else (stop - start) * inner
            first, at = (start - made.rows[m].start) * inner, (start - used.rows[u].start) * inner
            yield Share(tensor, 1.0, dim, first, length, at, counts and not used.rows[u].padding, sends)


def _source(made: list[Rows], used: Rows) -> int:
    """The lane from which a user takes what all have: one that sends it rows in any case."""
    return next(lane for lane, rows in enumerate(made) if _overlap(rows, used) and not rows.padding)


def _overlap(a: Rows, b: Rows) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)
