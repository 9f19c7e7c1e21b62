"""Rows seen in another shape, where a value has the rows of all ranks and looks like one's own (ownrowsof.py): dim 0 has the rows.

    own rows [n, t, classes] as [n·t, classes]       of all: [N, t, classes] as [N·t, classes], t elements for each row
    [:, :-1], transpose(1, 2), …                     the same of all, as long as the rows stay where they are

Only what is alike on all ranks by its form can be done to all rows: bounds that the loop has computed from its own rows would differ.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from epl.parallel.split.value import SplitTensor

_MERGING = frozenset(["view", "reshape", "flatten"])
_MOVING = frozenset(["transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze"])
_BOUNDS = (None, -1, 0, 1)
"""Of slices, and places: those of shifted labels and of the last position."""
_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)
"""All different, so that a shape tells where each dim has gone."""

Inners = tuple[int, ...]


def seen_of_all(
    func: Any, name: str, rows: SplitTensor, shape: torch.Size, inners: Inners, args: Any, kwargs: Any
) -> tuple[SplitTensor, Inners] | None:
    """What `func`, called on own rows of this shape, is of all rows, and how many elements each row has then; None: not known."""
    if name in _MERGING:
        return _merged(func, rows, shape, inners, args, kwargs)
    keeps = (
        _moves_others(func, len(shape), args, kwargs)
        if name in _MOVING
        else name == "__getitem__" and _takes(args[0], shape)
    )
    found = func(rows, *args, **kwargs) if keeps else None
    return (found, inners) if isinstance(found, SplitTensor) and not found.is_partial else None


def _merged(
    func: Any, rows: SplitTensor, shape: torch.Size, inners: Inners, args: Any, kwargs: Any
) -> tuple[SplitTensor, Inners] | None:
    """Rows and the dims behind them made one; what is cut stays a dim of its own."""
    if any(isinstance(each, torch.dtype) for each in args):
        return None
    try:
        wanted = func(torch.empty(shape, device="meta"), *args, **kwargs).shape
    except (RuntimeError, TypeError):  # said by the function itself, on the rows
        return None
    count = len(shape) + 1 - len(wanted)
    if not 1 <= count <= rows.place or wanted[1:] != shape[count:]:
        return None
    each = prod(shape[1:count])
    found = rows.reshape(rows.shape[0] * each, *shape[count:])
    return found, tuple(inner * each for inner in inners)  # type: ignore[return-value]


def _moves_others(func: Any, ndim: int, args: Any, kwargs: Any) -> bool:
    """Whether dim 0 stays where it is."""
    if ndim > len(_SIZES):
        return False
    found = func(torch.empty(_SIZES[:ndim], device="meta"), *args, **kwargs)
    return bool(found.shape[0] == _SIZES[0])


def _takes(index: Any, shape: torch.Size) -> bool:
    """Whether it takes all rows."""
    index = index if isinstance(index, tuple) else (index,)
    consuming = [each for each in index if each is not Ellipsis and each is not None]
    if not all(_is_plain(each) for each in consuming) or not index:
        return False
    if index[0] is Ellipsis:
        return len(consuming) < len(shape)
    return isinstance(index[0], slice) and index[0] == slice(None)


def _is_plain(index: Any) -> bool:
    if isinstance(index, slice):
        return all(
            isinstance(each, (int, type(None))) and each in _BOUNDS for each in (index.start, index.stop, index.step)
        )
    return type(index) is int and index in _BOUNDS
