"""What bypasses torch functions, and the way round. Torch is itself again when the last split part is gone.

checkpoint              runs again in backward: parameters must be split values again, and the ranks' random streams rewound
autograd.Function       asks no tensor subclass: split values would lose their graph in silence. They are gathered first
torch.jit.script        neither does a scripted function: its operations would meet a value that is below torch functions
torch.compile           would trace into split values and what they send: inside split parts it leaves functions as they are
nn.TransformerEncoder   in evaluation it hands nested tensors to its layers, which may be split parts
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, check_backward_validity, checkpoint, noop_context_fn

from epl import _torch
from epl.graph.spec import leaves_of
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import Region, region
from epl.parallel.split.user_rules import rule_of_function
from epl.parallel.split.value import SplitTensor


def install_escapes() -> Callable[[], None]:
    """Keep split parts right where torch goes around them; call what is returned to end that. May be installed several times."""
    with _patches.lock:
        _patches.users += 1
        if _patches.users == 1:
            _patches.apply()
        _patches.apply_to_compiler()
    undone = False

    def undo() -> None:
        nonlocal undone
        with _patches.lock:
            if not undone:
                undone = True
                _patches.users -= 1
                if _patches.users == 0:
                    _patches.remove()

    return undo


@contextlib.contextmanager
def escapes() -> Iterator[None]:
    """Inside, they are installed."""
    undo = install_escapes()
    try:
        yield
    finally:
        undo()


class _Patches:
    def __init__(self) -> None:
        self.users = 0
        self.lock = threading.RLock()  # a part may be collected, and undo this, while another is made
        self._undo: list[Callable[[], None]] = []
        self._compiler_is_known = False

    def apply(self) -> None:
        self._undo = [
            _torch.replace_checkpoints(_checkpoints),
            _torch.watch_function_applications(_application),
            _scripted_functions(),
            _encoders_without_nesting(),
        ]

    def apply_to_compiler(self) -> None:
        """The compiler is loaded when somebody first asks for it, perhaps after the first part was made."""
        if not self._compiler_is_known and "torch._dynamo.eval_frame" in sys.modules:
            self._compiler_is_known = True
            self._undo.append(_torch.compiled_unless(lambda: region.depth > 0))

    def remove(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self._compiler_is_known = False


_patches = _Patches()


# ---- checkpoint ------------------------------------------------------------------------------------------------------


class _Moment:
    """Where a checkpointed function was called: inside which part, at which place of the ranks' random streams."""

    def __init__(self) -> None:
        self._region = region.__dict__.copy()
        self._streams = [(ranks, ranks.streams(), ranks.call) for ranks in streams_here()]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside it is that moment again; what has entered since then is not remembered."""
        before = region.__dict__.copy()
        now = [(ranks, ranks.streams(), ranks.call) for ranks, _, _ in self._streams]
        _become(region, self._region)
        region.entered = {}
        for ranks, streams, call in self._streams:
            ranks.set_streams(streams)
            if call is not None:  # inside the model: another call of other rows may have followed
                ranks.call = call
        try:
            # autograd.grad(loss, [a cut parameter]) runs a backward in which subclasses are not asked
            with _torch.tensor_subclasses_asked():
                yield
        finally:
            _become(region, before)
            for ranks, streams, call in now:
                ranks.set_streams(streams)
                ranks.call = call


def _become(here: Region, state: dict[str, Any]) -> None:
    here.__dict__.clear()
    here.__dict__.update(state)


class _Here(threading.local):
    def __init__(self) -> None:
        self.ranks: list[SplitRanks] = []


_here = _Here()


def remember_stream(ranks: SplitRanks) -> None:
    """Parts of these ranks run in this thread: their random streams are rewound by checkpoints."""
    if ranks not in _here.ranks:
        _here.ranks.append(ranks)


def forget_stream(ranks: SplitRanks) -> None:
    """No part of these ranks is left in this thread."""
    if ranks in _here.ranks:
        _here.ranks.remove(ranks)


def streams_here() -> list[SplitRanks]:
    """The ranks whose parts run in this thread."""
    return list(_here.ranks)


def _checkpoints(original: Callable[..., Any]) -> Callable[..., Any]:
    def generator(
        function: Any, preserve_rng_state: bool = True, context_fn: Any = noop_context_fn, *args: Any, **kwargs: Any
    ) -> Any:
        given = context_fn
        if streams_here():
            moment = _Moment()

            def both() -> tuple[Any, Any]:
                first, again = given()
                return first, _Nested(again, moment)

            context_fn = both
        return original(function, preserve_rng_state, context_fn, *args, **kwargs)

    return generator


class _Nested:
    """What surrounds each computing again. There are several where backward goes through the graph more than once: gradients of inputs and
    of weights apart (ZeroBubble), two losses (`retain_graph`)."""

    def __init__(self, outer: Any, moment: _Moment) -> None:
        self._outer, self._moment = outer, moment
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._outer)
            stack.enter_context(self._moment.again())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class _Reentered:
    """The function of a reentrant checkpoint, which is called in forward, and again in every backward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._moment: _Moment | None = None

    def __call__(self, *args: Any) -> Any:
        if self._moment is None:
            self._moment = _Moment()
            return self._function(*args)
        with self._moment.again():
            return self._function(*args)


