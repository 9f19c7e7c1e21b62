"""Where in the user's program the caller stands: inside a module's construction, inside its forward, or in neither.

Scopes mean different things in the two places, and Python's own call stack is the only witness that needs no
bookkeeping on every module call.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import CodeType, FrameType
from typing import Literal

from torch import nn

Place = Literal["construction", "forward"]

# Taken once, at import: a tracer that replaces `Module.__call__` still calls this one underneath.
_MODULE_CALL: CodeType = nn.Module.__call__.__code__


def _outwards() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_method_of_module(frame: FrameType, name: str) -> bool:
    code = frame.f_code
    if code.co_name != name or not code.co_argcount:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), nn.Module)


def _is_module_call(frame: FrameType) -> bool:
    # A checkpointed function runs again during backward, on the autograd engine's stack, without its module's call.
    return frame.f_code is _MODULE_CALL or frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def place() -> Place | None:
    """The innermost of the two places the caller stands in; None in a training loop or a plain builder function."""
    for frame in _outwards():
        if _is_module_call(frame):
            return "forward"
        if _is_method_of_module(frame, "__init__"):
            return "construction"
    # `model.forward(x)` called by hand. Looked for last: reading a frame's locals keeps them alive until it returns,
    # which in a forward would be activations.
    if any(_is_method_of_module(frame, "forward") for frame in _outwards()):
        return "forward"
    return None


def passes(codes: Collection[CodeType]) -> bool:
    """Whether the innermost forward that the caller stands in is one of these."""
    for frame in _outwards():
        if frame.f_code in codes:
            return True
        if _is_module_call(frame):
            return False
    return False


def call_is_outermost() -> bool:
    """Whether the module call in progress is made neither by another module's call nor by a module's `__init__`.

    For use in a forward pre-hook: the innermost call on the stack is then the call in question.
    """
    calls = 0
    for frame in _outwards():
        calls += _is_module_call(frame)
        if calls > 1 or _is_method_of_module(frame, "__init__"):
            return False
    return True
