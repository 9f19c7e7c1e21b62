"""Which lane sends which other what, on an edge between stages of any two widths: arithmetic on plain numbers.

    5 rows, widths 2 → 3     makers 0 1 2 | 3 4        lane 0 → 0: rows 0 1      lane 1 → 1: row 3
                             users  0 1 | 2 3 | 4      lane 0 → 1: row 2         lane 1 → 2: row 4

The gradients of the rows go back the same way. A lane without rows of its own (fewer rows than lanes) computes a neighbour's
row at weight 0: the user gets it from the lane that has it, and what it returns does not count; the maker sends no rows, and
learns from the lane that has the row whether there are gradients at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from epl.plan.batch import Rows, share_rows

Layout = int | Literal["same", "average"]
"""How a tensor carries the batch: its batch dim; "same", it does not and is alike on all lanes; or "average", it depends on the
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
    """Whether the gradients of these rows are used: not those of a row at weight 0, which another lane computes too."""


Route = dict[tuple[int, int], tuple[Share, ...]]
"""(lane of the maker, lane of the user) → what goes from one to the other; pairs without anything are left out."""


@functools.lru_cache(maxsize=4096)
def route(rows: int, makers: int, users: int, layouts: tuple[Layout, ...]) -> Route:
    """What goes where for a micro batch of so many rows, from a stage of width `makers` to one of width `users`."""
    made, used = share_rows(rows, 1, makers), share_rows(rows, 1, users)
    pairs = [(maker, user) for maker in range(makers) for user in range(users)]
    found = {(m, u): tuple(_shares(m, u, made, used, layouts)) for m, u in pairs}
    return {pair: shares for pair, shares in found.items() if shares}


def _shares(m: int, u: int, made: list[Rows], used: list[Rows], layouts: tuple[Layout, ...]) -> Iterator[Share]:
    equal = len(made) == len(used)
    for tensor, layout in enumerate(layouts):
        if layout == "average":
            yield Share(tensor, weight=made[m].weight)
        elif equal:
            if m == u:
                yield Share(tensor)
        elif layout == "same":
            if m == _source(made, used[u]):
                yield Share(tensor)
        elif _overlap(made[m], used[u]) and not (made[m].padding and used[u].padding):
            start, stop = max(made[m].start, used[u].start), min(made[m].stop, used[u].stop)
            sent = 0 if made[m].padding else stop - start
            first = start - made[m].start
            yield Share(tensor, 1.0, layout, first, sent, start - used[u].start, not used[u].padding)


def _source(made: list[Rows], used: Rows) -> int:
    """The lane from which a user takes what all have: one that sends it rows in any case."""
    return next(lane for lane, rows in enumerate(made) if _overlap(rows, used) and not rows.padding)


def _overlap(a: Rows, b: Rows) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)
