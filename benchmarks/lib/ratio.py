"""How two things that were measured side by side compare, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH_PAIRS = 6  # that all of 5 lie on one side of the true median happens in 1 of 16 cases by chance: too often


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, with an interval that holds the true median with 95 % confidence.

    Of few pairs the interval is the whole range that was seen: its confidence is then lower (50 % of two pairs). What is `counted`
    rather than measured is the same in every run: any number of pairs will do.
    """

    value: float
    low: float
    high: float
    pairs: int
    counted: bool = False

    @property
    def sure(self) -> bool:
        """Whether the interval has its confidence."""
        return self.counted or self.pairs >= ENOUGH_PAIRS

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """ours / theirs, pair by pair: what slows a whole pair down (a busy machine) cancels out."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    return Ratio(statistics.median(ratios), low, high, len(ratios))


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """ours - theirs, pair by pair, in the same form."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    low, high = median_interval(differences)
    return Ratio(statistics.median(differences), low, high, len(differences))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the values between which the median of what they were drawn from lies, with this confidence.

    Each value is below the true median with probability ½ whatever its distribution, so how many are is binomial.
    """
    ordered, n = sorted(values), len(values)
    cut, tail = 0, 0.0  # values left out at either end; probability that the median is out there
    while (n - 1) > 2 * cut and tail + math.comb(n, cut) / 2**n <= (1 - confidence) / 2:
        tail += math.comb(n, cut) / 2**n
        cut += 1
    first = max(cut - 1, 0)
    return ordered[first], ordered[n - 1 - first]
