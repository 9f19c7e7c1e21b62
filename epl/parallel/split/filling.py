"""Random numbers for a parameter of which a rank has a block only: this rank's block of what one device would draw.

Drawn for the block, all ranks would have the same numbers in different places, and ranks with blocks of different sizes would leave the
random stream of the loop in different states: whatever is drawn next would not be alike any more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from epl import _torch
from epl.errors import UsageError
from epl.graph.spec import leaves_of, swap
from epl.plan.split.layout import layout_of

_FILLING = frozenset(
    ["uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"]
)
_LIKE = frozenset(["rand_like", "randn_like", "randint_like"])
_LOOKING = frozenset(["dim", "ndimension", "kaiming_uniform_"])
"""With what initialisers begin that look at the shape."""
_INIT = torch.nn.init.__file__
_BETWEEN = (os.path.dirname(os.path.abspath(__file__)) + os.sep, *_torch.files_of_dynamo())
_BY_ELEMENT = frozenset(["uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_"])


def draws(name: str) -> bool:
    """Whether a function of this name draws random numbers for a tensor, or for one of its form."""
    return name in _FILLING or name in _LIKE


def drawn(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[torch.Tensor]) -> Any:
    """What it gives for this rank's block; `kind`: the class of cut parameters, of which the first is meant."""
    parameter: Any = leaves_of((args, kwargs), kind)[0]
    layout, ranks = layout_of(parameter), parameter.epl_split
    if layout is None or ranks is None:
        return func(*args, **kwargs)
    blank = torch.empty(layout.shape, dtype=parameter.dtype, device=parameter.device)
    args, kwargs = swap((args, kwargs), kind, lambda value: blank if value is parameter else value)
    block = layout.take(func(*args, **kwargs), ranks.rank)
    return block if func.__name__ in _LIKE else parameter.copy_(block)


def looks(name: str) -> bool:
    """Whether initialisers that look at the shape begin with a function of this name."""
    return name in _LOOKING


def refuse_initialiser(name: str, parameter: torch.Tensor) -> None:
    """Raise if one of `torch.nn.init` is about to look at the shape: that of a block gives another scale, or no orthogonal matrix."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if name != "kaiming_uniform_" and (frame is None or frame.f_code.co_filename != _INIT):
        return
    while frame is not None and frame.f_back is not None and frame.f_back.f_code.co_filename == _INIT:
        frame = frame.f_back
    what = frame.f_code.co_name if frame is not None and frame.f_code.co_filename == _INIT else name
    layout = layout_of(parameter)
    if what in _BY_ELEMENT or layout is None:
        return
    raise UsageError(
        f"torch.nn.init.{what} of a parameter of shape {tuple(layout.shape)}, of which this rank has the block {tuple(parameter.shape)} since the "
        "first call of the model: it would take the block for all of it. Initialise before that call, or initialise a tensor of the whole shape "
        "and give it to model.load_state_dict"
    )
