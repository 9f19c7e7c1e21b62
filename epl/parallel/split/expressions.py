"""Computing with cut parameters outside of split parts, where all ranks of the split run the same code.

one loss        all ranks compute on the same rows, so a split value is used as it is
own losses      every rank has rows of its own: what it computes from parameters goes into its own loss, and the gradient is that of
                Σ w_r loss_r ([Note: gradients.] of rows.py). Beside tensors that may differ between ranks, parameters are
                gathered first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epl import _torch
from epl.errors import SplitError
from epl.graph.spec import leaves_of, swap
from epl.parallel.split.cutparameter import CutParameter
from epl.parallel.split.ownrowsof import lost_change
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.rows import share_loss
from epl.parallel.split.value import SplitTensor, beside_parameters, changes, shard, whole
from epl.plan.split.layout import ParameterLayout, layout_of
from epl.report.log import notice

Function = Callable[..., Any]
_LIKE_ANOTHER = ("view_as", "reshape_as", "expand_as")


class OneLoss:
    """All ranks of the split compute the same loss."""

    def __init__(self, ranks: SplitRanks) -> None:
        self.ranks = ranks

    def compute(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func` of these arguments; partial sums are added up, what is cut stays cut."""
        args, kwargs = as_values(func, args, kwargs, self.ranks)
        return _settled(func(*args, **kwargs))

    def gather(self, parameter: CutParameter, why: str) -> torch.Tensor:
        """The whole of a parameter."""
        return value_of(parameter, self.ranks).gathered(why)


class OwnLosses(OneLoss):
    """Every rank of the split has a loss of its own, that counts for `weight()` of the replica's."""

    def __init__(self, ranks: SplitRanks, weight: Callable[[], float]) -> None:
        super().__init__(ranks)
        self._weight = weight
        self.glue: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: NotImplemented
        """Who knows how a function treats rows that meet parameters: what it gives, or NotImplemented."""

    def compute(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.go_on(func, *as_values(func, args, kwargs, self.ranks))

    def go_on(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func` of split values that were computed from parameters, and of anything else."""
        if (found := self.glue(func, args, kwargs)) is not NotImplemented:
            return found
        if any(not isinstance(t, SplitTensor) or not t.is_common for t in leaves_of((args, kwargs), torch.Tensor)):
            name = getattr(func, "__name__", str(func))
            if isinstance(args[0] if args else None, SplitTensor) and changes(name):
                raise SplitError(lost_change(name, tuple(args[0].shape)))
            notice(
                f"split: {name} of a cut parameter and another tensor, while every rank has rows of its own: the whole parameter is gathered on "
                "every rank for that"
            )
            args, kwargs = swap((args, kwargs), SplitTensor, lambda value: self._plain(value, name))
            return func(*args, **kwargs)
        args, kwargs = swap((args, kwargs), InOwnLoss, lambda value: value.common)
        return swap(func(*args, **kwargs), torch.Tensor, self.out)

    def _plain(self, value: SplitTensor, why: str) -> torch.Tensor:
        if isinstance(value, InOwnLoss) or not value.is_common:  # the latter: own rows of logits
            return value.gathered(why)
        return self.out(value.gathered(why))

    def gather(self, parameter: CutParameter, why: str) -> torch.Tensor:
        return self.out(super().gather(parameter, why))

    def out(self, value: torch.Tensor) -> torch.Tensor:
        """Something that was computed from parameters alone, for use in this rank's own loss."""
        if isinstance(value, SplitTensor):
            if not value.is_partial:
                return in_own_loss(value, self)
            value = whole(value)
        return share_loss(value, self.ranks, self._weight())


class InOwnLoss(SplitTensor):
    """A cut value that was computed from parameters, on its way into this rank's own loss."""

    common: SplitTensor
    expressions: OwnLosses

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if beside_parameters(types, func):
            return NotImplemented
        first = leaves_of((args, kwargs), InOwnLoss)[0]
        return first.expressions.go_on(func, args, kwargs or {})

    def gathered(self, why: str = "") -> torch.Tensor:
        return self.expressions.out(self.common.gathered(why))


def in_own_loss(value: SplitTensor, expressions: OwnLosses) -> SplitTensor:
    """A cut value that was computed from parameters, for use in this rank's own loss."""
    made = shard(value.local, value.place, value.cut, value.ranks, kind=InOwnLoss)
    made.__dict__.update(common=value, expressions=expressions)
    return made


# ---- blocks as split values ------------------------------------------------------------------------------------------


def value_of(parameter: CutParameter, ranks: SplitRanks) -> SplitTensor:
    """A cut parameter as a split value, which looks whole."""
    layout = layout_of(parameter)
    assert layout is not None
    with _torch.no_tensor_subclass():
        block = parameter.view_as(parameter)  # a plain tensor: rules compute with it outside of split parts, too
    return shard(block, layout.dim, layout.cut, ranks)


def as_values(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: SplitRanks) -> Any:
    """The arguments with every cut parameter as a split value; beside it, what has the form of its block is a block, too.

    Anchors of a penalty, Fisher weights and the like were made from blocks (`p.detach().clone()`, `torch.zeros_like(p)`).
    """
    name = getattr(func, "__name__", "")
    if name in _LIKE_ANOTHER and not isinstance(args[0], CutParameter):
        raise SplitError(
            f"{name} would give a tensor of this rank's own the form of one rank's block, while parameters count as whole here: do it under "
            "torch.no_grad(), where a parameter is its block"
        )
    layouts = {p.shape: layout_of(p) for p in leaves_of((args, kwargs), CutParameter)}

    def value(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, CutParameter):
            return value_of(tensor, ranks)
        layout: ParameterLayout | None = None if isinstance(tensor, SplitTensor) else layouts.get(tensor.shape)
        if layout is None or layout.shape == tensor.shape:
            return tensor
        return shard(tensor, layout.dim, layout.cut, ranks)

    return swap((args, kwargs), torch.Tensor, value)


def _settled(found: Any) -> Any:
    return swap(found, SplitTensor, lambda value: whole(value) if value.is_partial else value)
