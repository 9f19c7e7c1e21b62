"""Results of torch calls in the glue that need not be worked out again: the same call was made at other sizes.

A call that changes tensors it is given, and gives one of them back or nothing, is foreseen too: what it does to their specs is
nothing, and that it has changed them is noted in their versions, as torch would.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from epl.graph.context import Context
from epl.graph.record.shapes import Form, Rule
from epl.graph.record.tree import children_of, is_plain
from epl.graph.spec import Spec

_CONTAINERS = frozenset({tuple, list, torch.Size})


class Opaque(Exception):
    """Something about which nothing can be foreseen."""


class Foreseen(NamedTuple):
    """A result, and for each of its tensors the spec, and the argument whose memory it shares."""

    result: Any
    specs: list[Spec]
    shares: tuple[torch.Tensor | None, ...]


class _Kept(NamedTuple):
    rule: Rule
    kind: type[Any] | None
    """Of a result that is a tuple or a list; None for a single tensor."""
    shares: tuple[int | None, ...]
    """For each tensor of the result the number of the argument whose memory it shares."""


class _Changes(NamedTuple):
    """Of a kind of call that changes tensors in place."""

    rule: Rule
    touched: tuple[int, ...]
    """The numbers of the arguments that it changes."""
    returns: int | None
    """The number of the one that it returns, if it returns one."""


class Foresight:
    """Kept from recording to recording. Calls that draw, or return anything but tensors, are not foreseen."""

    def __init__(self, fresh: Callable[[Spec], torch.Tensor]) -> None:
        """`fresh` makes a fake tensor of a spec."""
        self._fresh = fresh
        self._kept: dict[Hashable, _Kept | None] = {}
        self._changes: dict[Hashable, _Changes | None] = {}

    def call(
        self, func: Any, args: Any, kwargs: Any, spec_of: Callable[[torch.Tensor], Spec]
    ) -> tuple[Hashable, tuple[int, ...]] | None:
        """What is the same for calls of one kind, and the sizes in which they differ; None for a call of no known kind."""
        sizes: list[int] = []
        try:
            described = describe(args, sizes, spec_of), describe(kwargs, sizes, spec_of)
            kind = (func, described, Context.now(), torch.get_default_dtype())
            hash(kind)
        except (Opaque, TypeError):
            return None
        return kind, tuple(sizes)

    def foresee(self, call: tuple[Hashable, tuple[int, ...]], inputs: Sequence[torch.Tensor]) -> Foreseen | None:
        """The result of a call, if it follows from others."""
        kept = self._kept.get(call[0])
        specs = None if kept is None else kept.rule.predict(call[1])
        if kept is None or specs is None:
            return None
        made = [self._fresh(spec) for spec in specs]
        shares = tuple(None if number is None else inputs[number] for number in kept.shares)
        return Foreseen(made[0] if kept.kind is None else kept.kind(made), specs, shares)

    def change(self, call: tuple[Hashable, tuple[int, ...]], inputs: Sequence[torch.Tensor]) -> tuple[Any] | None:
        """What a call that changes its arguments returns, in a tuple, if that follows from others; they count as changed."""
        kept = self._changes.get(call[0])
        if kept is None or kept.rule.predict(call[1]) is None:
            return None
        increment_version([inputs[number] for number in kept.touched])
        return (None if kept.returns is None else inputs[kept.returns],)

    def observe_change(
        self,
        call: tuple[Hashable, tuple[int, ...]],
        inputs: Sequence[torch.Tensor],
        touched: Sequence[torch.Tensor],
        result: Any,
        before: Callable[[torch.Tensor], Spec],
    ) -> None:
        """Note what a call has done that has changed arguments; `before` tells what their specs were."""
        numbers = tuple(n for n, each in enumerate(inputs) if _any_is([each], touched))
        returned = [n for n, each in enumerate(inputs) if each is result]
        specs = list(map(Spec.of, touched))
        if (result is not None and not returned) or specs != list(map(before, touched)):
            self._changes[call[0]] = None
            return
        changes = _Changes(Rule(tuple(map(Form.of, specs)), None), numbers, returned[0] if returned else None)
        kept = self._changes.setdefault(call[0], changes)
        if kept is not None and kept[1:] != changes[1:]:
            self._changes[call[0]] = kept = None
        if kept is not None:
            kept.rule.observe(call[1], specs, None)

    def observe(
        self,
        call: tuple[Hashable, tuple[int, ...]],
        inputs: Sequence[torch.Tensor],
        result: Any,
        memory_of: Callable[[torch.Tensor], int],
    ) -> None:
        """Note what a call has returned; `memory_of` gives a number that tensors have in common if they share memory."""
        kind = type(result) if type(result) in (tuple, list) else None
        made: list[Any] = [result] if kind is None else list(result)
        if not made or not all(isinstance(each, torch.Tensor) for each in made) or _any_is(made, inputs):
            self._kept[call[0]] = None
            return
        memories = list(map(memory_of, inputs))
        shares = tuple(_index(memories, memory_of(each)) for each in made)
        specs = [Spec.of(each) for each in made]
        kept = self._kept.setdefault(call[0], _Kept(Rule(tuple(map(Form.of, specs)), None), kind, shares))
        if kept is not None and (kept.kind, kept.shares) != (kind, shares):
            self._kept[call[0]] = kept = None
        if kept is not None:
            kept.rule.observe(call[1], specs, None)


def describe(
    value: Any,
    sizes: list[int],
    spec_of: Callable[[torch.Tensor], Spec],
    whole: Callable[[Any], bool] | None = None,
) -> Any:
    """An argument without its sizes, which are added to `sizes`; whole numbers are sizes, too. A Spec stands for its tensor.

    Without `whole`, only plain containers are looked into; with it all are, but for what it says is an object.
    """
    kind = type(value)
    if kind is int:
        sizes.append(value)
        return int
    if kind is Spec or isinstance(value, torch.Tensor):
        spec = value if kind is Spec else spec_of(value)
        sizes.extend(spec.shape)
        return Form.of(spec)
    if kind in _CONTAINERS:
        return (kind, *[describe(each, sizes, spec_of, whole) for each in value])
    if kind is dict:
        return (dict, *[(key, describe(each, sizes, spec_of, whole)) for key, each in value.items()])
    if kind is slice:
        return (slice, *[describe(each, sizes, spec_of, whole) for each in (value.start, value.stop, value.step)])
    if is_plain(value):
        return kind, value
    if whole is None:
        raise Opaque
    inner = None if whole(value) else children_of(value)
    if inner is None:
        return kind
    names = tuple(value) if isinstance(value, dict) else ()
    return (kind, names, *[describe(each, sizes, spec_of, whole) for each in inner[0]])


def _any_is(made: Sequence[Any], inputs: Sequence[torch.Tensor]) -> bool:
    return any(each is given for each in made for given in inputs)


def _index(memories: Sequence[int], memory: int) -> int | None:
    return memories.index(memory) if memory in memories else None
