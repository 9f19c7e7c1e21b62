"""Which line of the user's own code is running: the words ranks exchange and the errors name it."""

from __future__ import annotations

import sys
from pathlib import Path

_LIBRARIES = ("epl", "torch", "contextlib", "runpy", "importlib", "threading")


def user_place() -> str:
    """`file.py:12` of the innermost caller that is neither epl nor torch; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
