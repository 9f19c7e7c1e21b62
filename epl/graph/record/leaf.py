"""What a module that is recorded as a whole would return, without its numbers.

remembered    a module with the same fingerprint was given the same specs before
predicted     it follows from other sizes (epl.graph.record.shapes)
on fakes      the module runs on fake tensors, hooks and all
for real      it cannot (it reads numbers, or its shapes depend on them): it runs once on stand-ins of the right specs,
              parameters included, since those of other stages have no numbers
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import nn

from epl import _torch
from epl.cluster.pickling import load_around_tensors
from epl.graph.context import Context
from epl.graph.record import hooks
from epl.graph.record.chance import PythonStreams, torch_streams_kept
from epl.graph.record.fakes import FakeModel
from epl.graph.record.fingerprint import fingerprint
from epl.graph.record.foresight import describe
from epl.graph.record.objects import dump
from epl.graph.record.shapes import Form, Rule
from epl.graph.record.tree import Rebuild, freeze, leaves_of, skeleton
from epl.graph.spec import Spec

_LIMIT = 20_000
"""Results that are remembered at most."""


class _Kept(NamedTuple):
    """A result without its tensors: specs in their places, and numbers of arguments for objects handed through."""

    specs: tuple[Spec | int, ...]
    fill: Rebuild


class _Call(NamedTuple):
    kind: Hashable
    """The module's fingerprint and its arguments without their sizes."""
    sizes: tuple[int, ...]


