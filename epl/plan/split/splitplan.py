"""How a part is split: every decision about it, as plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch

from epl.plan.split.cut import Axis, Cut
from epl.plan.split.decisions import Choice
from epl.plan.split.layout import ParameterLayout
from epl.plan.splits import ParameterCut, PartSplit, Sent


@dataclass(frozen=True)
class SplitPlan:
    """Where each parameter of a part is cut, and what is sent for that. Parameters have their first names in the part."""

    ways: int
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole parameters."""
    choices: Mapping[str, Choice | None]
    """None: every rank has all of it."""
    axes: Mapping[str, int]
    """How many granules are dealt out, by axis."""
    heads: frozenset[str] = frozenset()
    """The axes whose granules are heads or groups of heads."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    events: tuple[Sent, ...] = ()
    """What is sent in one forward and backward."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each module (by path) whose first argument enters cut work: the whole parameters in it that do as well. Their
    gradients are summed over ranks together, in one collective."""
    runs: int = 0
    """How many times the part was tried."""

    def layouts(self) -> dict[str, ParameterLayout]:
        """How the cut parameters lie on the ranks. Dims that are dealt out alike share one axis: they belong together."""
        dealt: dict[int, Axis] = {}
        for name, granules in self.axes.items():
            dealt.setdefault(granules, Axis(name, granules, self.ways))
        return {
            name: ParameterLayout(
                torch.Size(self.shapes[name]), choice.dim, Cut(dealt[self.axes[choice.axis]], choice.inners)
            )
            for name, choice in self.choices.items()
            if choice is not None
        }

    @property
    def whole(self) -> list[str]:
        """The parameters that every rank has."""
        return [name for name, choice in self.choices.items() if choice is None]

    def fraction_held(self, rank: int = 0) -> float:
        """How much of the part's parameters a rank holds."""
        layouts, total, held = self.layouts(), 0, 0
        for name, shape in self.shapes.items():
            total += prod(shape)
            held += layouts[name].block_shape(rank).numel() if name in layouts else prod(shape)
        return held / total if total else 1.0

    def only(self, names: Collection[str]) -> SplitPlan:
        """The plan with these parameters alone."""
        return replace(
            self,
            shapes={name: shape for name, shape in self.shapes.items() if name in names},
            choices={name: choice for name, choice in self.choices.items() if name in names},
        )

    def bytes_sent(self) -> int:
        """What one forward and backward hands to collectives."""
        return sum(sent.nbytes for sent in self.events)

    def summary(self, part: str = "") -> PartSplit:
        """What a `Plan` lists of it, under this name."""
        cuts = [
            ParameterCut(name, tuple(self.shapes[name]), self._how(choice), self.reasons.get(name, ""))
            for name, choice in self.choices.items()
        ]
        return PartSplit(part, self.ways, tuple(cuts), self.events)

    def _how(self, choice: Choice | None) -> str:
        if choice is None:
            return "whole"
        noun = "heads" if choice.axis in self.heads else "parts"
        inners = " + ".join(map(str, choice.inners))
        granules = f"{self.axes[choice.axis]} {noun}"
        return f"dim {choice.dim}: {granules}" + ("" if choice.inners == (1,) else f" of {inners}")
