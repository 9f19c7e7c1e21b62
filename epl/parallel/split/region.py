"""What holds while a split part runs, in this thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from epl.plan.split.cut import Cut

if TYPE_CHECKING:
    from epl.parallel.split.ranks import SplitRanks


class Region(threading.local):
    """The split part that is running, if any."""

    depth = 0
    """How many split parts, one in the other, are running; above 0 their parameters show as split values."""
    sequence: dict[Any, Cut] | None = None
    """Sequence parallel: how lengths of sequences are cut; None: partial sums become whole."""
    ranks: SplitRanks | None = None
    """Of the part that is running."""
    exact_dropout = False
    """`split.exact_dropout`: masks of cut values are the parts of one device's mask."""

    def __init__(self) -> None:
        self.entered: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """Whole values that have entered cut work already, by id and version: q, k and v share one all-reduce."""


region = Region()