class Stamp(torch.autograd.Function):
    """Gives a fake tensor a history."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, mode: Any, spec: Spec) -> torch.Tensor:
        return _torch.make_fake(mode, spec.shape, spec.stride, spec.dtype, spec.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        raise AssertionError("recorded values are never differentiated")


class Leaves:
    """Runs leaves, and remembers; kept from recording to recording."""

    def __init__(self, model: FakeModel, mode: Any) -> None:
        """`mode`: the fake mode under which everything is recorded."""
        self.trusted = False
        """Whether a module that is given an object may be remembered too: what it does to the object does not matter."""
        self._model = model
        self._prints: dict[nn.Module, int | None] = {}
        self._numbers: dict[Hashable, int] = {}
        self._kept: dict[_Call, _Kept] = {}
        self._rules: dict[Hashable, tuple[Rule, Rebuild]] = {}
        self._needs_numbers: set[int] = set()
        self._mode = mode
        self._anchor: torch.Tensor | None = None

    def forget_modules(self) -> None:
        """Look at the modules anew: something about them has changed."""
        self._prints.clear()

    def forget(self) -> None:
        """Remember nothing."""
        self.forget_modules()
        self._kept.clear()
        self._rules.clear()

    def run(
        self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any, whole: Callable[[Any], bool]
    ) -> Any:
        """The module's result. `original` calls a module; `whole` says what among the arguments is an object."""
        things = [leaf for leaf in leaves_of((args, kwargs), whole) if not isinstance(leaf, torch.Tensor)]
        call = self._describe(module, args, kwargs, whole) if self.trusted or not things else None
        kept = None if call is None else self._recall(call)
        if kept is not None:
            return self._rebuild(kept, things)
        streams = PythonStreams()
        inputs = [leaf for leaf in leaves_of((args, kwargs), whole) if isinstance(leaf, torch.Tensor)]
        versions = [_torch.version_of(t) for t in inputs]
        try:
            result = self._run(module, original, args, kwargs)
        finally:
            streams.restore()  # the module will draw when it runs
        if [_torch.version_of(t) for t in inputs] == versions and not _shares_memory(result, inputs):
            call = call or self._describe(module, args, kwargs, whole)
            if call is not None:
                self._keep(call, result, things)
        return result

    # ---- running -----------------------------------------------------------------------------------------------------

    def _run(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self._number(module)
        if number is not None and number in self._needs_numbers:
            return self._for_real(module, original, args, kwargs)
        with _torch.fake_failures_unsaid():
            try:
                return original(module, *args, **kwargs)
            except Exception:
                if any(map(hooks.has_hooks, module.modules())):
                    with contextlib.suppress(Exception), hooks.left_out(module):
                        return original(module, *args, **kwargs)
        result = self._for_real(module, original, args, kwargs)
        if number is not None:
            self._needs_numbers.add(number)
        return result

    def _for_real(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, fill = skeleton((args, kwargs))
        with _torch.without_fake_mode(), torch_streams_kept(), hooks.left_out(module):
            real = [_stand_in(Spec.of(leaf)) if isinstance(leaf, torch.Tensor) else _copy(leaf) for leaf in leaves]
            args, kwargs = fill(real)
            with self._model.filled(module, _stand_in):
                result = original(module, *args, **kwargs)
        found, refill = skeleton(result)
        handed = {id(copy): leaf for copy, leaf in zip(real, leaves, strict=True) if not isinstance(leaf, torch.Tensor)}
        return refill([self.fresh(Spec.of(f)) if isinstance(f, torch.Tensor) else handed.get(id(f), f) for f in found])

    def fresh(self, spec: Spec) -> torch.Tensor:
        """A fake tensor of a spec, as an operation would have made it: not a leaf of autograd."""
        if len(spec.stride) != len(spec.shape):
            return spec.empty()
        if not spec.requires_grad:
            return _torch.make_fake(self._mode, spec.shape, spec.stride, spec.dtype, spec.device)
        if self._anchor is None:
            self._anchor = torch.empty((), requires_grad=True)
        with torch.enable_grad():
            return Stamp.apply(self._anchor, self._mode, spec)  # type: ignore[no-any-return, no-untyped-call]

    # ---- remembering -------------------------------------------------------------------------------------------------

    def _describe(self, module: nn.Module, args: Any, kwargs: Any, whole: Callable[[Any], bool]) -> _Call | None:
        number = self._number(module)
        if number is None:
            return None
        sizes: list[int] = []
        kind = (number, describe((args, kwargs), sizes, Spec.of, whole), Context.now(), torch.get_default_dtype())
        try:
            hash(kind)
        except TypeError:
            return None
        return _Call(kind, tuple(sizes))

    def _number(self, module: nn.Module) -> int | None:
        if module not in self._prints:
            print_ = fingerprint(module)
            self._prints[module] = None if print_ is None else self._numbers.setdefault(print_, len(self._numbers))
        return self._prints[module]

    def _recall(self, call: _Call) -> _Kept | None:
        kept = self._kept.get(call)
        if kept is None and call.kind in self._rules:
            rule, fill = self._rules[call.kind]
            specs = rule.predict(call.sizes)
            if specs is not None:
                kept = _Kept(tuple(specs), fill)
        return kept

    def _rebuild(self, kept: _Kept, things: list[Any]) -> Any:
        return kept.fill([things[s] if isinstance(s, int) else self.fresh(s) for s in kept.specs])

    def _keep(self, call: _Call, result: Any, things: list[Any]) -> None:
        leaves, fill = skeleton(result)
        specs: list[Spec | int] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                specs.append(Spec.of(leaf))
            else:
                same = [number for number, thing in enumerate(things) if thing is leaf]
                if not same:
                    return
                specs.append(same[0])
        if len(self._kept) >= _LIMIT:
            self._kept.clear()
        self._kept[call] = _Kept(tuple(specs), fill)
        tensors = [spec for spec in specs if isinstance(spec, Spec)]
        if len(tensors) == len(specs):
            around = freeze(result, lambda leaf: None)  # numbers among the results may follow the sizes too
            rule, _ = self._rules.setdefault(call.kind, (Rule(tuple(map(Form.of, tensors)), around), fill))
            rule.observe(call.sizes, tensors, around)


def _shares_memory(result: Any, inputs: list[torch.Tensor]) -> bool:
    made = [_torch.memory_of(t) for t in leaves_of(result) if isinstance(t, torch.Tensor)]
    return len(set(made)) < len(made) or not set(made).isdisjoint(map(_torch.memory_of, inputs))


def _copy(thing: Any) -> Any:
    data, tensors = dump(thing)
    return load_around_tensors(data, [_stand_in(Spec.of(t)) for t in tensors])


def _stand_in(spec: Spec) -> torch.Tensor:
    """Real numbers: small ones, first entries of tables, masks that let everything through."""
    if spec.dtype is torch.bool:
        tensor = torch.ones(spec.shape, dtype=spec.dtype, device=spec.device)
    elif spec.dtype.is_floating_point or spec.dtype.is_complex:
        tensor = torch.randn(spec.shape, device=spec.device).mul_(0.02).to(spec.dtype)
    else:
        tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    return tensor.requires_grad_(spec.requires_grad)
