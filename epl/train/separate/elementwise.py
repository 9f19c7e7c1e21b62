"""Rules of operations that work element by element: rows stay where they are; sums allow what is linear."""

from __future__ import annotations

from typing import Any

import torch

from epl.train.separate.analysis import Analysis, check_rows
from epl.train.separate.program import VALUES, Entry
from epl.train.separate.rules import rule
from epl.train.separate.state import CONST, SUM, Once, Piece, Rows

LINEAR_UNARY = (
    "neg negative clone detach contiguous float double half bfloat16 to type positive alias data __neg__ type_as cpu"
)
UNARY = """abs exp log log1p log2 log10 expm1 sqrt rsqrt square sin cos tan tanh sigmoid relu relu6 gelu silu elu selu celu mish
  leaky_relu softplus softsign logsigmoid hardtanh hardswish hardsigmoid erf erfc sign reciprocal floor ceil round trunc frac logit
  lgamma digamma isnan isinf isfinite logical_not bitwise_not int long bool nan_to_num threshold tanhshrink softshrink hardshrink
  __invert__ __abs__ expit log_sigmoid"""
NARY = """mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin where clamp clip clamp_min clamp_max eq ne lt le
  gt ge greater less logical_and logical_or logical_xor bitwise_and bitwise_or masked_fill lerp addcmul addcdiv xlogy atan2 hypot
  logaddexp multiply divide __and__ __or__ __xor__ __rpow__ __pow__ __rdiv__ __rtruediv__ __rmul__ __truediv__ __mul__ __eq__ __ne__
  __floordiv__ __mod__"""
ADD = "add sub subtract rsub __rsub__ __add__ __radd__ __sub__"
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__")
_QUOTIENTS = ("div", "true_divide", "divide", "__truediv__")


@rule(LINEAR_UNARY)
def linear_unary(a: Analysis, entry: Entry, x: Any, *args: Any, **kwargs: Any) -> Piece | None:
    if a.state(x) is SUM and not any(isinstance(t, VALUES) for t in (*args, *kwargs.values())):
        return Piece(SUM, entry.op, entry.args, entry.kwargs) if _is_exact(a.spec(x).dtype, entry.first.dtype) else None
    return elementwise(a, entry, x, *args, **kwargs)


def _is_exact(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether a cast keeps every number: one that rounds is not additive."""
    if old == new:
        return True
    wider = new.itemsize > old.itemsize or (new.itemsize == old.itemsize and not old.is_floating_point)
    return new.is_floating_point and not old.is_complex and wider


@rule(UNARY + " " + NARY)
def elementwise(a: Analysis, entry: Entry, *args: Any, **kwargs: Any) -> Piece | None:
    if SUM in [a.state(p) for p in entry.refs]:
        return _scaled_sum(a, entry, *args, **kwargs)
    lined = a.align([*args, *kwargs.values()])
    if lined is None:
        return None
    values, rows = lined
    named = dict(zip(kwargs, values[len(args) :], strict=True))
    return check_rows(entry, Piece(rows, entry.op, tuple(values[: len(args)]), named))


def _scaled_sum(a: Analysis, entry: Entry, *args: Any, **kwargs: Any) -> Piece | None:
    product = entry.name in _PRODUCTS and CONST in (a.state(args[0]), a.state(args[1]))
    quotient = entry.name in _QUOTIENTS and a.state(args[1]) is CONST and kwargs.get("rounding_mode") is None
    return Piece(SUM, entry.op, args, kwargs) if product or quotient else None


@rule(ADD)
def add(a: Analysis, entry: Entry, x: Any, y: Any, **kwargs: Any) -> Piece | None:
    if SUM not in (a.state(x), a.state(y)):
        return elementwise(a, entry, x, y, **kwargs)
    if isinstance(a.state(x), Rows) or isinstance(a.state(y), Rows):
        return None
    return Piece(SUM, entry.op, tuple(t if a.state(t) is SUM else Once(t) for t in (x, y)), kwargs)
