"""A hook on the user's module that stays behind when the module is copied or saved.

People write `ema = copy.deepcopy(model)` and `torch.save(model)`: the copy must be theirs alone, with nothing of epl attached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ModuleHook:
    """Calls `function`; a copy or a pickle of it does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # module.compile() compiles hooks along with forward; what ours do is not for a graph.
        self._function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_nothing, ()


def do_nothing(*args: Any) -> None:
    """What is left of a hook on a copied module."""


def _make_nothing() -> Callable[..., None]:
    return do_nothing
