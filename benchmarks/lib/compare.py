"""Rows of a report from what was measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from .ratio import paired_difference, paired_ratio
from .report import Row, load


def compare(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    show_as: Callable[[float], str],
    limit: float | None = None,
    note: str = "",
) -> Row:
    """ours / theirs, and their medians in words."""
    return Row(name, paired_ratio(ours, theirs), _made_of(ours, theirs, show_as, note), limit)


def compare_counts(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    show_as: Callable[[float], str],
    limit: float | None = None,
) -> Row:
    """The same of what is counted, rank by rank: a single run proves it."""
    row = compare(name, ours, theirs, show_as, limit)
    return dataclasses.replace(row, ratio=dataclasses.replace(row.ratio, counted=True))


def added_milliseconds(name: str, ours: Sequence[float], theirs: Sequence[float], limit: float | None = None) -> Row:
    """What ours takes longer, in milliseconds: a row whose value is no ratio."""
    difference = paired_difference([1e3 * s for s in ours], [1e3 * s for s in theirs])
    return Row(name, difference, _made_of(ours, theirs, milliseconds, "difference in ms"), limit)


def _made_of(ours: Sequence[float], theirs: Sequence[float], show_as: Callable[[float], str], note: str) -> str:
    made_of = f"{show_as(statistics.median(ours))} / {show_as(statistics.median(theirs))}"
    return f"{made_of}, {note}" if note else made_of


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def shown(row: Row) -> Row:
    """The row, printed as soon as it is there."""
    print(f"{row.name:<44} {row.ratio}  {row.made_of}  {load()}", flush=True)
    return row
