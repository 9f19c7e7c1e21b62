"""What modules have returned, remembered by what they are and what they were given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from epl import _torch
from epl.cluster.pickling import load_around_tensors
from epl.graph.context import Context
from epl.graph.record.fingerprint import fingerprint
from epl.graph.record.foresight import describe
from epl.graph.record.hooks import has_hooks
from epl.graph.record.objects import dump
from epl.graph.record.shapes import Form, Rule
from epl.graph.record.tree import Rebuild, freeze, skeleton, tensors_of
from epl.graph.spec import Spec

_LIMIT = 20_000
"""Results that are remembered at most."""


class Call(NamedTuple):
    """A call of a module, without numbers."""

    kind: Hashable
    """The module's fingerprint and its arguments without their sizes."""
    sizes: tuple[int, ...]


class _Given(NamedTuple):
    """An object among the arguments, handed through."""

    number: int


class _Passed(NamedTuple):
    """A tensor among the arguments, handed through (T5's layers do so with their position bias)."""

    number: int


class _Made(NamedTuple):
    """An object that the module has made, around so many tensors."""

    data: bytes
    tensors: int


_Leaf = _Given | _Passed | _Made | None
"""Of a result; None is a tensor that the module has made."""


class _Shape(NamedTuple):
    """A result without its tensors."""

    leaves: tuple[_Leaf, ...]
    fill: Rebuild

    def build(self, tensors: Iterator[torch.Tensor], inputs: Sequence[torch.Tensor], given: Sequence[Any]) -> Any:
        """The result, with these tensors, and tensors and objects of the call."""
        return self.fill([_leaf(each, tensors, inputs, given) for each in self.leaves])


def _leaf(leaf: _Leaf, tensors: Iterator[torch.Tensor], inputs: Sequence[torch.Tensor], given: Sequence[Any]) -> Any:
    if leaf is None:
        return next(tensors)
    if isinstance(leaf, _Passed):
        return inputs[leaf.number]
    if isinstance(leaf, _Given):
        return given[leaf.number]
    return load_around_tensors(leaf.data, [next(tensors) for _ in range(leaf.tensors)])


class _Kept(NamedTuple):
    """What a call has returned."""

    shape: _Shape
    specs: tuple[Spec, ...]
    foreseen: bool


class Memo:
    """Results by call; those of other sizes are foreseen from them."""

    def __init__(self, fresh: Callable[[Spec], torch.Tensor]) -> None:
        """`fresh` makes a fake tensor of a spec."""
        self._fresh = fresh
        self._fingerprints: dict[nn.Module, int | None] = {}
        self._parts: dict[nn.Module, list[nn.Module]] = {}
        self._numbers: dict[Hashable, int] = {}
        self.foresaw = False
        """Whether something was foreseen, or follows from what was, since this was last set: to be compared at run time."""
        self._kept: dict[Call, _Kept] = {}
        self._rules: dict[Hashable, tuple[_Shape, Rule]] = {}

    def forget_modules(self) -> None:
        """Look at the modules anew: something about them has changed."""
        self._fingerprints.clear()
        self._parts.clear()

    def number(self, module: nn.Module) -> int | None:
        """The same for modules that are alike; None for one of which nothing can be known."""
        if module not in self._fingerprints:
            found = fingerprint(module)
            self._fingerprints[module] = None if found is None else self._numbers.setdefault(found, len(self._numbers))
        return self._fingerprints[module]

    def call(self, module: nn.Module, args: Any, kwargs: Any, whole: Callable[[Any], bool]) -> Call | None:
        """What there is to know of a call; `whole` says what is an object. None if nothing can be remembered of it."""
        number = self.number(module)
        if number is None:
            return None
        if module not in self._parts:
            self._parts[module] = list(module.modules())
        if any(map(has_hooks, self._parts[module])):  # the forward itself may have registered some by now
            return None
        sizes: list[int] = []
        kind = (number, describe((args, kwargs), sizes, Spec.of, whole), Context.now(), torch.get_default_dtype())
        try:
            hash(kind)
        except TypeError:
            return None
        return Call(kind, tuple(sizes))

    def recall(self, call: Call, inputs: Sequence[torch.Tensor], given: Sequence[Any]) -> tuple[Any] | None:
        """The result of a call, in a tuple; `inputs` and `given` are the tensors and objects among its arguments."""
        known = self._kept.get(call)
        if known is None and call.kind in self._rules:
            shape, rule = self._rules[call.kind]
            specs = rule.predict(call.sizes)
            known = None if specs is None else _Kept(shape, tuple(specs), True)
        if known is None:
            return None
        self.foresaw |= known.foreseen
        return (known.shape.build(map(self._fresh, known.specs), inputs, given),)

    def keep(self, call: Call, result: Any, inputs: Sequence[torch.Tensor], given: Sequence[Any]) -> None:
        """Remember what a call has returned, unless that shares memory with other tensors, or is one of two arguments."""
        leaves, fill = skeleton(result)
        passed = {id(leaf): [n for n, each in enumerate(inputs) if each is leaf] for leaf in leaves}
        if any(len(places) > 1 for places in passed.values()) or _shares_memory(leaves, inputs):
            return
        specs: list[Spec] = []
        kinds: list[_Leaf] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                place = passed[id(leaf)]
                kinds.append(_Passed(place[0]) if place else None)
                specs += [] if place else [Spec.of(leaf)]
                continue
            handed = [number for number, each in enumerate(given) if each is leaf]
            if handed:
                kinds.append(_Given(handed[0]))
            else:
                data, tensors = dump(leaf)
                kinds.append(_Made(data, len(tensors)))
                specs += [Spec.of(t) for t in tensors]
        shape = _Shape(tuple(kinds), fill)
        if len(self._kept) >= _LIMIT:
            self._kept.clear()
        self._kept[call] = _Kept(shape, tuple(specs), self.foresaw)
        # Numbers among the results, and inside objects, may follow the sizes too: then there is no rule.
        around = (freeze(result, lambda leaf: None), shape.leaves)
        _, rule = self._rules.setdefault(call.kind, (shape, Rule(tuple(map(Form.of, specs)), around)))
        rule.observe(call.sizes, specs, around)


def _shares_memory(leaves: Sequence[Any], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether tensors of a result are views of each other, or of an argument that they are not themselves."""
    handed = set(map(id, inputs))
    made = [_torch.memory_of(t) for t in tensors_of(leaves) if id(t) not in handed]
    return len(set(made)) < len(made) or not set(made).isdisjoint(map(_torch.memory_of, inputs))
