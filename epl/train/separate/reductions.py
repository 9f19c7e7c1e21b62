"""Rules of operations along dims: sums over the rows add up, everything else must leave them alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from epl.train.separate.analysis import Analysis, along_dims, check_rows, shifted
from epl.train.separate.elementwise import elementwise
from epl.train.separate.program import VALUES, Entry
from epl.train.separate.rules import rule
from epl.train.separate.state import SUM, Piece, Rows

_REDUCING: dict[str, Any] = {
    **dict.fromkeys(("max", "min", "argmax", "argmin", "all", "any", "prod", "std", "var", "median")),
    **dict.fromkeys(("logsumexp", "count_nonzero")),
    "amax": (),
    "amin": (),
    "mode": -1,
}
"""The `dim` each has when none is given; None and () are all dims."""
_KEEPING: dict[str, Any] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp")),
    "sort": -1,
    "argsort": -1,
    "glu": -1,
}


@rule("sum mean")
def total(a: Analysis, entry: Entry, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Piece | None:
    s, dims = a.state(x), a.dims(x, kwargs.pop("axis", dim))
    if s is SUM:
        return Piece(SUM, entry.op, entry.args, entry.kwargs)
    if not isinstance(s, Rows):
        return None
    if s.dim not in dims:
        return along_dims(a, entry, x, dims)
    count = math.prod(a.shape(x)[d] for d in dims)
    return Piece(SUM, torch.sum, (x, dims, keepdim), kwargs, count if entry.name == "mean" else None)


@rule(" ".join(_REDUCING))
def along(a: Analysis, entry: Entry, x: Any, dim: Any = None, keepdim: Any = False, **kwargs: Any) -> Piece | None:
    if isinstance(dim, VALUES):  # max(x, y)
        return elementwise(a, entry, x, dim)
    dim = _REDUCING[entry.name] if dim is None else dim
    # std(True) is about the correction, not about dim 1.
    return None if dim is None or isinstance(dim, bool) else along_dims(a, entry, x, a.dims(x, dim))


@rule(" ".join(_KEEPING))
def keeping(a: Analysis, entry: Entry, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Piece | None:
    dim = _KEEPING[entry.name] if dim is None else dim
    return None if dim is None or isinstance(dim, bool) else along_dims(a, entry, x, a.dims(x, dim))


@rule("norm vector_norm")
def norm(a: Analysis, entry: Entry, x: Any, p: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> Piece | None:
    return None if dim is None else along_dims(a, entry, x, a.dims(x, dim))


@rule("topk")
def topk(a: Analysis, entry: Entry, x: Any, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Piece | None:
    return along_dims(a, entry, x, a.dims(x, dim))


@rule("normalize", F)
def normalize(
    a: Analysis, entry: Entry, x: Any, p: float = 2.0, dim: int = 1, *args: Any, **kwargs: Any
) -> Piece | None:
    return along_dims(a, entry, x, a.dims(x, dim))


@rule("cosine_similarity pairwise_distance", torch, F)
def pairwise(a: Analysis, entry: Entry, x: Any, y: Any, *args: Any, **kwargs: Any) -> Piece | None:
    dim = kwargs.get("dim", args[0] if args else 1) if entry.name == "cosine_similarity" else -1
    lined = a.align([x, y])
    if lined is None or len(a.shape(x)) != len(a.shape(y)):
        return None
    values, rows = lined
    dims = a.dims(x, dim)
    if rows.dim in dims:
        return None
    keeps = len(entry.first.shape) == len(a.shape(x))
    return check_rows(entry, Piece(shifted(rows, dims, keeps), entry.op, (*values, *args), kwargs))


@rule("layer_norm rms_norm", F)
def layer_norm(a: Analysis, entry: Entry, x: Any, shape: Any, *args: Any, **kwargs: Any) -> Piece | None:
    n = len(a.shape(x))
    return along_dims(a, entry, x, range(n - len(shape), n))
