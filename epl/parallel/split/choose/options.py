"""Where a parameter can be cut, as the first operation that reads it sees it: the best first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from epl.parallel.split.rules.common import dims_of
from epl.parallel.split.rules.pointwise import pointwise
from epl.parallel.split.rules.registry import RULES
from epl.parallel.split.value import SplitTensor
from epl.plan.split.cut import Cut

if TYPE_CHECKING:
    from epl.parallel.split.choose.open import Open

Option = int | tuple[int, Cut] | None
"""A dim, cut by an axis of its own; a dim with the cut of another value; whole."""
Found = tuple[list[Option], str]
_MATMUL = frozenset({"matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__"})
_REDUCING = {"sum": 1, "mean": 1, "norm": 2, "linalg_norm": 2, "linalg_vector_norm": 2}
"""Where each has its dims among its arguments."""


def options_of(func: Any, first: Open, args: Any, kwargs: Any) -> Found:
    """The options for the open parameter `first`, and why."""
    name = name_of(func)
    if name == "linear":
        return _linear(first, args, kwargs)
    if name in _MATMUL:
        return _matmul(first, args, kwargs)
    if name == "einsum":
        return _einsum(first, args)
    if name in ("inner", "tensordot"):
        return _contracted(name, first, args, kwargs)
    if name in _REDUCING and first.ndim > 1:
        return _reduced(name, first, args, kwargs)
    if name == "embedding":
        return [first.dims[0], first.dims[1]], "vocabulary"
    if name.startswith("conv") and not name.startswith("conv_transpose"):
        return _convolution(first, args, kwargs)
    if name in ("chunk", "split"):
        return _sections(name, first, args, kwargs)
    if name == "__set__" or RULES.get(getattr(torch.Tensor, name, None)) is pointwise:
        for value in (*args, *kwargs.values()):
            if _is_cut(value):
                at = value.from_end + first.ndim
                if at >= 0 and first.shape[at] == value.cut.size:
                    return [(first.dims[at], value.cut)], "lies along the cut dim"
    return [None], f"whole: {name} needs it"


def name_of(func: Any) -> str:
    """What a torch function is called; of an attribute (`w.T`), the attribute."""
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def _is_cut(value: Any) -> bool:
    """Whether it is a decided value, of which this rank has a block."""
    return isinstance(value, SplitTensor) and not value.is_partial and not hasattr(value, "box")


def _is_cut_at(value: Any, place: int) -> bool:
    return _is_cut(value) and value.from_end == place


def _argument(args: Any, kwargs: Any, position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _linear(first: Open, args: Any, kwargs: Any) -> Found:
    value, weight, dims = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight"), first.dims
    if first is weight:
        if _is_cut_at(value, -1):
            return [(dims[-1], value.cut), dims[0]], "rows, as its input is cut"
        return [dims[0], dims[-1]], "columns"
    if first is value:  # a parameter goes into the layer
        return _vector(first, weight, -1)
    if _is_cut(weight) and weight.place == 0:
        return [(dims[-1], weight.cut)], "as its weight"
    return [None], "whole: added to sums"


def _vector(first: Open, factor: Any, place: int) -> Found:
    """Multiplied by a factor that has been decided about: they are summed along its dim `place`."""
    if _is_cut_at(factor, place):
        return [(first.dims[-1], factor.cut)], "rows, as the other factor is cut"
    return [None], "whole: multiplied by a factor that is not cut along its rows"


def _matmul(first: Open, args: Any, kwargs: Any) -> Found:
    left, right = (*args, *kwargs.values())[-2:]
    dims = first.dims
    if first is right and len(dims) > 1:
        if _is_cut_at(left, -1):
            return [(dims[-2], left.cut), dims[-1]], "rows, as its input is cut"
        if len(dims) > 2 and _is_cut_at(left, -3):
            return [(dims[-3], left.cut)], "batch, as its input is cut"
        return [dims[-1], dims[-2]], "columns"
    if first is left and len(dims) > 1:
        return [dims[-2], dims[-1]], "rows of the left factor"
    if first is left:
        return _vector(first, right, -2)
    if first is right:
        return _vector(first, left, -1)
    if _is_cut_at(right, -1):
        return [(dims[-1], right.cut)], "as its weight"
    return [None], "whole: added to sums"


def _einsum(first: Open, args: Any) -> Found:
    terms, _, result = args[0].replace(" ", "").partition("->")
    operands = args[1:] if isinstance(args[1], torch.Tensor) else args[1]
    inputs, dims = terms.split(","), first.dims
    labels = inputs[[operand is first for operand in operands].index(True)]
    if "." in args[0] or not result:
        return [None], "whole: einsum with an ellipsis or without a result"
    for term, operand in zip(inputs, operands, strict=True):
        if _is_cut(operand) and term[operand.place] in labels:
            return [(dims[labels.index(term[operand.place])], operand.cut)], "as the other operand is cut"
    order = sorted(range(len(labels)), key=lambda n: labels[n] not in result)
    return [dims[n] for n in order], "einsum: a dim of the result before a contracted one"


def _contracted(name: str, first: Open, args: Any, kwargs: Any) -> Found:
    """inner and tensordot: as a linear layer."""
    operands = (*args, *kwargs.values())[:2]
    how = _argument(args, kwargs, 2, "dims")
    if name == "inner":
        gone: tuple[Any, Any] = ([-1], [-1])
    elif isinstance(how, int):
        gone = (list(range(-how, 0)), list(range(how)))
    elif isinstance(how, (tuple, list)):
        gone = ([how[0]] if isinstance(how[0], int) else how[0], [how[1]] if isinstance(how[1], int) else how[1])
    else:
        return [None], f"whole: {name} needs it"
    at = 0 if first is operands[0] else 1
    other, dims = operands[1 - at], first.dims
    mine, theirs = ([d % operand.ndim for d in places] for operand, places in zip(operands, gone, strict=True))
    if at:
        mine, theirs = theirs, mine
    kept = [dims[d] for d in range(first.ndim) if d not in mine]
    if _is_cut(other) and other.place in theirs:
        return [(dims[mine[theirs.index(other.place)]], other.cut), *kept], "rows, as its input is cut"
    return [*kept, *(dims[d] for d in mine)], "columns"


def _reduced(name: str, first: Open, args: Any, kwargs: Any) -> Found:
    """`w / w.norm(dim=1, keepdim=True)`: along a dim that stays, nothing is sent."""
    given = _argument(args, kwargs, _REDUCING[name], "dim")
    if given is None:
        given = kwargs.get("axis")
    gone = dims_of(first, given) if given is None or isinstance(given, (int, tuple, list)) else None
    if gone is None or len(gone) == first.ndim:
        return [*first.dims, None], f"{name} of the parameter"
    kept = [dim for d, dim in enumerate(first.dims) if d not in gone]
    return [*kept, *(first.dims[d] for d in gone), None], f"{name} over another dim"


def _convolution(first: Open, args: Any, kwargs: Any) -> Found:
    value, weight, dims = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight"), first.dims
    groups = _argument(args, kwargs, 6, "groups") or 1
    if groups != 1:
        return [None], "whole: a grouped convolution"
    if first is weight:
        if _is_cut_at(value, 1 - value.ndim):
            return [(dims[1], value.cut), dims[0]], "input channels, as its input is cut"
        return [dims[0], dims[1]], "output channels"
    if _is_cut(weight) and weight.place == 0:
        return [(dims[0], weight.cut)], "as its weight"
    return [None], "whole: added to sums"


def _sections(name: str, first: Open, args: Any, kwargs: Any) -> Found:
    """A packed parameter that is taken apart before it is used: q | k | v of nn.MultiheadAttention."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    ranks: Any = first.ranks
    owner = first.parameter_name.rpartition(".")[0]
    for other, choice in ranks.decisions.choices.items():  # a packed bias goes as its packed weight
        beside = choice is not None and other.rpartition(".")[0] == owner
        if beside and ranks.decisions.shapes[other][choice.dim] == first.shape[dim]:
            return [(first.dims[dim], ranks.cut_of(choice)), None], "as its weight"
    return [first.dims[dim], None], f"{name} of the parameter"
