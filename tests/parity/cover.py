"""A small set of cases in which every pair of choices occurs: most faults show up in some pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Case = dict[str, object]


def pairwise(axes: Mapping[str, Sequence[object]], allowed: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Cases over the axes, greedily chosen so that every possible pair of values occurs in one; the same every time."""
    everything = [c for c in (dict(zip(axes, v, strict=True)) for v in itertools.product(*axes.values())) if allowed(c)]
    left = {pair for case in everything for pair in _pairs(case)}
    chosen = []
    while left:
        best = max(everything, key=lambda case: len(left & _pairs(case)))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return set(itertools.combinations(sorted(case.items()), 2))


def name_of(case: Case) -> str:
    """A test id."""
    return "-".join(f"{key}={value}" for key, value in case.items())
