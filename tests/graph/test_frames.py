"""Where the caller stands: in a module's construction, in its forward, or in neither."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from epl.graph.frames import Place, place

seen: list[Place | None] = []


class Witness(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        # A closure over self, as people write them: self is then a cell of this frame.
        self.look: Callable[[], None] = lambda: self.note()
        self.look()
        self.inner = inner
        if inner is not None:
            inner(torch.zeros(1))

    def note(self) -> None:
        seen.append(place())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return x


def test_the_innermost_place_counts() -> None:
    seen.clear()
    seen.append(place())
    witness = Witness()
    witness(torch.zeros(1))
    witness.forward(torch.zeros(1))
    witness.note()
    Witness(inner=witness)
    assert seen == [None, "construction", "forward", "forward", None, "construction", "forward"]


def test_an_init_of_another_class_is_no_construction() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.place = place()

        def forward(self) -> Place | None:
            return place()

    assert Trainer().place is None
    assert Trainer().forward() is None
