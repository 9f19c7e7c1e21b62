"""Where each parameter of a part is cut: its module is run on fake tensors until that is settled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from epl import _torch
from epl.errors import SplitError, list_problems
from epl.graph.leftovers import leaving_no_fakes
from epl.parallel.split.boundary import Boundary
from epl.parallel.split.choose.hints import SOURCE, hints_for
from epl.parallel.split.choose.search import SMALL, NumbersNeededError, Outcome, Search, without_numbers
from epl.parallel.split.choose.subject import FakeOrReal, Subject, device_of
from epl.parallel.split.choose.tracing import observe
from epl.parallel.split.choose.units import Calls, Unit, capture, find_units
from epl.parallel.split.fixed import Fixed
from epl.parallel.split.parameters import seats_of
from epl.parallel.split.user_rules import fixed_by_users
from epl.parallel.split.value import SplitTensor
from epl.plan.split.decisions import Choice, Decisions, HeadsError
from epl.plan.split.splitplan import SplitPlan
from epl.report.log import Patience, notice, warn


def choose(
    module: nn.Module,
    ways: int,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    boundary: Boundary | None = None,
    fixed: Mapping[str, int | None] | None = None,
) -> SplitPlan:
    """How to split a module over so many ranks, called like this. Nothing about the module or the arguments is changed.

    `boundary`: how they enter, if not whole and the same on all ranks. `fixed`: parameters (by name) that must be cut along a dim, or not at all.
    A module that is set to evaluation is planned as in training, if its forward can do that.
    """
    if not module.training:
        try:
            with _set_to_training(module):
                return _choose(module, ways, args, kwargs, boundary, fixed)
        except SplitError:  # what cannot be split for training is refused now, not when training begins
            raise
        except Exception:  # of the user's code: perhaps it wants labels then
            pass
    return _choose(module, ways, args, kwargs, boundary, fixed)


@contextlib.contextmanager
def _set_to_training(module: nn.Module) -> Iterator[None]:
    before = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in before:
            part.training = True  # not by `train()`, which people's modules do more in
        yield
    finally:
        for part, training in before:
            part.training = training


def _choose(
    module: nn.Module,
    ways: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    boundary: Boundary | None,
    fixed: Mapping[str, int | None] | None,
) -> SplitPlan:
    given = {**fixed_by_users(module), **{name: Fixed(dim) for name, dim in (fixed or {}).items()}}
    mode = FakeOrReal(device_of(module, (args, kwargs)))
    subject = Subject(module, args, dict(kwargs or {}), mode)
    try:
        with leaving_no_fakes(module, _is_of_planning):
            plan = _Planner(ways, mode).plan(subject, given, boundary)
    except NumbersNeededError:
        mode.real = True
        with leaving_no_fakes(module, _is_of_planning):
            plan = _Planner(ways, mode).plan(subject, given, boundary)
    _warn_of_whole(module, plan, given)
    return plan


def _is_of_planning(tensor: torch.Tensor) -> bool:
    return tensor.ranks.plan if isinstance(tensor, SplitTensor) else _torch.is_fake(tensor)


class _Planner:
    """Plans of parts and of the repeated blocks in them, each kind once."""

    def __init__(self, ways: int, mode: FakeOrReal) -> None:
        self._ways, self._mode, self._patience = ways, mode, Patience()
        self._known: dict[object, SplitPlan] = {}

    def plan(self, subject: Subject, fixed: Mapping[str, Fixed], boundary: Boundary | None) -> SplitPlan:
        """The plan of a module: of its repeated blocks by themselves, then of the rest around them."""
        units = [] if boundary is not None else find_units(subject.module)
        if not units:
            outcome, runs = self._search(subject, fixed, boundary)
            return self._result(subject, outcome.decisions, boundary, runs)
        calls = without_numbers(subject, lambda: capture(subject, units))
        problems: list[str] = []
        plans: dict[str, SplitPlan] = {}
        for unit in units:
            call = calls.first(unit.kind)
            if call is None:
                continue
            inner = {name[len(unit.path) + 1 :]: f for name, f in fixed.items() if name.startswith(f"{unit.path}.")}
            key = unit.kind, tuple(sorted((name, f.dim, f.sections) for name, f in inner.items()))
            if key not in self._known and not problems:
                try:
                    self._known[key] = self.plan(Subject(unit.module, call.args, call.kwargs, self._mode), inner, None)
                except SplitError as error:
                    problems.append(f"{unit.path}: {error}")
            if key in self._known:
                plans[unit.path] = self._known[key]
        rest: Decisions | None = None
        try:
            rest, runs = self._around(subject, fixed, boundary, calls, units, plans)
        except SplitError as error:
            problems.append(str(error))
        if problems or rest is None:
            raise SplitError(
                list_problems(f"{type(subject.module).__name__} cannot be split over {self._ways} ranks", problems)
            )
        decisions = _assembled(rest, units, plans)
        return self._result(subject, decisions, boundary, runs + sum(p.runs for p in self._known.values()))

    def _around(
        self,
        subject: Subject,
        fixed: Mapping[str, Fixed],
        boundary: Boundary | None,
        calls: Calls,
        units: list[Unit],
        plans: Mapping[str, SplitPlan],
    ) -> tuple[Decisions, int]:
        """The best way for what is around the repeated blocks."""
        try:
            with calls.standing_in():
                rest, runs = self._search(subject, fixed, boundary)
            return rest.decisions, runs
        except SplitError:
            raise
        except Exception:  # of the user's code
            # Perhaps it reads what hooks on modules in the blocks have left behind (Hugging Face's router logits): run the blocks, too.
            names = seats_of(subject.module)[1]
            known = _assembled(Decisions(self._ways, {name: tuple(p.shape) for name, p in names.items()}), units, plans)
            rest, runs = self._search(subject, fixed, boundary, known)
            return rest.decisions, runs

    def _search(
        self,
        subject: Subject,
        fixed: Mapping[str, Fixed],
        boundary: Boundary | None,
        known: Decisions | None = None,
    ) -> tuple[Outcome, int]:
        """The best way for a module as a whole: Hugging Face's, if it has one that is as good as what is found without."""
        own, runs = self._search_freely(subject, fixed, boundary, known)
        hints = {name: hint for name, hint in hints_for(subject.module).items() if name not in fixed}
        if not hints:
            return own, runs
        title = type(subject.module).__name__
        search = Search(subject, self._ways, {**fixed, **hints}, boundary, known, self._patience)
        try:
            theirs = search.best()
        except SplitError as error:
            notice(f"{title}: {SOURCE} cannot be carried out here ({error}); epl splits it its own way")
            return own, runs + search.runs
        if theirs.cost > own.cost:
            notice(f"{title}: {SOURCE} leaves more whole or sends more than what epl found; epl splits it its own way")
            return own, runs + search.runs
        return theirs, runs + search.runs

    def _search_freely(
        self, subject: Subject, fixed: Mapping[str, Fixed], boundary: Boundary | None, known: Decisions | None
    ) -> tuple[Outcome, int]:
        """The best way found; SplitError with all the heads that do not divide."""
        problems: dict[object, HeadsError] = {}
        given_up = dict(fixed)
        while True:
            search = Search(subject, self._ways, given_up, boundary, known, self._patience)
            try:
                outcome = search.best()
            except HeadsError as error:
                if error.axis in given_up:
                    raise
                given_up[error.axis] = Fixed(None)
                problems.setdefault((error.axis.rpartition(".")[0], error.count), error)
                continue
            except SplitError:
                if not problems:
                    raise
            if problems:
                if len(problems) == 1:
                    raise next(iter(problems.values()))
                title = f"{type(subject.module).__name__} cannot be split over {self._ways} ranks"
                raise SplitError(list_problems(title, [str(error) for error in problems.values()]))
            return outcome, search.runs

    def _result(self, subject: Subject, decisions: Decisions, boundary: Boundary | None, runs: int) -> SplitPlan:
        events, joined = observe(subject, decisions.copy(), boundary)
        names = seats_of(subject.module)[1]
        used = {choice.axis for choice in decisions.choices.values() if choice is not None}
        return SplitPlan(
            ways=self._ways,
            shapes={name: tuple(p.shape) for name, p in names.items()},
            choices={name: decisions.choices.get(name) for name in names},
            axes={axis: granules for axis, granules in decisions.axes.items() if axis in used},
            heads=frozenset(decisions.heads & used),
            reasons={name: decisions.reasons.get(name, "whole: not read by name in the forward") for name in names},
            events=tuple(events),
            joined=joined,
            runs=runs,
        )


