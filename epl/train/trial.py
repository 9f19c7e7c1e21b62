"""A forked copy of this process that tries stage functions on micro batch 0 and leaves no trace of it.

What a function does to the program happens in the copy: lists and counters, buffers, random numbers, prints.
It is cut off from everything else (epl/train/seal.py), collectives end it, and after a few seconds its time is up.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from epl import _torch
from epl.errors import UsageError
from epl.parallel.pipeline.parcel import SINGLE, Form, enter_stage, in_words, put_together, take_apart
from epl.parallel.pipeline.stage import Received, Stage, StageProgram
from epl.train.seal import cut_off, die_after


@dataclass(frozen=True)
class Made:
    """A stage came through; the forms of what later stages get from it."""

    forms: Mapping[int, Form]


@dataclass(frozen=True)
class Raised:
    """A stage raised."""

    kind: str
    message: str
    whose: Literal["torch", "epl", "python"]
    """Who complained: an operation of torch, a check of epl's on what was returned, or Python code."""
    lines: tuple[tuple[str, int], ...]
    """Files and lines of the user's code that it went through."""
    trace: str
    received: str


@dataclass(frozen=True)
class Unknown:
    """It cannot be told here what the stage does."""

    why: str


Outcome = Made | Raised | Unknown


class Trial:
    """Tries the stages of this rank, one after the other, in one copy: a stage may use what an earlier one left in a variable."""

    def __init__(self, programs: Mapping[int, StageProgram], *, numbers: bool, seconds: float) -> None:
        """With `numbers` tensors are real, and those received are zeros; without, they only have shapes and dtypes."""
        self._pid, self._deadline = 0, time.monotonic() + seconds
        self._why = _why_not()
        if not self._why:
            try:
                self._start(programs, numbers, seconds)
            except OSError as error:
                self._why = f"no process could be started: {error}"

    def _start(self, programs: Mapping[int, StageProgram], numbers: bool, seconds: float) -> None:
        self._connection, theirs = Pipe()
        alone = threading.active_count() == 1
        drawn = random.getstate()  # Python draws a new seed in every child
        with theirs:
            self._pid = _fork()
            if self._pid == 0:
                try:
                    random.setstate(drawn)
                    _Copy(theirs, programs, numbers=numbers, alone=alone).serve(seconds)
                finally:
                    os._exit(0)

    def stage(self, index: int, received: Mapping[int, Form]) -> Outcome:
        """What becomes of one stage that is given values of these forms by earlier ones."""
        if self._why:
            return Unknown(self._why)
        try:
            self._connection.send((index, dict(received)))
            if not self._connection.poll(max(0.0, self._deadline - time.monotonic())):
                return Unknown("it took too long")
            outcome: Outcome = self._connection.recv()
        except (EOFError, OSError):
            return Unknown("the process that tried it died")
        return outcome

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            self._connection.close()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody else may have waited for it
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


def _why_not() -> str:
    """Why this process cannot be copied; empty if it can."""
    if sys.platform != "linux":
        return f"a copy of a process is not safe to use on {sys.platform}"
    if threading.current_thread() is not threading.main_thread():
        return "it was called on a thread that is not the main one"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "a copy of a process that uses CUDA is not safe to use"
    return ""


def _fork() -> int:
    if sys.version_info < (3, 12):
        return os.fork()
    with warnings.catch_warnings():  # the copy takes none of the locks that other threads may hold, or it is killed
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# ---- inside the copy ---------------------------------------------------------------------------------------------------


