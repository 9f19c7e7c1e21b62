"""`model.generate()` of a cut model: run as on one device where every rank has the whole model, else refused with the remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from epl.errors import UsageError

AsItIs = Callable[[], AbstractContextManager[None]]
"""Inside, the model runs its own forward."""


def guard_generation(model: nn.Module, as_it_is: AsItIs | None) -> Callable[[], None]:
    """See to every `generate` in the model; returns what undoes it. `as_it_is`: None, if no rank has the whole model."""
    guarded = [m for m in model.modules() if callable(getattr(m, "generate", None)) and "generate" not in vars(m)]
    for module in guarded:
        module.generate = _Generate(module, type(model).__name__, as_it_is)  # type: ignore[assignment]

    def undo() -> None:
        for module in guarded:
            del module.generate

    return undo


class _Generate:
    """Stands where a module's `generate` was. A copy of the module has its own again."""

    def __init__(self, module: nn.Module, name: str, as_it_is: AsItIs | None) -> None:
        self._module, self._name, self._as_it_is = module, name, as_it_is
        self._original: Callable[..., Any] = module.generate  # type: ignore[assignment]
        functools.update_wrapper(self, self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._as_it_is is None:
            raise UsageError(
                f"generate() calls {self._name} once for every token and keeps keys and values in between; in stages those stay on the "
                "ranks that made them. Generate with a model of one device: state = epl.full_state_dict(model) on every rank, then, "
                f"where you want the text, one = {self._name}(model.config); one.load_state_dict(state); one.generate(...)"
            )
        with self._as_it_is():
            return self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "generate")