def _assembled(rest: Decisions, units: list[Unit], plans: Mapping[str, SplitPlan]) -> Decisions:
    """The decisions about the rest, with those about the blocks."""
    all_of = rest.copy()
    for unit in units:
        plan = plans.get(unit.path)
        if plan is None:
            continue

        def named(name: str, unit: Unit = unit) -> str:
            return f"{unit.path}.{name}"

        all_of.axes.update({named(axis): granules for axis, granules in plan.axes.items()})
        all_of.heads.update(map(named, plan.heads))
        for name, choice in plan.choices.items():
            all_of.choices[named(name)] = (
                None if choice is None else Choice(choice.dim, named(choice.axis), choice.inners)
            )
            all_of.reasons[named(name)] = plan.reasons[name]
    return all_of


def _warn_of_whole(module: nn.Module, plan: SplitPlan, given: Mapping[str, Fixed]) -> None:
    """Say which large parameters stay whole although nobody asked for it, and why: they take memory on every rank."""
    left_out = {name for name, fixed in given.items() if fixed.dim is None}
    total = sum(prod(shape) for name, shape in plan.shapes.items() if name not in left_out)
    found: dict[str, str] = {}
    for name in plan.whole:
        shape = plan.shapes[name]
        if len(shape) > 1 and prod(shape) * SMALL >= total and name not in given:
            found.setdefault(name.rpartition(".")[0], plan.reasons[name].removeprefix("whole: "))
    if found:
        inside = dict(module.named_modules())
        texts = [f"{path or 'the module itself'} ({type(inside[path]).__name__}: {why})" for path, why in found.items()]
        warn(
            f"split over {plan.ways} ranks, these parts of {type(module).__name__} stay whole on every rank: {', '.join(texts)}. Give "
            "a rule with epl.split_rule, or leave them out of the split"
        )