class _Copy:
    def __init__(
        self, connection: Connection[Any, Any], programs: Mapping[int, StageProgram], *, numbers: bool, alone: bool
    ) -> None:
        self._connection, self._programs = connection, programs
        self._numbers, self._alone = numbers, alone

    def serve(self, seconds: float) -> None:
        """Answer until nobody asks any more."""
        die_after(seconds)
        gc.disable()  # what the program has dropped is not to be finalized here
        torch.set_num_threads(1)  # the threads that share the work were not copied
        sys.dont_write_bytecode = True
        mode = contextlib.nullcontext() if self._numbers else _torch.fake_mode()
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("force_eager")
        cut_off(self._connection.fileno(), lambda event: self._give_up(f"it reaches out of the process ({event})"))
        while True:
            index, received = self._connection.recv()
            with mode:
                outcome = self._try(Stage(index, self._programs[index]), received)
            self._connection.send(outcome)

    def _try(self, stage: Stage, forms: Mapping[int, Form]) -> Outcome:
        try:
            given = {maker: _receive(form) for maker, form in forms.items()}
        except Exception as error:
            return Unknown(f"{type(error).__name__} on receiving")
        stage.micro_batch(0).received.update(given)
        words = ", ".join(f"{in_words(r.value)} from stage {maker}" for maker, r in given.items())
        calls = _Calls(self._give_up)
        try:
            with calls, _torch.OperationWatch(self._check):
                stage.forward(0)
            made = Made({user: _form(value) for user, value in stage.flying[0].outputs.items()})
        except Exception as error:
            return self._raised(error, calls, words)
        return Unknown("it went on after an error of torch's") if calls.raised and not self._numbers else made

    def _raised(self, error: Exception, calls: _Calls, received: str) -> Outcome:
        """The error, unless it may come from the copy and not from the program (see epl/train/rehearsal.py)."""
        trace = _Trace(error)
        whose: Literal["torch", "epl", "python"] = "python"
        if not self._numbers and any(earlier is not error for earlier in calls.raised):
            return Unknown("it went on after an error of torch's")
        if isinstance(error, UsageError) and not trace.lines:
            whose = "epl"
        elif any(earlier is error for earlier in calls.raised) or trace.ends_in_torch:
            whose = "torch"
        elif not isinstance(error, _ABOUT_VALUES) or isinstance(error, NotImplementedError | RecursionError):
            return Unknown(type(error).__name__)
        elif not (self._alone or isinstance(error, TypeError) or "unpack" in str(error)) or "fork" in str(error):
            return Unknown(f"{type(error).__name__}, and there are threads that were not copied")
        return Raised(type(error).__name__, str(error)[:2000], whose, trace.lines, trace.text, received)

    def _check(self, operation: Any, args: tuple[Any, ...]) -> None:
        name = operation.name()
        if "c10d" in name:
            self._give_up(f"it communicates ({name})")
        if name in _OF_ONE_DTYPE and not self._numbers:  # the rules for shapes do not look at dtypes
            dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor)}
            if len(dtypes) > 1:
                raise RuntimeError(f"{name}: expected one dtype, found {sorted(map(str, dtypes))}")

    def _give_up(self, why: str) -> NoReturn:
        """End at once, whatever the user's code does about exceptions."""
        self._connection.send(Unknown(why))
        os._exit(0)


_ABOUT_VALUES = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)
_OF_ONE_DTYPE = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")}


def _receive(form: Form) -> Received:
    leaves = form.unpack(torch.zeros(form.size, dtype=torch.uint8))
    for leaf, described in zip(leaves, form.tensors, strict=True):
        leaf.requires_grad_(described.needs_gradient)
    return Received(put_together(form, enter_stage(leaves)), form, leaves)


def _form(value: object) -> Form:
    """The form, of a tensor without numbers too as if it had them."""
    form, _ = take_apart(value)
    return Form(SINGLE, form.tensors) if isinstance(value, torch.Tensor) else form


class _Calls(TorchFunctionMode):
    """Remembers what torch itself raised."""

    def __init__(self, give_up: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._give_up, self.raised = give_up, list[Exception]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            text = str(error).lower()
            if isinstance(error, (*_torch.NEEDS_DATA, _torch.NO_FAKE_KERNEL, NotImplementedError)) or any(
                word in text for word in ("fake", "meta", "tensor subclass", "data pointer")
            ):
                self._give_up(f"it needs numbers ({type(error).__name__})")
            self.raised.append(error)
            raise


class _Trace:
    """The traceback of an error, as far as it is the user's."""

    def __init__(self, error: Exception) -> None:
        frames: list[TracebackType] = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        names = [str(frame.tb_frame.f_globals.get("__name__", "")) for frame in frames]
        self.ends_in_torch = bool(names) and names[-1].startswith("torch.nn.")
        users = [f for f, name in zip(frames, names, strict=True) if name.partition(".")[0] not in ("epl", "torch")]
        self.lines = tuple((frame.tb_frame.f_code.co_filename, frame.tb_lineno) for frame in users)
        summaries = [traceback.extract_tb(frame, limit=1)[0] for frame in users]
        self.text = "".join(traceback.StackSummary.from_list(summaries).format())
