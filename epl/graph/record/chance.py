"""Random numbers: none is used up by recording, and Python's and numpy's in the glue are noticed."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from epl.graph.record.where import is_machinery, user_line


@contextlib.contextmanager
def torch_streams_kept() -> Iterator[None]:
    """Afterwards torch's generators stand where they stood."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


class PythonStreams:
    """Where Python's and numpy's generators stand."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def moved(self) -> str | None:
        """What one is called that has been used since, or None."""
        if random.getstate() != self._python:
            return "Python's random"
        if _comparable(_numpy_state()) != _comparable(self._numpy):
            return "NumPy's numpy.random"
        return None

    def restore(self) -> None:
        """Put them back."""
        if self.moved() is not None:
            random.setstate(self._python)
            if self._numpy is not None:
                sys.modules["numpy"].random.set_state(self._numpy)


class DrawingLine:
    """The line of the forward that first draws from Python's or numpy's generators.

    Nothing tells when they are used, and to ask before and after every line is slow: for a forward that is known to do so, when
    it is run once more to say where.
    """

    def __init__(self) -> None:
        self.line = ""
        """`file:line`, once it is known."""
        self.ignore: Callable[[], bool] = lambda: False
        """Whether what runs now may draw."""
        self._streams = PythonStreams()
        self._last = ""

    @contextlib.contextmanager
    def looked_for(self) -> Iterator[None]:
        """Inside runs the forward, up to its end or an error."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.line or is_machinery(frame) or self.ignore():
            return None
        self._happened(frame, event, argument)
        return self._happened

    def _happened(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Something happens in a line of the user's: has the one before it drawn?"""
        if not self.line and not self.ignore():
            if self._streams.moved() is not None:
                self.line = self._last
            self._last = user_line(frame.f_back if event == "return" else frame)
        return self._happened


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _comparable(state: Any) -> Any:
    return None if state is None else (state[1].tobytes(), *state[2:])


_RANDOM_WORDS = (
    "rand",
    "dropout",
    "bernoulli",
    "multinomial",
    "uniform",
    "poisson",
    "exponential",
    "geometric",
    "cauchy",
)
_RANDOM_NAMES = frozenset({"normal", "normal_", "log_normal_", "rrelu", "rrelu_", "gumbel_softmax"})
_NOT_RANDOM = frozenset({"poisson_nll_loss"})


def is_random(function: Any) -> bool:
    """Whether a torch function draws random numbers; by its name, since torch does not say."""
    name = getattr(function, "__name__", "")
    return name in _RANDOM_NAMES or (name not in _NOT_RANDOM and any(word in name for word in _RANDOM_WORDS))
