"""Operations of our own in recorded code: what torch calls with side effects or several results are written down as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epl.graph.spec import leaves_of


def pick(outputs: Any, index: int) -> torch.Tensor:
    """The index-th tensor of an operation with several results."""
    found: torch.Tensor = leaves_of(outputs, torch.Tensor)[index]
    return found


def rows_where(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """x[mask], for a boolean mask whose numbers every rank has."""
    return x[mask]


def copy_then(func: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What `x` would be after `func(x, …)` had changed it in place."""
    x = x.clone()
    func(x, *args, **kwargs)
    return x
