"""One run of a part on rank 0 of a split that is only thought of: nothing is sent, everything is counted, decisions are taken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from epl import _torch
from epl.errors import SplitError
from epl.graph.collections import overheard
from epl.parallel.split.boundary import Boundary
from epl.parallel.split.choose.open import Open, open_parameter
from epl.parallel.split.choose.options import Option
from epl.parallel.split.choose.subject import Subject, planned_region, untouched
from epl.parallel.split.escape import escapes
from epl.parallel.split.fixed import Fixed
from epl.parallel.split.parameters import seats_of, showing
from epl.parallel.split.ranks import Op, SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.together import first_tensor
from epl.parallel.split.user_rules import with_own_forwards
from epl.parallel.split.value import RefineError, SplitTensor, shard, whole
from epl.plan.split.cut import Axis, Cut
from epl.plan.split.decisions import Choice, Decisions, HeadsError, Wish
from epl.plan.splits import Sent


class Turns:
    """Which way is taken where there are several: `points` collects them, `forced` says where not the first."""

    def __init__(self, fixed: Mapping[str, Fixed]) -> None:
        self.fixed = fixed
        """Given beforehand, by parameter."""
        self.points: dict[str, int] = {}
        self.forced: dict[str, int] = {}


class Tracing(SplitRanks):
    """Rank 0 of a split that is only thought of."""

    plan = True

    def __init__(self, subject: Subject, decisions: Decisions, turns: Turns | None) -> None:
        """Without `turns` everything is decided: what is not, stays whole, and no wish is granted."""
        super().__init__(0, decisions.ways)
        self.decisions, self.events = decisions, list[Sent]()
        self._turns, self._mode = turns, subject.mode
        self.shown: dict[str, Any] = {}
        self.seats, self.parameters = seats_of(subject.module)
        self._axes = {name: Axis(name, granules, decisions.ways) for name, granules in decisions.axes.items()}
        if turns is None:  # dims that are dealt out alike belong together
            alike: dict[int, Axis] = {}
            self._axes = {name: alike.setdefault(axis.granules, axis) for name, axis in self._axes.items()}

    # ---- what rules call

    def note(self, what: str, size: int, why: str) -> None:
        self.events.append(Sent(what, size, why))

    def refine(self, wishes: Sequence[Wish]) -> None:
        """Start again with one of the wishes granted, if one can be."""
        if self._turns is None:
            return
        states = [state for state in map(self.decisions.granted, wishes) if state is not None]
        if any(map(_may_be_granted, states)):
            raise RefineError(states, tuple(wishes))

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int], dim: int) -> list[torch.Tensor]:
        return [tensor.new_zeros((*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])) for length in lengths]

    def all_to_all(self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [parts[0].new_zeros(tuple(shape)) for shape in shapes]

    # ---- what open parameters call

    def cut_of(self, choice: Choice) -> Cut:
        """The cut that a choice means in this run."""
        return Cut(self._axes[choice.axis], choice.inners)

    def decide(self, parameter: Open, options: Sequence[Option], reason: str) -> None:
        """Take one of the options for an open parameter."""
        name, turns = parameter.parameter_name, self._turns
        if turns is None:
            self.decisions.leave_whole(name, "whole: not decided before")
        elif name in turns.fixed:
            turns.fixed[name].decide(self.decisions, name, options, reason)
        else:
            listed = list(options)
            if name in self.decisions.small and None not in listed:
                # With numbers, code follows them: behind a cut gate all tokens would seem to go to one expert.
                listed = [None] if self._mode.real else [*listed, None]
            turns.points[name] = len(listed)
            self._decide_among(name, listed, min(turns.forced.get(name, 0), len(listed) - 1), reason)
        if name in self.decisions.axes:
            self._axes.setdefault(name, Axis(name, self.decisions.axes[name], self.ways))
        parameter.box.append(self.view(name))

    def _decide_among(self, name: str, options: list[Option], first: int, reason: str) -> None:
        refused: SplitError | None = None
        for option in (options[first], *options[:first], *options[first + 1 :]):
            why = reason if refused is None else f"too few for {self.ways} ranks the other way: {reason}"
            try:
                return self._take(name, option, why)
            except SplitError as error:
                refused = error
        assert refused is not None
        raise refused

    def _take(self, name: str, option: Option, reason: str) -> None:
        if option is None:
            self.decisions.leave_whole(name, reason if reason.startswith("whole") else f"whole: small ({reason})")
        elif isinstance(option, int):
            self.decisions.cut_alone(name, option, reason)
        else:
            dim, cut = option
            self.decisions.cut_along(name, Choice(dim, self._name_of(cut.axis), cut.inners), reason)

    def _name_of(self, axis: Axis) -> str:
        return axis.name

    # ---- what is seen

    def view(self, name: str) -> Any:
        """A decided parameter, as the part sees it."""
        parameter, choice = self.parameters[name], self.decisions.choices[name]
        if choice is None:
            return self._mode.like(parameter)
        cut, dim = self.cut_of(choice), choice.dim
        if self._mode.real:
            local = cut.take(parameter.detach(), dim, 0).clone()
        else:
            shape = (*parameter.shape[:dim], cut.length(0), *parameter.shape[dim + 1 :])
            local = self._mode.block(torch.Size(shape), parameter)
        return shard(local.requires_grad_(parameter.requires_grad), dim, cut, self)

    def views(self) -> dict[str, Any]:
        """All parameters, as the part sees them: decided or open."""
        self.shown = {
            name: self.view(name)
            if name in self.decisions.choices
            else open_parameter(self._mode.like(p), name, tuple(range(p.ndim)), self)
            for name, p in self.parameters.items()
        }
        return self.shown


def _may_be_granted(state: Decisions) -> bool:
    """Not if ranks would be without any: then the value is gathered. Heads that do not divide are told, by the search."""
    try:
        state.check_all()
    except HeadsError:
        return True
    except SplitError:
        return False
    return True


def trace(subject: Subject, decisions: Decisions, turns: Turns | None, boundary: Boundary | None = None) -> list[Sent]:
    """What one run sends; `decisions` collects what is decided on the way. RefineError: a wish was granted, run again."""
    tracing = Tracing(subject, decisions, turns)
    with _running(subject, tracing, boundary):
        pass
    return tracing.events


def observe(
    subject: Subject, decisions: Decisions, boundary: Boundary | None
) -> tuple[list[Sent], dict[str, tuple[str, ...]]]:
    """What a run of a part sends when everything is decided; and where whole parameters can enter cut work together with a stream.

    That is, by module: its first tensor enters cut work inside it, and so do these parameters of it.
    """
    tracing = Tracing(subject, decisions, None)
    streams: dict[str, torch.Tensor] = {}
    with _watched(subject.module, streams), _running(subject, tracing, boundary):
        entered = [value for value, _ in region.entered.values()]
        names = {id(view): name for name, view in tracing.shown.items() if not isinstance(view, SplitTensor)}
        paths = {id(module): path for path, module in subject.module.named_modules()}
        joined: dict[str, list[str]] = {}
        inside: dict[int, str] = {}
        for module, _, name in tracing.seats:
            inside.setdefault(id(tracing.shown[name]), paths[id(module)])
        order = {id(value): n for n, value in enumerate(entered)}
        for n, value in enumerate(entered):
            if id(value) in names:
                path = _entered_around(inside[id(value)], streams, order, n)
                if path is not None:
                    joined.setdefault(path, []).append(names[id(value)])
        events = [event for event in tracing.events if event.why != LEAVES]
        noted = [place for place, event in enumerate(events) if event.why == ENTERS]
        if len(noted) == len(entered):
            events = _merged(events, noted, entered, names, joined, streams, order)
    return events, {path: tuple(found) for path, found in joined.items()}


ENTERS = "gradient of a whole value used by cut work"
"""What is noted of every value that enters."""


LEAVES = "leaves the split part cut"
"""Not sent by the part; but who uses it may have to: a part whose result leaves whole for the same price is better."""


@contextlib.contextmanager
def _running(subject: Subject, tracing: Tracing, boundary: Boundary | None) -> Iterator[None]:
    """One run; inside, after it, what has entered is still known."""
    module, mode = subject.module, subject.mode
    with (
        untouched(module, mode),
        with_own_forwards(module),
        mode.on(),
        _torch.fake_failures_unsaid(),
        overheard(lambda *_: None),  # what it would add to collections is of no step
        escapes(),
    ):
        args, kwargs = subject.arguments()
        if boundary is not None:
            args, kwargs = boundary.enter((args, kwargs), tracing)
        with planned_region(), showing(tracing.seats, tracing.views()), torch.enable_grad():
            out = module(*args, **kwargs)
            for leaf in _torch.tree_leaves(out):
                if isinstance(leaf, SplitTensor) and leaf.is_partial and not isinstance(leaf, Open):
                    whole(leaf, "leaves the split part")
                elif isinstance(leaf, SplitTensor) and not leaf.is_partial:
                    tracing.note("all-gather", leaf.numel() * leaf.element_size(), LEAVES)
            yield


@contextlib.contextmanager
def _watched(root: nn.Module, streams: dict[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the first tensor that each module is called with (the first time) is noted, by path."""
    before = [(module, module.__dict__.get("forward")) for module in root.modules()]

    def watched(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            stream = first_tensor(args, kwargs)
            if path not in streams and stream is not None and not isinstance(stream, SplitTensor):
                streams[path] = stream
            return forward(*args, **kwargs)

        return call

    try:
        for path, module in root.named_modules():
            module.__dict__["forward"] = watched(path, module.forward)
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def _entered_around(
    path: str, streams: Mapping[str, torch.Tensor], order: Mapping[int, int], before: int
) -> str | None:
    """The innermost module around `path` whose stream enters, no later than this."""
    while True:
        stream = streams.get(path)
        if stream is not None and order.get(id(stream), before) < before:
            return path
        if not path:
            return None
        path = path.rpartition(".")[0]


def _merged(
    events: list[Sent],
    noted: list[int],
    entered: list[torch.Tensor],
    names: Mapping[int, str],
    joined: Mapping[str, list[str]],
    streams: Mapping[str, torch.Tensor],
    order: Mapping[int, int],
) -> list[Sent]:
    """The events, where what enters together is sent as one."""
    kept: list[Sent | None] = list(events)
    of = {name: path for path, found in joined.items() for name in found}
    for place, value in zip(noted, entered, strict=True):
        path = of.get(names.get(id(value), ""))
        gone = kept[place]
        if path is not None and gone is not None:
            at = noted[order[id(streams[path])]]
            stream = kept[at]
            assert stream is not None
            kept[at], kept[place] = replace(stream, nbytes=stream.nbytes + gone.nbytes), None
    return [event for event in kept if event is not None]
