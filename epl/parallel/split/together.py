"""Whole values that enter cut work together: their gradients are summed over ranks in one collective.

The weights of q_norm and k_norm of a transformer meet the cut heads; alone, each of them would cost a collective of a few bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from epl import _torch
from epl.parallel.split.functions import Reduce
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, differentiable


class EnterTogether(torch.autograd.Function):
    """Several whole values of one dtype enter cut work: identity; the gradients travel as one."""

    @staticmethod
    def forward(ctx: Any, ranks: SplitRanks, *values: torch.Tensor) -> Any:
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None,) * (len(grads) + 1)
        flat: Any = Reduce.apply(torch.cat([grad.reshape(-1) for grad in given]), ctx.ranks, True)  # type: ignore[no-untyped-call]
        parts = iter(flat.split([grad.numel() for grad in given]))
        return None, *(None if grad is None else next(parts).view(grad.shape) for grad in grads)


def enter_together(
    args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[torch.Tensor], ranks: SplitRanks
) -> None:
    """Let the first tensor of the arguments and these parameters enter together, unless one of them has entered already."""
    stream = first_tensor(args, kwargs)
    if stream is None or isinstance(stream, SplitTensor) or not differentiable(stream):
        return
    fitting = [p for p in parameters if differentiable(p) and p.dtype == stream.dtype and p.device == stream.device]
    values = [stream, *fitting]
    keys = [(id(value), _torch.version_of(value)) for value in values]
    if not fitting or any(key in region.entered for key in keys):
        return
    entered: Any = EnterTogether.apply(ranks, *values)  # type: ignore[no-untyped-call]
    region.entered.update(zip(keys, zip(values, entered, strict=True), strict=True))


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The first of the arguments that is a tensor."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
