"""Stands for a model's forward until its first call has begun.

torch looks `forward` up before it runs the hooks of a call, and it is in a hook of its first call that a model is cut. Without this
the first call would run the forward of before, on parameters that are blocks by then.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Trampoline:
    """Calls the model's own forward, and once it is removed whatever its forward is by then. A copy of the model, or one that is saved, has its own forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own = model.__dict__.get("forward")
        self._removed = False
        model.__dict__["forward"] = self

    def remove(self) -> None:
        """The model has its own forward again; a call that is under way will take whatever forward there is then."""
        self._removed = True
        if self._model.__dict__.get("forward") is self:
            del self._model.__dict__["forward"]
            if self._own is not None:
                self._model.__dict__["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:
            return self._model.forward(*args, **kwargs)
        forward = self._own if self._own is not None else type(self._model).forward.__get__(self._model)
        return forward(*args, **kwargs)  # not cut yet: it is being recorded or tried out

    def __reduce__(self) -> tuple[Any, ...]:
        return (_same, (self._own,)) if self._own is not None else (getattr, (self._model, "forward"))


def _same(forward: Any) -> Any:
    return forward
