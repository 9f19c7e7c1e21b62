"""The user's line that is being executed."""

from __future__ import annotations

import sys

# Frames of these are machinery between the user's line and the torch call it makes.
_MACHINERY = ("torch", "contextlib", "functools", "epl")


def user_line() -> str:
    """`file:line` of the innermost caller outside torch and epl; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _MACHINERY:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


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
