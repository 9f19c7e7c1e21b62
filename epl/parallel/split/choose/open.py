"""A parameter that nobody has decided about yet; only while planning. The first operation that reads it decides."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import torch

from epl.graph.spec import leaves_of, swap
from epl.parallel.split.choose.options import name_of, options_of
from epl.parallel.split.rules.attention import OPENED
from epl.parallel.split.rules.pointwise import pointwise
from epl.parallel.split.rules.registry import RULES
from epl.parallel.split.value import PARTIAL, Cell, SplitTensor, changes, shard

_KEPT = frozenset({"to", "contiguous", "normalize", "clone", "type", "data"})
"""What leaves the dims of a parameter as they are, as all does that works element by element: it stays open."""
_TURNED = frozenset(
    {"t", "T", "mT", "H", "mH", "adjoint", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis"}
)
"""What gives its dims in another order."""
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CHOOSER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_BETWEEN = frozenset({os.path.abspath(__file__), f"{_CHOOSER}attention.py"})
"""Files of the chooser that stand between user code and what it calls."""
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Open(SplitTensor):
    """A parameter without a decision, seen through operations that keep its dims (`w.T`, `F.normalize(w)`)."""

    parameter_name: str
    dims: tuple[int, ...]
    """Which dim of the parameter each dim is."""
    box: list[Any]
    """The decided parameter, once there is one; shared by all that is derived from it."""
    derive: Callable[[Any], Any]
    """This value from the decided parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPENED:
            return RULES[func](func, *args, **kwargs)
        args, kwargs = swap((args, kwargs), Open, _decided)
        tensors = leaves_of((args, kwargs), torch.Tensor)
        still = [tensor for tensor in tensors if isinstance(tensor, Open)]
        if not still:
            return func(*args, **kwargs)
        first = max(still, key=lambda tensor: tensor.ndim)  # a weight before its bias
        dims = _kept_dims(func, first, len(tensors) == 1, args, kwargs)
        if dims is not None:
            return first.seen_through(func, dims, args, kwargs)
        options, reason = options_of(func, first, args, kwargs)
        cast("Any", first.ranks).decide(first, options, f"{reason}{_user_line()}")
        return func(*args, **kwargs)

    def seen_through(self, func: Any, dims: tuple[int, ...], args: Any, kwargs: Any) -> Open:
        """The result of one more operation, still open."""

        def put(value: Any) -> list[Any]:
            return [value if arg is self else arg for arg in args]

        out = open_parameter(func(*put(self.local), **kwargs), self.parameter_name, dims, self.ranks)
        out.box, derive = self.box, self.derive
        out.derive = lambda base: func(*put(derive(base)), **kwargs)
        return out


def open_parameter(value: torch.Tensor, name: str, dims: tuple[int, ...], ranks: Any) -> Open:
    """`value` as the parameter called so, undecided."""
    made = cast("Open", shard(value, PARTIAL, None, ranks, cell=Cell(False), kind=Open))
    made.parameter_name, made.dims, made.box, made.derive = name, dims, [], lambda base: base
    return made


def _decided(value: Open) -> Any:
    return value.derive(value.box[0]) if value.box else value


def _kept_dims(func: Any, first: Open, alone: bool, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Which dims the result has, if the operation leaves it open; None if it is time to decide."""
    name, dims = name_of(func), first.dims
    if alone and name in _TURNED:
        marked = torch.empty([1 + n for n in range(len(dims))], device="meta")  # torch says how
        turned = getattr(marked, name)
        shape = turned.shape if isinstance(turned, torch.Tensor) else turned(*args[1:], **kwargs).shape
        return tuple(dims[n - 1] for n in shape)
    if alone and (name in _KEPT or (RULES.get(func) is pointwise and first is args[0] and not changes(name))):
        return dims
    if name == "__getitem__" and first is args[0] and len(dims) > 1:  # an expert of many, or some of them
        index = args[1]
        if isinstance(index, int) or (isinstance(index, torch.Tensor) and index.ndim == 0):
            return dims[1:]
        if isinstance(index, torch.Tensor) and index.ndim == 1:
            return dims
    return None


def _user_line() -> str:
    """The line of user code that is running, for the reason."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _TORCH)):
            return f" ({os.path.basename(file)}:{frame.f_lineno})"
        if file.startswith(_CHOOSER) and file not in _BETWEEN:
            break  # only modules of torch in between
        frame = frame.f_back
    return ""
