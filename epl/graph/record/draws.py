"""Single random numbers that a forward draws between its modules, and the branches it takes on them (layer drop).

They are drawn for real, from a seed that all ranks have alike, and anew for every call. A branch on what follows from
draws alone is a *guard*: its outcome is part of the recording. The next call draws its own numbers and walks down the tree of
what was recorded; where it would take a branch that nobody took before, the forward is recorded once more.

    rand([]) → #0      #0 < 0.1 → #1      bool(#1)?  ─ False ─ rand([]) → #2   #2 < 0.1 → #3   bool(#3)?  ─ False ─ recording A
                                                    └ True ── …                                         └ True ── recording B
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from epl import _torch
from epl.graph.spec import swap

_SOURCES = frozenset({torch.rand, torch.randn, torch.randint})


class Ref(NamedTuple):
    """The value of an earlier step."""

    number: int


class Step(NamedTuple):
    """A draw, a computation on drawn values, or a guard (the computation gives a number or a truth value)."""

    kind: Literal["draw", "compute", "guard"]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outcome: Hashable = None

    def run(self, values: Sequence[Any], generator: torch.Generator) -> Any:
        """Its value, given those of the steps before."""
        args, kwargs = swap((self.args, self.kwargs), Ref, lambda ref: values[ref.number])
        if self.kind == "draw":
            # On the CPU wherever the forward wants it: generators of different devices give different numbers.
            device = kwargs.pop("device", None)
            number = self.function(*args, generator=generator, **kwargs)
            return number if device is None else number.to(device)
        return self.function(*args, **kwargs)


class Draws:
    """The draws of one recording in the making, and everything that follows from them alone."""

    def __init__(self, seed: int, pattern: Sequence[bool] | None = None) -> None:
        """`pattern` of another size's recording says which of the random calls are draws: a tensor with one number per
        sample looks like a draw when there is one sample."""
        self.steps: list[Step] = []
        self.pattern: list[bool] = []
        """For each call that could be a draw, whether it is one."""
        self._given = pattern
        self._generator = torch.Generator().manual_seed(seed)
        self._values: list[Any] = []
        self._known: dict[int, tuple[torch.Tensor, Ref]] = {}

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The drawn numbers, in order."""
        return tuple(value for step, value in zip(self.steps, self._values, strict=True) if step.kind == "draw")

    def afresh(self) -> Draws:
        """The same, before anything was drawn."""
        return Draws(self._generator.initial_seed(), self._given)

    def is_source(self, function: Any) -> bool:
        """Whether a function may draw a single number."""
        return function in _SOURCES

    def is_draw(self, function: Any, kwargs: dict[str, Any], result: Any) -> bool:
        """Whether this call, which gave a fake result, is to be drawn for real."""
        if function not in _SOURCES or kwargs.get("generator") is not None or kwargs.get("out") is not None:
            return False
        place = len(self.pattern)
        draw = result.numel() == 1 if self._given is None else place < len(self._given) and self._given[place]
        self.pattern.append(draw)
        return draw

    def draw(self, fake: torch.Tensor, function: Any, args: Any, kwargs: Any) -> int:
        """Draw the number that `fake` stands for; which draw it is."""
        self._do(Step("draw", function, args, kwargs), fake)
        return sum(step.kind == "draw" for step in self.steps) - 1

    def knows(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all of these (and there are any) follow from draws alone."""
        return bool(tensors) and all(id(t) in self._known for t in tensors)

    def compute(self, fake: torch.Tensor, function: Any, args: Any, kwargs: Any) -> None:
        """Compute for real what `fake` stands for, from known values."""
        args, kwargs = self._refer(args), self._refer(kwargs)
        self._do(Step("compute", function, args, kwargs), fake)

    def guard(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The number or truth value that the forward reads from known values; it becomes a condition of the recording."""
        step = Step("guard", function, self._refer(args), self._refer(kwargs))
        with _torch.without_fake_mode():
            outcome = step.run(self._values, self._generator)
        self.steps.append(step._replace(outcome=outcome if isinstance(outcome, Hashable) else repr(outcome)))
        self._values.append(outcome)
        return outcome

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """These have been changed: they are known no longer."""
        for tensor in tensors:
            self._known.pop(id(tensor), None)

    def _refer(self, tree: Any) -> Any:
        return swap(tree, torch.Tensor, lambda t: self._known[id(t)][1])

    def _do(self, step: Step, fake: torch.Tensor) -> None:
        with _torch.without_fake_mode():
            value = step.run(self._values, self._generator)
        self._known[id(fake)] = (fake, Ref(len(self.steps)))
        self.steps.append(step)
        self._values.append(value)


T = TypeVar("T")


class _Branch(Generic[T]):
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.children: dict[Hashable, _Branch[T]] = {}
        self.end: T | None = None


class DrawTree(Generic[T]):
    """What was recorded for one signature, by the outcomes of its guards."""

    def __init__(self) -> None:
        self._root: _Branch[T] = _Branch()

    def find(self, seed: int) -> tuple[T, tuple[torch.Tensor, ...]] | None:
        """What was recorded for the branches that this seed's draws lead to, with the draws; None if nothing was."""
        generator, branch = torch.Generator().manual_seed(seed), self._root
        values: list[Any] = []
        draws: list[torch.Tensor] = []
        while branch.end is None:
            if not branch.steps:
                return None
            for step in branch.steps:
                values.append(step.run(values, generator))
                if step.kind == "draw":
                    draws.append(values[-1])
            outcome = values[-1] if isinstance(values[-1], Hashable) else repr(values[-1])
            following = branch.children.get(outcome)
            if following is None:
                return None
            branch = following
        for step in branch.steps:
            values.append(step.run(values, generator))
            if step.kind == "draw":
                draws.append(values[-1])
        return branch.end, tuple(draws)

    def add(self, steps: Sequence[Step], end: T) -> None:
        """Put what was recorded with these draws and guards into the tree."""
        branch, fresh = self._root, not self._root.steps
        for step in steps:
            if fresh:
                branch.steps.append(step)
            if step.kind == "guard":
                branch = branch.children.setdefault(step.outcome, _Branch())
                fresh = not branch.steps
        branch.end = end
