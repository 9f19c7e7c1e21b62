"""Runs a Python script as `python script.py …` would, and records the exception that ends it.

Started by path, not with -m: importing the package `epl` here would import torch before the user's script begins.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path


def run(script: str, argv: list[str]) -> None:
    """Run `script` as `__main__` with `argv`; leaves by SystemExit where plain Python would end with a code."""
    failure = _load_failure()
    failure.forget_failure()
    sys.argv = [script, *argv]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    path = os.path.abspath(script)
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__builtins__=sys.modules["builtins"], __cached__=None, __package__=None, __annotations__={})
    sys.modules["__main__"] = main
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            failure.record_failure(end)
        raise
    except BaseException as error:
        # The first frame is this function's: users see their own traceback only.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        failure.record_failure(error)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def _load_failure() -> types.ModuleType:
    """failure.py beside this file, under a name that cannot meet a module of the user's."""
    spec = importlib.util.spec_from_file_location("_epl_launch_failure", Path(__file__).with_name("failure.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
