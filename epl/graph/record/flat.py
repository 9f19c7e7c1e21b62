"""Which values have rows merged with what comes after them in one dim (batch · time), in the order of the rows.

Sizes alone do not tell: `h.transpose(0, 1).flatten(0, 1)` is as long as `h.flatten(0, 1)` and has the rows of every position side by
side. So it is followed from where the rows were a dim of their own: a reshape says where they went, operations that leave the dim
alone keep them, and so do modules, of which it is assumed as it is of every dim with rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from epl.graph.record import steps
from epl.graph.spec import Spec
from epl.plan.batch import Flat

_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze"})
_MOVES = frozenset(
    {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "__getitem__", "getitem"}
)
_REPEATS = frozenset({"repeat_interleave"})
_REORDERS = frozenset(
    {
        "cat",
        "concat",
        "concatenate",
        "repeat",
        "tile",
        "flip",
        "roll",
        "sort",
        "argsort",
        "topk",
        "index_select",
        "gather",
    }
    | {"take_along_dim", "scatter", "scatter_add", "stack", "vstack", "hstack", "cumsum", "cumprod", "flipud", "rot90"}
)
_STRIDE = 1009  # a prime above any dim's multiplicity: strides of the probe tell its dims apart

Found = Callable[[fx.Node], Flat | None]
"""Where a value has its rows, if that is known."""


def keeps_rows_together(node: fx.Node, here: Flat, found: Found) -> bool:
    """Whether a value that has so many elements for each row along a dim has them row by row."""
    if steps.is_part(node) or node.target is steps.changed:
        return any(keeps_rows_together(source, here, found) for source in node.all_input_nodes[:1])
    flats = [(source, flat) for source in _sources(node) if (flat := found(source)) is not None]
    if not flats:
        return False
    if node.op == "call_module":
        return any(flat.inner == here.inner for _, flat in flats)
    name = str(getattr(node.target, "__name__", node.target))
    source, before = flats[0]
    if name in _RESHAPES:
        return math.prod(_shape(node)[: here.dim]) == math.prod(_shape(source)[: before.dim])
    if name in _REPEATS:
        return before.dim == here.dim and _is_number(node)
    if name in _REORDERS or any(flat.inner != here.inner for _, flat in flats):
        return False
    if name in _MOVES:
        return _moved(node, source, before) == here.dim
    # Element by element, or along other dims: what lines up, lines up at the right.
    return all(len(_shape(s)) - f.dim == len(_shape(node)) - here.dim for s, f in flats) or all(
        f.dim == here.dim for _, f in flats
    )


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that it is made from; of a container that is put together from others, those."""
    for source in node.all_input_nodes:
        if source.meta.get("spec") is not None:
            yield source
        elif not source.meta.get("specs"):
            yield from _sources(source)


def _shape(node: fx.Node) -> torch.Size:
    spec: Spec = (node.meta.get("specs") or (node.meta["spec"],))[0]
    return spec.shape


def _is_number(node: fx.Node) -> bool:
    repeats = node.kwargs.get("repeats", node.args[1] if len(node.args) > 1 else None)
    return isinstance(repeats, int)


def _moved(node: fx.Node, source: fx.Node, before: Flat) -> int | None:
    """Where a dim is after dims were moved or indexed: asked of a tensor whose strides tell its dims apart."""
    shape = _shape(source)
    probe = torch.empty_strided(shape, [_STRIDE**i for i in range(len(shape), 0, -1)], device="meta")
    mark = _STRIDE ** (len(shape) - before.dim)

    def argument(x: Any) -> Any:
        return probe if x is source else x

    try:
        result = node.target(  # type: ignore[operator]
            *fx.map_arg(node.args, argument), **fx.map_arg(node.kwargs, argument)
        )
        dims = [d for d in range(result.dim()) if result.stride(d) == mark and result.shape[d] == shape[before.dim]]
    except Exception:  # indexed by another value
        return None
    return dims[0] if len(dims) == 1 else None
