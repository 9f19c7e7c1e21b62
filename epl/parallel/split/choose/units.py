"""The repeated blocks of a part: one of each kind is planned by itself, with the inputs that it gets in one run of the whole.

Their values at the borders are taken to be whole while planning. What is then really sent shows in a run of everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from epl import _torch
from epl.graph.record.fingerprint import fingerprint
from epl.parallel.split.choose.subject import FakeOrReal, Subject, copied_with, planned_region, signature_of, untouched
from epl.parallel.split.escape import escapes
from epl.parallel.split.parameters import seats_of, showing
from epl.parallel.split.user_rules import with_own_forwards
from epl.parallel.split.value import SplitTensor, whole

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Unit(NamedTuple):
    """A block that is like others."""

    path: str
    module: nn.Module
    kind: object
    """Equal for equal blocks."""


class Call(NamedTuple):
    """What a block was called with, and what came out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


def find_units(root: nn.Module) -> list[Unit]:
    """The outermost modules that stand in a list (or in lists of it) beside others of their class, or alone, have parts and share no weight
    with others."""
    found: list[Unit] = []
    _look("", root, found)
    kinds = [unit.kind for unit in found]
    holders: dict[int, set[int]] = {}
    inside = {id(part): id(unit.module) for unit in found for part in unit.module.modules()}
    for seat in seats_of(root)[0]:
        held = seat.module.__dict__["_parameters"][seat.key]
        holders.setdefault(id(held), set()).add(inside.get(id(seat.module), 0))
    tied = {
        kind
        for unit, kind in zip(found, kinds, strict=True)
        if any(len(holders[id(p)]) > 1 for p in unit.module.parameters())
    }
    return [unit for unit in found if unit.kind not in tied]


def _look(path: str, module: nn.Module, found: list[Unit]) -> None:
    entries = list(_entries(path, module))
    classes = [type(child) for _, child in entries] if isinstance(module, _LISTS) else []
    for inner, child in entries:
        is_repeated = classes.count(type(child)) > 1 or _is_only_layer(module)
        kind = fingerprint(child) if is_repeated and _is_block(child) else None
        if kind is not None:
            found.append(Unit(inner, child, kind))
        else:
            _look(inner, child, found)


def _entries(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Its children; of a list in a list (`layers.append(nn.ModuleList([attention, mlp]))`) those, as nobody calls the list itself."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(module, _LISTS) and type(child).forward is nn.Module.forward:
            yield from _entries(inner, child)
        else:
            yield inner, child


def _is_only_layer(module: nn.Module) -> bool:
    """Whether it is a list for layers that has one: a small model is planned like a large one."""
    return isinstance(module, nn.ModuleList) and len(module) == 1


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and sum(p.ndim > 1 for p in module.parameters()) > 1


class Calls:
    """What blocks are called with and answer, by kind and signature of the arguments: each is run once."""

    def __init__(self, units: list[Unit], mode: FakeOrReal) -> None:
        self._units, self._mode = units, mode
        self._found: dict[tuple[object, object], Call] = {}

    def first(self, kind: object) -> Call | None:
        """A call of a block of this kind; None if none was called."""
        return next((call for (known, _), call in self._found.items() if known == kind), None)

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, blocks answer what is known, as whole values, without running; what is not known is run and remembered."""
        before: list[tuple[nn.Module, Any]] = []
        try:
            for unit in self._units:
                before.append((unit.module, unit.module.__dict__.get("forward")))
                unit.module.__dict__["forward"] = self._stand_in(unit, unit.module.forward)
            yield
        finally:
            for module, own in before:
                if own is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = own

    def _stand_in(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            _charge(args, kwargs)
            args, kwargs = _torch.tree_map(_whole, (args, kwargs))
            key = unit.kind, signature_of((args, kwargs))
            known = self._found.get(key)
            if known is None:
                given_args, given_kwargs = copied_with((args, kwargs), _detached)
                out = forward(*args, **kwargs)
                known = self._found[key] = Call(given_args, given_kwargs, copied_with(out, _detached))
            return copied_with(known.out, self._mode.like)

        return answer


def _charge(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A stream that enters a block cut would go on so, and be gathered again and again: worse than the one gathering that shows."""
    stream = next((leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
    if isinstance(stream, SplitTensor) and not stream.is_partial:
        stream.ranks.note("all-gather", 16 * stream.numel() * stream.element_size(), "the stream enters a block cut")


def _whole(value: Any) -> Any:
    return whole(value, "enters a repeated block") if isinstance(value, SplitTensor) else value


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad and tensor.is_floating_point())


def capture(subject: Subject, units: list[Unit]) -> Calls:
    """The calls of the units in one plain run of the whole."""
    calls = Calls(units, subject.mode)
    module, mode = subject.module, subject.mode
    with (
        untouched(module, mode),
        with_own_forwards(module),
        mode.on(),
        _torch.fake_failures_unsaid(),
        escapes(),
        calls.standing_in(),
    ):
        seats, parameters = seats_of(module)
        with (
            planned_region(),
            showing(seats, {name: mode.like(p) for name, p in parameters.items()}),
            torch.enable_grad(),
        ):
            args, kwargs = subject.arguments()
            module(*args, **kwargs)
    return calls
