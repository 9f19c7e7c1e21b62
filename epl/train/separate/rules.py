"""The table of separability rules, by function identity: no stranger of the same name matches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from epl import _torch

if TYPE_CHECKING:
    from epl.train.separate.state import Piece

Rule = Callable[..., "Piece | None"]
"""(analysis, entry, *entry.args, **entry.kwargs) → how micro batches share the result; None, or an exception about arguments in a
form it does not know: the whole batch is needed."""

RULES: dict[Callable[..., Any], Rule] = {}

_SPACES: tuple[Any, ...] = (torch, torch.Tensor, F, torch.special, torch.linalg, *_torch.function_spaces())


def rule(names: str, *spaces: Any) -> Callable[[Rule], Rule]:
    """Register a rule for the functions of these names, wherever torch keeps them."""

    def add(found: Rule) -> Rule:
        for name in names.split():
            for space in spaces or _SPACES:
                func = getattr(space, name, None)
                if isinstance(func, property) or type(func).__name__ == "getset_descriptor":
                    func = getter(func)
                if callable(func):
                    RULES.setdefault(func, found)
        return found

    return add


def getter(attribute: Any) -> Callable[..., Any]:
    """What `__torch_function__` is told when an attribute of a tensor is read."""
    found: Callable[..., Any] = attribute.__get__
    return found
