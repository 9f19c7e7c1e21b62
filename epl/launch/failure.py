"""The record a rank leaves of the exception that ended it. Standard library only: it is loaded in every rank."""

from __future__ import annotations

import json
import os
import time
import traceback

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def record_failure(exc: BaseException) -> bool:
    """Note `exc` for the launcher; True if this was the first record of this rank, which is the one that stays.

    The form is that of torch's error file, so torchrun understands it too; `time` is ours (theirs has whole seconds,
    too coarse to tell which rank failed first). Without a launcher, or if the file cannot be written, nothing happens:
    recording an error must never hide it.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    now = time.time()
    ended_on_purpose = isinstance(exc, SystemExit)
    data = {
        "message": {
            "message": "".join(traceback.format_exception_only(exc)).strip(),
            "extraInfo": {
                "py_callstack": "" if ended_on_purpose else "".join(traceback.format_exception(exc)),
                "timestamp": str(int(now)),
            },
        },
        "time": now,
    }
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(json.dumps(data))
    except OSError:
        return False
    return True


def forget_failure() -> None:
    """Drop the record of an earlier program of this rank, whose failure the shell script has evidently survived."""
    path = os.environ.get(ERROR_FILE)
    if path and os.path.exists(path):
        os.unlink(path)
