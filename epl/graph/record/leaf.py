"""What a module that is recorded as a whole would return, without its numbers.

    remembered    a module like it was given the same specs before (epl.graph.record.memo)
    foreseen      it follows from other sizes (epl.graph.record.shapes)
    on fakes      the module runs on fake tensors, hooks and all; its parts may be remembered in turn
    for real      it cannot (it reads numbers, or its shapes depend on them): it runs once on stand-ins of the right specs,
                  parameters included, since those of other stages have no numbers

A module that is given an object may change it, and one that is not run does not. So nothing is remembered of such modules
until `verifying` has shown that the forward comes out the same whether they run or not (`trusted`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from epl import _torch
from epl.cluster.pickling import load_around_tensors
from epl.graph.record import hooks
from epl.graph.record.chance import PythonStreams, torch_streams_kept
from epl.graph.record.fakes import FakeModel
from epl.graph.record.memo import Memo
from epl.graph.record.objects import dump, put_back, without_caches
from epl.graph.record.tree import leaves_of, skeleton
from epl.graph.spec import Spec

_WORTHWHILE = 4
"""Modules that a part of a leaf consists of at least, to be remembered by itself."""


_stand_in_runs = 0


def on_stand_ins() -> bool:
    """Whether a module runs for real only to be recorded: on numbers that mean nothing, and maybe on this rank alone."""
    return _stand_in_runs > 0


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
        """Whether a module that is given an object may be remembered too."""
        self.verifying = False
        """Whether that is being found out: only such modules are not run."""
        self.saw_objects = False
        """Whether a module was given an object."""
        self.minds_hooks = False
        """Whether modules with hooks are run every time: the forward has shown that it counts on what a hook takes out."""
        self.readers: dict[str, set[str]] = {}
        """By the names of modules: those whose traces in an object they were seen to use."""
        self.memo = Memo(self.fresh)
        self._model, self._mode = model, mode
        self._anchor: torch.Tensor | None = None
        self._needs_numbers: set[int] = set()
        self._sizes: dict[nn.Module, int] = {}
        self._is_real = False

    @property
    def need_numbers(self) -> bool:
        """Whether some of them had to run for real."""
        return bool(self._needs_numbers)

    def run(
        self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any, whole: Callable[[Any], bool]
    ) -> Any:
        """The result of a leaf. `original` calls a module; `whole` says what among the arguments is an object."""
        self.memo.foresaw = False
        return self._result(module, original, args, kwargs, whole, part=False)

    def foresaw(self, module: nn.Module) -> bool:
        """Whether the result of the leaf that has just run is such that it can be wrong, and be compared at run time: not that of
        a module that needs numbers, whose shape may depend on them."""
        return self.memo.foresaw and self.memo.number(module) not in self._needs_numbers

    def run_part(
        self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any, whole: Callable[[Any], bool]
    ) -> Any:
        """The result of a module inside a leaf that is running."""
        if module not in self._sizes:
            self._sizes[module] = sum(1 for _ in module.modules())
        if self._is_real or self._sizes[module] < _WORTHWHILE:
            return original(module, *args, **kwargs)
        return self._result(module, original, args, kwargs, whole, part=True)

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

    def _result(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
        whole: Callable[[Any], bool],
        part: bool,
    ) -> Any:
        found = list(leaves_of((args, kwargs), whole))
        inputs = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        things = [leaf for leaf in found if not isinstance(leaf, torch.Tensor)]
        self.saw_objects |= bool(things)
        runs = self.minds_hooks and any(map(hooks.has_hooks, module.modules()))
        call = None if runs else self.memo.call(module, args, kwargs, whole)
        may_skip = self.trusted if things else part or not self.verifying
        known = self.memo.recall(call, inputs, things) if call is not None and may_skip else None
        if known is not None:
            return known[0]
        versions = [_torch.version_of(t) for t in inputs]
        result = original(module, *args, **kwargs) if part else self._run(module, original, args, kwargs, things)
        if not part:
            result = without_caches(result, things)
        unchanged = [_torch.version_of(t) for t in inputs] == versions
        if call is not None and unchanged:
            self.memo.keep(call, result, inputs, things)
        return result

    def _run(
        self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any, things: Sequence[Any]
    ) -> Any:
        number = self.memo.number(module)
        streams, before = PythonStreams(), [dump(thing) for thing in things]
        hooked = any(map(hooks.has_hooks, module.modules()))
        try:
            if number is None or number not in self._needs_numbers:
                for without_hooks in (False, True)[: 1 + hooked]:
                    hooks_out = hooks.left_out(module) if without_hooks else contextlib.nullcontext()
                    with contextlib.suppress(Exception), _torch.fake_failures_unsaid(), hooks_out:
                        return original(module, *args, **kwargs)
                    for thing, state in zip(things, before, strict=True):
                        put_back(thing, *state)
            result = self._hooked(module, original, args, kwargs, self._for_real(module, original, args, kwargs))
        finally:
            streams.restore()  # the module will draw when it runs
        if number is not None:
            self._needs_numbers.add(number)
        return result

    def _hooked(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> Any:
        """The result, after the module's own hooks have seen it: where they take something of it out, that is fake, too."""
        if not hooks.has_hooks(module):
            return result
        before = module.__dict__.get("forward")
        module.__dict__["forward"] = lambda *args, **kwargs: result
        try:
            with contextlib.suppress(Exception), _torch.fake_failures_unsaid():
                return original(module, *args, **kwargs)
            return result
        finally:
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before

    def _for_real(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        failure: Exception | None = None
        for made in STAND_INS:
            try:
                return self._on_numbers(module, original, args, kwargs, made)
            except Exception as error:  # of the module's code
                failure = failure or error
        assert failure is not None
        raise failure

    def _on_numbers(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
        made: Callable[[Spec], torch.Tensor],
    ) -> Any:
        global _stand_in_runs
        leaves, fill = skeleton((args, kwargs))
        self._is_real = True
        _stand_in_runs += 1
        try:
            with _torch.without_fake_mode(), torch_streams_kept(), hooks.left_out(module):
                real = [made(Spec.of(leaf)) if isinstance(leaf, torch.Tensor) else _copy(leaf, made) for leaf in leaves]
                args, kwargs = fill(real)
                with self._model.filled(module, made):
                    result = original(module, *args, **kwargs)
        finally:
            self._is_real = False
            _stand_in_runs -= 1
        found, refill = skeleton(result)
        handed = {id(copy): leaf for copy, leaf in zip(real, leaves, strict=True) if not isinstance(leaf, torch.Tensor)}
        return refill([self.fresh(Spec.of(f)) if isinstance(f, torch.Tensor) else handed.get(id(f), f) for f in found])


def _copy(thing: Any, made: Callable[[Spec], torch.Tensor]) -> Any:
    data, tensors = dump(thing)
    return load_around_tensors(data, [made(Spec.of(t)) for t in tensors])


def stand_in(spec: Spec) -> torch.Tensor:
    """Real numbers: small ones, first entries of tables, masks that let everything through."""
    if spec.dtype is torch.bool:
        tensor = torch.ones(spec.shape, dtype=spec.dtype, device=spec.device)
    elif spec.dtype.is_floating_point or spec.dtype.is_complex:
        tensor = torch.randn(spec.shape, device=spec.device).mul_(0.02).to(spec.dtype)
    else:
        tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    return tensor.requires_grad_(spec.requires_grad)


def different_stand_in(spec: Spec) -> torch.Tensor:
    """The same, but integers along the last dim are different ones: as in what `topk` and `argsort` give."""
    tensor = stand_in(spec)
    if spec.shape and not (spec.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex()):
        tensor += torch.arange(spec.shape[-1], device=spec.device).to(spec.dtype)
    return tensor


STAND_INS = (stand_in, different_stand_in)
"""Numbers to run a module on, the first with which it does not fail: 0 is an index of every table, but a row with the same expert
twice is nothing that code which counts and sorts them has to bear."""
