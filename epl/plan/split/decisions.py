"""What is decided so far about the cuts of a part: for each parameter whole or cut, for each axis its granules.

A rule that cannot keep a cut wishes for another one; granting a wish gives new decisions:

    coarsen   granules of so many old ones        features become whole heads, which must divide
    group     the same, dealt out as evenly as can be        channels that are normalised together
    section   the dim is several, one after another    a fused q | k | v
    resize    sections of these sizes instead      one more border in a dim that has sections already
    unify     two axes become one                  gate and up, queries and keys
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import gcd
from typing import Any, NamedTuple

from epl.errors import SplitError

Wish = tuple[str, str, Any]
"""(kind, axis, how)."""

Inners = tuple[int, ...]


class Choice(NamedTuple):
    """Where a parameter is cut: the dim, the axis its granules belong to, and the sections of the dim."""

    dim: int
    axis: str
    inners: Inners = (1,)


class HeadsError(SplitError):
    """Heads, or groups of heads, that cannot be dealt out evenly."""

    def __init__(self, axis: str, count: int, ways: int) -> None:
        fewer = [d for d in range(1, ways) if count % d == 0]
        more = [d for d in range(ways + 1, count + 1) if count % d == 0]
        nearest = " or ".join(str(d) for d in ((*fewer[-1:], more[0]) if more else fewer[-2:]))
        super().__init__(
            f"{axis}: {count} heads (or groups of heads) cannot be dealt out evenly to {ways} ranks; the nearest splits that "
            f"can be: {nearest}"
        )
        self.axis, self.count = axis, count
        """The parameter that has named the axis, and its heads."""


class Decisions:
    """For each parameter whole (None) or a `Choice`, for each axis its granules; made during a run, changed by wishes."""

    def __init__(self, ways: int, shapes: Mapping[str, tuple[int, ...]], small: Collection[str] = ()) -> None:
        self.ways, self.shapes = ways, shapes
        self.small = small
        """Parameters that may stay whole at no cost."""
        self.choices: dict[str, Choice | None] = {}
        self.axes: dict[str, int] = {}
        self.heads: set[str] = set()
        """Axes whose granules are heads: they must divide."""
        self.reasons: dict[str, str] = {}

    def copy(self) -> Decisions:
        """The same, to be changed."""
        new = Decisions(self.ways, self.shapes, self.small)
        new.choices, new.axes = dict(self.choices), dict(self.axes)
        new.heads, new.reasons = set(self.heads), dict(self.reasons)
        return new

    def take(self, known: Decisions) -> None:
        """Decide what is decided there."""
        self.choices.update(known.choices)
        self.axes.update(known.axes)
        self.heads.update(known.heads)
        self.reasons.update(known.reasons)

    def check(self, axis: str) -> None:
        """SplitError if the granules of an axis cannot be dealt out."""
        count = self.axes[axis]
        if axis in self.heads and count % self.ways:
            raise HeadsError(axis, count, self.ways)
        if count < self.ways:
            raise SplitError(
                f"{axis}: {count} features (or rows, channels, experts) cannot be divided over {self.ways} ranks: give every rank at "
                f"least one, with epl.split({count}) or fewer"
            )

    def check_all(self) -> None:
        """SplitError if one of the axes cannot be dealt out."""
        for axis in self.axes:
            self.check(axis)

    def cut_alone(self, name: str, dim: int, reason: str, sections: int = 1) -> None:
        """Decide: the parameter is cut along `dim`, by an axis of its own."""
        size = self.shapes[name][dim]
        if size % sections:
            raise SplitError(f"{name}: dim {dim} of size {size} is not made of {sections} equal sections")
        self.axes[name] = size // sections
        try:
            self.check(name)
        except SplitError:
            del self.axes[name]
            raise
        self.choices[name] = Choice(dim, name, (1,) * sections)
        self.reasons[name] = reason

    def cut_along(self, name: str, choice: Choice, reason: str) -> None:
        """Decide: the parameter is cut by an axis that is there already."""
        self.choices[name] = choice
        self.reasons[name] = reason

    def leave_whole(self, name: str, reason: str) -> None:
        """Decide: every rank has all of it."""
        self.choices[name] = None
        self.reasons[name] = reason

    def granted(self, wish: Wish) -> Decisions | None:
        """The decisions after a wish; None if it cannot be granted. Whether the axes can still be dealt out is not asked."""
        kind, axis, how = wish
        count = self.axes.get(axis)
        if count is None:
            return None
        new = self.copy()
        if kind in ("coarsen", "group"):
            if count % how:
                return None
            new.axes[axis] = count // how
            if kind == "coarsen":
                new.heads.add(axis)
            new._rescale(axis, lambda inners: tuple(inner * how for inner in inners))
        elif kind == "section":
            if count % sum(how) or any(len(choice.inners) > 1 for choice in self._cut_by(axis)):
                return None
            new.axes[axis] = count // sum(how)
            new._rescale(axis, lambda inners: tuple(part * inners[0] for part in how))
        elif kind == "resize":
            inners, sizes = how
            unit = gcd(*sizes)
            if axis in self.heads or any(choice.inners != inners for choice in self._cut_by(axis)):
                return None
            new.axes[axis] = unit
            new._rescale(axis, lambda _: tuple(size // unit for size in sizes))
        elif kind == "unify":
            if not new._unify(axis, how):
                return None
        else:
            raise AssertionError(f"no wish is called {kind}")
        return new

    def _unify(self, axis: str, other: str) -> bool:
        count, others = self.axes[axis], self.axes.get(other)
        if others is None:
            return False
        common = gcd(count, others)
        for name, granules in ((axis, count), (other, others)):
            factor = granules // common
            self._rescale(name, lambda inners, factor=factor: tuple(inner * factor for inner in inners))  # type: ignore[misc]
        self.axes[axis] = common
        for name, choice in self.choices.items():
            if choice is not None and choice.axis == other:
                self.choices[name] = choice._replace(axis=axis)
        if other in self.heads:
            self.heads.add(axis)
            self.heads.remove(other)
        del self.axes[other]
        return True

    def _cut_by(self, axis: str) -> list[Choice]:
        return [choice for choice in self.choices.values() if choice is not None and choice.axis == axis]

    def _rescale(self, axis: str, change: Callable[[Inners], Inners]) -> None:
        for name, choice in self.choices.items():
            if choice is not None and choice.axis == axis:
                self.choices[name] = choice._replace(inners=change(choice.inners))
