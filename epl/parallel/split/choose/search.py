"""The search for the cuts of one part: the legal ones that leave the least whole, and of those the ones that send the least.

An attention of which every rank computes all heads is something left whole, too: cutting the weights around it another way may
send less, but then no rank works less.

Greedy along a run (columns where the input is whole, rows where it is cut), starting again whenever a rule wishes for other
cuts. Then every point with another option is tried once the other way. A trial starts from the last decisions of the best
way so far that do not contain the point yet: up to there both are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple, TypeVar

from epl.errors import SplitError
from epl.parallel.split.boundary import Boundary
from epl.parallel.split.choose.attention import Attention
from epl.parallel.split.choose.subject import Subject
from epl.parallel.split.choose.tracing import Turns, trace
from epl.parallel.split.fixed import Fixed
from epl.parallel.split.parameters import seats_of
from epl.parallel.split.value import RefineError
from epl.plan.split.decisions import Decisions, HeadsError
from epl.plan.splits import Sent
from epl.report.log import Patience, notice

T = TypeVar("T")
COLLECTIVE = 16 << 10
"""A collective costs as much as this many bytes more."""
_MOST_RUNS = 3000
MOST_CALLS = 300_000
"""So many torch functions are run to try other ways, some ten seconds: with what a part holds grow both the ways and the time of each."""
_FUSED = 3
"""As many projections may be one weight, at most: q | k | v."""
SMALL = 50
"""A parameter may stay whole if it is less than this part of all."""

Cost = tuple[int, int, int]
"""Elements of weights left whole, then attentions computed whole, then bytes sent."""


class NumbersNeededError(Exception):
    """While planning: the code looks at values, or something in it knows no fake tensors; plan on real ones."""


class _Step(NamedTuple):
    """Decisions from which a run was started, and the wishes granted up to there."""

    decisions: Decisions
    wishes: frozenset[str]


class Outcome(NamedTuple):
    """One way to cut a part."""

    cost: Cost
    decisions: Decisions
    events: list[Sent]
    path: tuple[_Step, ...]
    attends_whole: bool
    """Whether every rank computes all heads of an attention (and it is one: not some other softmax)."""


class Search:
    """The search for one part."""

    def __init__(
        self,
        subject: Subject,
        ways: int,
        fixed: Mapping[str, Fixed],
        boundary: Boundary | None,
        known: Decisions | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`known`: what is decided already."""
        self._patience = patience or Patience()
        self._subject, self._ways, self._boundary = subject, ways, boundary
        parameters = seats_of(subject.module)[1]
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        # Those of other stages, of which each is cut by itself, are none of this part.
        total = sum(p.numel() for name, p in parameters.items() if name not in fixed or fixed[name].dim is not None)
        self._small = frozenset(n for n, p in parameters.items() if p.ndim > 1 and p.numel() * SMALL < total)
        self._begin = Decisions(ways, self._shapes, self._small)
        if known is not None:
            self._begin.take(known)
        self._turns = Turns(fixed)
        self._refused: list[HeadsError] = []
        self._heads: dict[str, HeadsError] = {}
        """What is said of each axis that was refused."""
        self.runs = 0
        self._calls = 0

    def best(self) -> Outcome:
        """The best way found; SplitError if there is none, or only one that gathers where heads do not divide."""
        best, error = self._try({}, None)
        forced: dict[str, int] = {}
        tried: set[tuple[str, int]] = set()
        while True:
            left = [(p, n) for p, count in self._turns.points.items() for n in range(1, count) if (p, n) not in tried]
            if not left:
                break
            if best is not None and self._calls > MOST_CALLS:
                notice(
                    f"{type(self._subject.module).__name__} has many parameters outside of repeated blocks: epl stopped looking for a better way "
                    f"to split it after {self.runs} runs. Split its blocks apart, or say with epl.split_rule where their parameters are cut"
                )
                break
            point, n = min(left, key=lambda pair: not _is_wish(pair[0]))
            tried.add((point, n))
            trial = {**forced, point: n}
            other, _ = self._try(trial, _start(best, point))
            if other is not None and (best is None or other.cost < best.cost):
                best, forced = other, trial
        if best is None:
            assert error is not None
            raise error
        for refused in self._refused:  # heads that do not divide, and no rank has some of them instead: say so
            choice = best.decisions.choices.get(refused.axis)
            if (choice is None or choice.axis not in best.decisions.heads) and best.attends_whole:
                raise self._heads[refused.axis]
        return best

    def greedy(self) -> Outcome:
        """The way that is found without trying others."""
        best, error = self._try({}, None)
        if best is None:
            assert error is not None
            raise error
        return best

    def _try(self, forced: dict[str, int], start: _Step | None) -> tuple[Outcome | None, SplitError | None]:
        self._turns.forced = forced
        step = start or _Step(self._begin, frozenset())
        path = [step]
        try:
            while True:
                decisions = step.decisions.copy()
                try:
                    events, attention = self._trace(decisions)
                    cost = self._cost(decisions, attention, events)
                    return Outcome(cost, decisions, events, tuple(path), attention.heads > 0), None
                except RefineError as refined:
                    step = self._granted(step, refined)
                    path.append(step)
        except SplitError as error:
            return None, error

    def _trace(self, decisions: Decisions) -> tuple[list[Sent], Attention]:
        self.runs += 1
        title = type(self._subject.module).__name__
        self._patience.tell(lambda: f"deciding how {title} is split: {self.runs} ways have been tried")
        if self.runs > _MOST_RUNS:
            raise SplitError(
                f"no way to split was settled on in {_MOST_RUNS} runs: say where its parameters are cut, with epl.split_rule"
            )
        with Attention() as attention:
            try:
                events = without_numbers(
                    self._subject, lambda: trace(self._subject, decisions, self._turns, self._boundary)
                )
            finally:
                self._calls += attention.calls
        return events, attention

    def _granted(self, step: _Step, refined: RefineError) -> _Step:
        """The start of the next run: one of the wished decisions that can be dealt out."""
        legal: list[Decisions] = []
        errors: list[SplitError] = []
        for decisions in refined.states:
            try:
                decisions.check_all()
                legal.append(decisions)
            except SplitError as error:
                errors.append(error)
        heads = [error for error in errors if isinstance(error, HeadsError)]
        # Behind q | k | v several counts can be thought of in `view(…, heads, size)`: the finest is that of heads.
        heads.sort(key=lambda error: -error.count)
        for each in heads:
            self._remember(each)
        if not legal:
            self._refused = heads + self._refused
            raise self._heads[heads[0].axis] if heads else errors[0]
        self._refused += heads  # perhaps no heads at all: q | k | v, taken for three
        key = f"wish {refined.wishes}"
        self._turns.points[key] = len(legal)
        chosen = legal[min(self._turns.forced.get(key, 0), len(legal) - 1)]
        return _Step(chosen, step.wishes | {key})

    def _remember(self, error: HeadsError) -> None:
        """Of several counts for an axis the first is that of heads: what comes later are pairs of numbers in each. But k | v comes
        before its heads."""
        known = self._heads.setdefault(error.axis, error)
        if known.count <= _FUSED < error.count:
            self._heads[error.axis] = error

    def _cost(self, decisions: Decisions, attention: Attention, events: list[Sent]) -> Cost:
        left = sum(
            prod(self._shapes[name])
            for name, choice in decisions.choices.items()
            if choice is None and name not in self._small and len(self._shapes[name]) > 1
        )
        return left, attention.whole, cost_of(events)


def cost_of(events: list[Sent]) -> int:
    """What it costs to send all this, in bytes."""
    return sum(event.nbytes * (2 if "reduce" in event.what else 1) + COLLECTIVE for event in events)


def without_numbers(subject: Subject, run: Callable[[], T]) -> T:
    """`run()`; NumbersNeededError if that is not possible on fake tensors."""
    try:
        return run()
    except (RefineError, SplitError):
        raise
    except Exception as error:
        if subject.mode.real:
            raise
        if any(p.is_meta for p in subject.module.parameters()):
            raise SplitError(
                f"the forward of {type(subject.module).__name__} cannot be tried without numbers ({error}), and its parameters are "
                "on the meta device. Build it with numbers, or say where its parameters are cut, with epl.split_rule"
            ) from error
        raise NumbersNeededError from error


def _is_wish(point: str) -> bool:
    return point.startswith("wish ")


def _start(best: Outcome | None, point: str) -> _Step | None:
    """From where a trial that changes `point` may start."""
    if best is None:
        return None
    free = [step for step in best.path if point not in step.decisions.choices and point not in step.wishes]
    return free[-1] if free else None
