"""Random numbers: none is used up by recording, and Python's and numpy's in the glue are noticed."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


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
        """The name of one that has been used since, or None."""
        if random.getstate() != self._python:
            return "random"
        if _comparable(_numpy_state()) != _comparable(self._numpy):
            return "numpy.random"
        return None

    def restore(self) -> None:
        """Put them back."""
        if self.moved() is not None:
            random.setstate(self._python)
            if self._numpy is not None:
                sys.modules["numpy"].random.set_state(self._numpy)


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