# ---- autograd.Function -----------------------------------------------------------------------------------------------


def _application(owner: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if owner is CheckpointFunction:
        if region.depth:  # its forward has no graph, so what is split could not enter or leave: the other kind can
            if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in args[2:]):
                check_backward_validity(args[2:])
                with torch.no_grad():  # as this kind has it: nothing inside learns, with torch's warning
                    return args[0](*args[2:])
            return checkpoint(args[0], *args[2:], use_reentrant=False, preserve_rng_state=args[1])
        if streams_here():
            return original(_Reentered(args[0]), *args[1:], **kwargs)
    if any(map(_holds_split, args)):
        rule = rule_of_function(owner)
        out = NotImplemented if rule is None else rule(original, *args, **kwargs)
        return out if out is not NotImplemented else _Gathering(owner.__name__, original)(*args, **kwargs)
    return original(*args, **kwargs)


def _holds_split(value: Any) -> bool:
    return isinstance(value, SplitTensor) or (type(value) in (list, tuple) and bool(leaves_of(value, SplitTensor)))


class _Gathering:
    """A function that asks no tensor subclass, asked in the way of those that do: without a rule, split arguments are gathered."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__, self._function = name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        split = leaves_of((args, kwargs), SplitTensor)
        if not split:
            return self._function(*args, **kwargs)
        asked = next((type(value) for value in split if type(value) is not SplitTensor), SplitTensor)  # as torch does
        return asked.__torch_function__(self, (), args, kwargs)


# ---- torch.jit.script ------------------------------------------------------------------------------------------------


def _scripted_functions() -> Callable[[], None]:
    original = torch.jit.ScriptFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        return _Gathering(self.name, run)(*args, **kwargs)

    torch.jit.ScriptFunction.__call__ = call  # type: ignore[method-assign]

    def undo() -> None:
        if torch.jit.ScriptFunction.__call__ is call:
            torch.jit.ScriptFunction.__call__ = original  # type: ignore[method-assign]

    return undo


# ---- nn.TransformerEncoder -------------------------------------------------------------------------------------------


def _encoders_without_nesting() -> Callable[[], None]:
    original = nn.TransformerEncoder.forward

    def forward(self: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.use_nested_tensor or not any(is_split(layer) for layer in self.layers):
            return original(self, *args, **kwargs)
        self.use_nested_tensor = False
        try:
            return original(self, *args, **kwargs)
        finally:
            self.use_nested_tensor = True

    nn.TransformerEncoder.forward = forward  # type: ignore[method-assign]

    def undo() -> None:
        if nn.TransformerEncoder.forward is forward:
            nn.TransformerEncoder.forward = original  # type: ignore[method-assign]

    return undo


def is_split(module: nn.Module) -> bool:
    """Whether the module is, or is in, a split part."""
    return getattr(module.__dict__.get("forward"), "is_split_forward", False)
