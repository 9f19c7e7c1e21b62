"""What an operation would return, from fake tensors; remembered, since a loop repeats itself.

A loop over changing lengths repeats itself at other sizes: what torch's own functions return there follows from the sizes they
were asked about before (epl.graph.record.shapes). A loss takes 4 ms on fake tensors.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from epl import _torch
from epl.graph.context import Context
from epl.graph.record.foresight import Opaque, describe
from epl.graph.record.shapes import Form, Rule
from epl.graph.spec import Spec, leaves_of, swap
from epl.train.separate.program import freeze


class NeedsDataError(Exception):
    """The result of this operation cannot be described without the values: it is a read."""


class Inferred(NamedTuple):
    """What an operation would return, and what it would do beside."""

    spec: Any
    """A Spec, or a tree of them."""
    has_effects: bool
    """Whether it draws random numbers or writes into a tensor it is given: then every rank must run it, so that all ranks'
    random states and tensors stay alike."""


_known: dict[Hashable, Any] = {}
_lock = threading.Lock()  # filters of warnings, and torch's random state, belong to the whole process
_MOST = 10_000  # remembered results; a loop over ever new lengths must not grow for ever


def infer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inferred:
    """What `func` would return; `args` holds Specs in the place of tensors."""
    if func is F.ctc_loss:
        return Inferred(_ctc_spec(args, kwargs), False)
    context = Context.now()
    key: Hashable = (func, freeze(args), freeze(kwargs), context, torch.get_default_dtype())
    try:
        found = _known.get(key)
    except TypeError:  # an argument that cannot be compared
        return _checked(_run(func, args, kwargs, context))
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[key] = _foreseen_or_run(func, args, kwargs, context)
    return _checked(found)


def _checked(found: Inferred | NeedsDataError) -> Inferred:
    if isinstance(found, NeedsDataError):
        raise NeedsDataError(*found.args)
    return found


class _Kept(NamedTuple):
    """What a kind of call has returned at some sizes."""

    first: Inferred
    rule: Rule

    def predict(self, sizes: tuple[int, ...]) -> Inferred | None:
        """What it returns at others, if that follows."""
        specs = self.rule.predict(sizes)
        if specs is None:
            return None
        rest = iter(specs)
        return self.first._replace(
            spec=swap(self.first.spec, Spec, lambda spec: next(rest)._replace(is_view=spec.is_view))
        )


_kept: dict[Hashable, _Kept] = {}


def _foreseen_or_run(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Context
) -> Inferred | NeedsDataError:
    sizes: list[int] = []
    try:
        if not _is_torchs(func):  # what the code of others does at other sizes is its own affair
            raise Opaque
        described = describe((args, kwargs), sizes, Spec.of)
        kind = (func, described, context, torch.get_default_dtype())
        hash(kind)
    except (Opaque, TypeError):
        return _run(func, args, kwargs, context)
    with _lock:
        kept = _kept.get(kind)
        foreseen = None if kept is None else kept.predict(tuple(sizes))
    if foreseen is not None:
        return foreseen
    found = _run(func, args, kwargs, context)
    if isinstance(found, Inferred) and (specs := leaves_of(found.spec, Spec)):
        around = (freeze(swap(found.spec, Spec, lambda spec: spec.is_view)), found.has_effects)
        with _lock:
            if len(_kept) >= _MOST:
                _kept.clear()
            kept = _kept.setdefault(kind, _Kept(found, Rule(tuple(map(Form.of, specs)), around)))
            kept.rule.observe(tuple(sizes), specs, around)
    return found


def _is_torchs(func: Callable[..., Any]) -> bool:
    module = getattr(func, "__module__", None) or "torch"  # functions written in C have none
    return module.partition(".")[0] == "torch" and not isinstance(
        func, types.MethodType
    )  # nor an autograd.Function's apply


def _run(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Context
) -> Inferred | NeedsDataError:
    with _lock:
        return _run_alone(func, args, kwargs, context)


def _run_alone(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Context
) -> Inferred | NeedsDataError:
    state = torch.get_rng_state()
    held: set[int] = set()
    effects: list[Any] = []

    def note(operation: Any, given: tuple[Any, ...]) -> None:
        changed = [t for t in _torch.changed_arguments(operation, given) if isinstance(t, torch.Tensor)]
        if _torch.draws(operation) or any(_torch.memory_of(t) in held for t in changed):
            effects.append(operation)

    try:
        with (
            warnings.catch_warnings(action="ignore"),  # the real operation will say so
            _torch.fake_mode(),
            _torch.fake_failures_unsaid(),
            torch.inference_mode(False),
            torch.set_grad_enabled(context.grad),
            _torch.no_tensor_subclass(),
        ):
            inputs = swap((args, kwargs), Spec, Spec.empty)
            held |= {_torch.memory_of(t) for t in leaves_of(inputs, torch.Tensor)}
            with _torch.OperationWatch(note):
                out = func(*inputs[0], **inputs[1])
            spec = swap(out, torch.Tensor, lambda t: Spec.of(t)._replace(is_view=_torch.memory_of(t) in held))
            return Inferred(spec, bool(effects))
    except Exception as error:
        # Data-dependent, unknown to fake tensors, or wrong: the real operation will tell.
        return NeedsDataError(str(error))
    finally:
        torch.set_rng_state(state)


def _ctc_spec(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spec:
    """ctc_loss on fake tensors asks for the lengths, though the shape of its result does not depend on them."""
    x, reduction = args[0], kwargs.get("reduction", "mean")
    shape = torch.Size([x.shape[1]] if reduction == "none" else [])
    return Spec(shape, (1,) * len(shape), x.dtype, x.device, x.requires_grad and Context.now().grad)
