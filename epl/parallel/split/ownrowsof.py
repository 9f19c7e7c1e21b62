"""What leaves a split part cut, where every rank has rows of its own: logits of a split head.

Such a value has the rows of all ranks in it and this rank's block of the classes, and looks like this rank's own rows of all classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from epl.graph.spec import leaves_of, swap
from epl.parallel.split.rowviews import seen_of_all
from epl.parallel.split.value import SplitTensor, beside_parameters, recut, shard, whole
from epl.report.log import notice

if TYPE_CHECKING:
    from epl.parallel.split.rows import Batched, RowBridge

_OVER_A_DIM = frozenset(
    ["softmax", "log_softmax", "argmax", "argmin", "max", "min", "topk", "amax", "amin", "logsumexp", "sum", "mean"]
)
_BY_ROW = _OVER_A_DIM | frozenset(
    [
        "relu",
        "gelu",
        "sigmoid",
        "tanh",
        "exp",
        "log",
        "float",
        "double",
        "half",
        "bfloat16",
        "to",
        "detach",
        "clone",
        "contiguous",
        "mul",
        "div",
        "add",
        "sub",
        "neg",
        "abs",
        "square",
        "sqrt",
        "pow",
        "__mul__",
        "__rmul__",
        "__truediv__",
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__neg__",
        "clamp",
        "type",
    ]
)
"""Functions that, with no other tensor and not along the rows, treat every row by itself."""


class OwnRowsOf(SplitTensor):
    """Looks like this rank's own rows of a value that is cut in another dim and has all ranks' rows in it (logits of a split head).

    `cross_entropy`, what treats each row by itself and other shapes of the same rows (rowviews.py) work on the blocks. Anything else first
    gets the own rows whole: an all-to-all, with a notice. From then on they are the value, and views of it are plain views of them: code
    may have changed them in place, or have a view to do so.
    """

    is_common = False
    all_rows: SplitTensor
    bridge: RowBridge
    how: Batched
    own: torch.Tensor | None = None
    """The own rows, whole, once something has asked for them."""
    view_of: tuple[OwnRowsOf, Callable[[torch.Tensor], Any]] | None = None
    """Of what this is a view, and which."""

    @property
    def stays_cut(self) -> bool:
        """Whether nobody has asked yet for own rows that this is, or is a view of."""
        return self.own is None and (self.view_of is None or self.view_of[0].stays_cut)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if beside_parameters(types, func):
            return NotImplemented
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        first = args[0] if args else None
        rows = leaves_of((args, kwargs), OwnRowsOf)
        if (found := rows[0].bridge.glue(func, args, kwargs)) is not NotImplemented:
            return found
        if isinstance(first, OwnRowsOf) and first.stays_cut:
            if (view := _viewed(func, name, first, args[1:], kwargs)) is not None:
                return view
            if func is functional.cross_entropy and (found := _cross_entropy(*args, **kwargs)) is not None:
                return found
            if name in _BY_ROW and not any(isinstance(a, torch.Tensor) for a in (*args[1:], *kwargs.values())):
                dim = _dim_of(name, args, kwargs)
                if name not in _OVER_A_DIM or (dim is not None and dim % first.ndim != first.how.dim):
                    return _leave_all(func(first.all_rows, *args[1:], **kwargs), first)
        if any(value.stays_cut for value in rows):
            notice(
                f"split: {name} is called on a value that is cut over ranks and has the rows of all of them: every rank gets its own "
                "rows whole for that"
            )
        args, kwargs = swap((args, kwargs), OwnRowsOf, lambda value: value.gathered())
        found = func(*args, **kwargs)
        return first if isinstance(first, OwnRowsOf) and found is first.own else found

    def gathered(self, why: str = "") -> torch.Tensor:
        """The own rows, whole, by an all-to-all: no rank ever has all rows of all classes."""
        if self.own is None and self.view_of is not None:
            base, look = self.view_of
            with torch.enable_grad():
                self.__dict__["own"] = look(base.gathered(why))
        if self.own is None:
            assert self.how.dim is not None
            # With their graph, also where only a number is looked at: a loss may follow that needs it.
            with torch.enable_grad():
                own = recut(self.all_rows, self.how.dim, self.bridge.share.cut(self.how.inners))
                self.__dict__["own"] = self.bridge.rows_of(own, self.how)
        return cast("torch.Tensor", self.own)

    def seen(self) -> torch.Tensor:
        return super().seen() if self.stays_cut else self.gathered()


def lost_change(name: str, shape: tuple[int, ...]) -> str:
    """What to say of a change in place that would be made to a copy."""
    return (
        f"{name} changes a {shape} value in place that is cut over ranks, while every rank has rows of its own: expected is something new made "
        "of it, or a change that treats every row by itself, and this needs the rows whole: a copy, in which the change would be lost. Do it "
        "inside a module that is built under split (it is given all rows), or without a change in place (torch.where, a new tensor)"
    )


def own_rows_of(value: SplitTensor, bridge: RowBridge, how: Batched) -> OwnRowsOf:
    """The own rows of a value that is cut in another dim than the rows."""
    assert how.dim is not None
    made = cast("OwnRowsOf", shard(value.local, value.place, value.cut, value.ranks, kind=OwnRowsOf))
    shape = list(value.global_shape)
    shape[how.dim] = bridge.share.shown(how, bridge.ranks.rank)
    made.__dict__.update(all_rows=value, bridge=bridge, how=how, global_shape=torch.Size(shape))
    return made


def _viewed(func: Any, name: str, value: OwnRowsOf, args: Any, kwargs: Any) -> OwnRowsOf | None:
    """The same rows in another shape, if they are the first dim and stay it."""
    if value.how.dim != 0:
        return None
    found = seen_of_all(func, name, value.all_rows, value.shape, value.how.inners, args, kwargs)
    if found is None or found[0].place == 0:
        return None
    view = own_rows_of(found[0], value.bridge, value.how._replace(inners=found[1]))
    view.__dict__["view_of"] = value, lambda own: func(own, *args, **kwargs)
    return view


def _leave_all(found: Any, value: OwnRowsOf) -> Any:
    if not isinstance(found, torch.Tensor):
        return type(found)([_leave_all(each, value) for each in found])
    dim = value.how.dim
    assert dim is not None
    if found.ndim < value.ndim:  # the cut dim was reduced
        dim -= value.all_rows.place < dim
    return value.bridge.leave(found, value.how._replace(dim=dim))


def _dim_of(name: str, args: Any, kwargs: Any) -> int | None:
    if name == "topk":  # its first argument is k
        return int(kwargs.get("dim", args[2] if len(args) > 2 else -1))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim if isinstance(dim, int) and not isinstance(dim, bool) else None


def _cross_entropy(
    logits: OwnRowsOf,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Of the own rows, without ever gathering the logits: targets go to all ranks, each row's loss comes back to its rank."""
    bridge, how = logits.bridge, logits.how
    if size_average is not None or reduce is not None or how.dim != 0 or logits.all_rows.place != 1:
        return None
    if isinstance(target, SplitTensor) or target.requires_grad or target.shape[0] != logits.shape[0]:
        return None
    targets = bridge.share.own(target, how, bridge.ranks.rank)
    everyones = whole(shard(targets, 0, bridge.share.cut(how.inners), bridge.ranks))
    each = functional.cross_entropy(
        logits.all_rows, everyones, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    own: torch.Tensor = bridge.leave(each, how)
    if reduction == "none":
        return own
    total = own.sum()
    if reduction == "sum":
        return total
    if target.is_floating_point():
        return total / own.numel()
    live = target != ignore_index
    if weight is None:
        return total / live.sum()
    return total / (weight[target.where(live, 0)] * live).sum()
