"""The ambient state a torch call was written under, kept so that the call can be made later."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Context(NamedTuple):
    """Grad mode and autocast, of the CPU and of one accelerator, if there is one."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def now() -> Context:
        """The state in force."""
        return _context(torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), _autocast())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, torch calls are made as they were written."""
        if not torch.is_inference_mode_enabled() and self == Context.now():
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


_context = functools.lru_cache(64)(Context)  # every node of a recording has one, and most are the same


_DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES)
