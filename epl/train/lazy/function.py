"""`autograd.Function.apply` with lazy arguments: recorded as one operation, with the backward that the user wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

from epl import _torch
from epl.graph.spec import leaves_of
from epl.train.lazy.everywhere import ModelBackward
from epl.train.lazy.foreign import LAZY
from epl.train.lazy.lane import LaneParameter
from epl.train.lazy.record import record, run_for_real


def _apply(owner: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lazy = leaves_of((args, kwargs), LAZY)
    if owner is ModelBackward:  # ours: it is given this rank's blocks, as what they are
        return original(*args, **kwargs)
    if not lazy or all(isinstance(each, LaneParameter) and each.is_used_by_its_stage() for each in lazy):
        return original(*args, **kwargs)
    if owner is CheckpointFunction:  # its backward reaches parameters that it was not given
        return run_for_real(owner.apply, args, kwargs, "a reentrant checkpoint")
    return record(owner.apply, args, kwargs)


def install() -> None:
    """`apply` asks no tensor subclass, so it is watched from now on; without lazy arguments nothing changes."""
    _torch.watch_function_applications(_apply)
