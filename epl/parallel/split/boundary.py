"""What happens to values as they enter and leave a split part."""

from __future__ import annotations

from typing import Any, Protocol

from epl.parallel.split.ranks import SplitRanks


class Boundary(Protocol):
    """How arguments enter a part and results leave it; without one they are whole, the same on all ranks, and leave as they are."""

    def enter(self, tree: Any, ranks: SplitRanks) -> Any:
        """(args, kwargs) as the part is to see them."""

    def leave(self, tree: Any, ranks: SplitRanks) -> Any:
        """The results as those outside are to see them."""
