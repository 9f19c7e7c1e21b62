"""Single random numbers that a forward draws between its modules, and the branches it takes on them (layer drop).

They are drawn for real, from a seed that all ranks have alike, and anew for every call. A branch on what follows from
draws alone is a *guard*: its outcome is part of the recording. The next call draws its own numbers and walks down the tree of
what was recorded; where it would take a branch that nobody took before, the forward is recorded once more.

    rand([]) → #0      #0 < 0.1 → #1      bool(#1)?  ─ False ─ rand([]) → #2   #2 < 0.1 → #3   bool(#3)?  ─ False ─ recording A
                                                    └ True ── …                                         └ True ── recording B

What a forward reads of the numbers in its inputs is a guard of the same tree (`peek`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from epl import _torch
from epl.graph.record.peek import Peek, peek
from epl.graph.record.where import user_line
from epl.graph.spec import swap

_SOURCES = frozenset({torch.rand, torch.randn, torch.randint})
_MOST = 64
"""Recordings of one signature that are kept."""


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

    def run(self, values: Sequence[Any], generator: torch.Generator, inputs: Sequence[torch.Tensor]) -> Any:
        """Its value, given those of the steps before."""
        if isinstance(self.function, Peek):
            return self.function(inputs)
        args, kwargs = swap((self.args, self.kwargs), Ref, lambda ref: values[ref.number])
        if self.kind == "draw":
            # On the CPU wherever the forward wants it: generators of different devices give different numbers.
            device = kwargs.pop("device", None)
            number = self.function(*args, generator=generator, **kwargs)
            return number if device is None else number.to(device)
        return self.function(*args, **kwargs)


class Draws:
    """The draws of one recording in the making, and everything that follows from them alone."""

    def __init__(
        self,
        seed: int,
        inputs: Sequence[torch.Tensor] = (),
        pattern: Sequence[bool] | None = None,
        answers: Sequence[tuple[str, Any]] | None = None,
    ) -> None:
        """`inputs`: those of the call, the whole batch. `pattern` of another size's recording says which of the random calls are draws:
        a tensor with one number per sample looks like a draw when there is one sample. `answers` of that recording: what the forward
        reads of its inputs, with the lines; a micro batch goes the way of the whole one."""
        self.steps: list[Step] = []
        self.pattern: list[bool] = []
        """For each call that could be a draw, whether it is one."""
        self.answers: list[tuple[str, Any]] = []
        """What was read of the inputs, each with the line."""
        self._given, self._inputs, self._answers = pattern, inputs, answers
        self._generator = torch.Generator().manual_seed(seed)
        self._values: list[Any] = []
        self._known: dict[int, tuple[torch.Tensor, Ref]] = {}

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The drawn numbers, in order."""
        return tuple(value for step, value in zip(self.steps, self._values, strict=True) if step.kind == "draw")

    def afresh(self) -> Draws:
        """The same, before anything was drawn."""
        return Draws(self._generator.initial_seed(), self._inputs, self._given, self._answers)

    def at_another_size(self) -> Draws:
        """For a recording of the same call with other shapes."""
        return Draws(self._generator.initial_seed(), self._inputs, self.pattern, self.answers)

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
            outcome = step.run(self._values, self._generator, self._inputs)
        self.steps.append(step._replace(outcome=outcome if isinstance(outcome, Hashable) else repr(outcome)))
        self._values.append(outcome)
        return outcome

    def ask(self, function: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """What the forward reads of its inputs, in a tuple; it becomes a condition of the recording. `args` and `kwargs` have nodes in the
        place of tensors. None if that does not follow from the inputs alone."""
        question = peek(function, args, kwargs, self._inputs)
        if question is None:
            return None
        line = f"{getattr(function, '__name__', function)} {user_line()}"
        if self._answers is None:
            answer = self.guard(question, (), {})
        else:
            known = self._answers[len(self.answers) : len(self.answers) + 1]
            if not known or known[0][0] != line:
                return None  # it does other things at this size
            answer = known[0][1]
        self.answers.append((line, answer))
        return (answer,)

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """These have been changed: they are known no longer."""
        for tensor in tensors:
            self._known.pop(id(tensor), None)

    def _refer(self, tree: Any) -> Any:
        return swap(tree, torch.Tensor, lambda t: self._known[id(t)][1])

    def _do(self, step: Step, fake: torch.Tensor) -> None:
        with _torch.without_fake_mode():
            value = step.run(self._values, self._generator, self._inputs)
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
        self._size = 0

    def find(self, seed: int, inputs: Sequence[torch.Tensor]) -> tuple[T, tuple[torch.Tensor, ...]] | None:
        """What was recorded for the branches that this seed's draws and these inputs lead to, with the draws; None if nothing was."""
        generator, branch = torch.Generator().manual_seed(seed), self._root
        values: list[Any] = []
        draws: list[torch.Tensor] = []
        while branch.end is None:
            if not branch.steps:
                return None
            for step in branch.steps:
                values.append(step.run(values, generator, inputs))
                if step.kind == "draw":
                    draws.append(values[-1])
            outcome = values[-1] if isinstance(values[-1], Hashable) else repr(values[-1])
            following = branch.children.get(outcome)
            if following is None:
                return None
            branch = following
        for step in branch.steps:
            values.append(step.run(values, generator, inputs))
            if step.kind == "draw":
                draws.append(values[-1])
        return branch.end, tuple(draws)

    def add(self, steps: Sequence[Step], end: T) -> None:
        """Put what was recorded with these draws and guards into the tree."""
        if self._size >= _MOST:  # a number that is another one in every call
            self._root, self._size = _Branch(), 0
        self._size += 1
        branch, fresh = self._root, not self._root.steps
        for step in steps:
            if fresh:
                branch.steps.append(step)
            if step.kind == "guard":
                branch = branch.children.setdefault(step.outcome, _Branch())
                fresh = not branch.steps
        branch.end = end
