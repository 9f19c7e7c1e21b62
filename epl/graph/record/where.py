"""The user's line that is being executed."""

from __future__ import annotations

import sys
from types import FrameType

# Frames of these are machinery between the user's line and the call of torch or of a generator that it makes.
_MACHINERY = ("torch", "contextlib", "functools", "epl", "random", "numpy")


def user_line(frame: FrameType | None = None) -> str:
    """`file:line` of the innermost caller outside torch and epl, of this frame or of the function that asks; "" if there is
    none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if not is_machinery(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def is_machinery(frame: FrameType) -> bool:
    """Whether a frame is not the user's, nor of a library that the user's forward is written with."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in _MACHINERY


def inside_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint` has called what is running now, below the recorder."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "torch.utils.checkpoint":
            return True
        if name == "epl.graph.record.run" or frame.f_back is None:
            return False
        frame = frame.f_back
    return False
