"""Outputs of a call as real tensors with gradients on every rank: for code that cannot be recorded.

Every rank computes the recorded code itself, from shared values, and autograd itself runs the backward: one function per call
stands for the model in its graph, alike on every rank, so that their backwards meet.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from epl import _torch
from epl.errors import LazyValueError, NotBuiltError
from epl.train.lazy.foreign import ForeignParameter

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Call

CREATE_GRAPH = (
    "create_graph=True reaches into a model that runs in micro batches: a second derivative would have to run through every stage "
    "twice, which is not built. Compute a gradient penalty on a model of its own, or with finite differences."
)
SECOND_TIME = (
    "Trying to backward through the graph a second time: the model call was already run with its loss, and its graph is gone. "
    "Specify retain_graph=True the first time."
)


_anchors: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()


def anchor_of(call: Call) -> torch.Tensor | None:
    """An input of a call's stand-in that requires grad on every rank."""
    return _anchors.get(call)


def stand_in(call: Call, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The frontier values of a call whose graphs are kept, differentiable; the same on every rank."""
    outer = [t for t in call.inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    own = list(dict.fromkeys(p for p in call.carrier.parameters.values() if _is_trained_here(p)))
    anchor = torch.zeros(
        (), requires_grad=True
    )  # so that the function runs also on a rank that wants no gradient for itself
    flags = [node.requires_grad for node in call.nodes]
    with torch.inference_mode(False), torch.enable_grad():
        found = ModelBackward.apply(call, values, flags, anchor, *outer, *own)  # type: ignore[no-untyped-call]
    _anchors[call] = anchor
    return list(found)


def _is_trained_here(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, ForeignParameter) and parameter.requires_grad


class ModelBackward(torch.autograd.Function):
    """Its backward runs the backward of every micro batch, over all ranks. This rank's parameters are inputs, so that autograd
    sees them: hooks on them run once, autograd.grad and backward(inputs=…) work."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        values: list[torch.Tensor],
        flags: list[bool],
        anchor: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.tensors = call, tensors
        results = tuple(v.detach().clone() if flag else v.detach() for v, flag in zip(values, flags, strict=True))
        ctx.mark_non_differentiable(*[r for r, flag in zip(results, flags, strict=True) if not flag])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        call, keep = ctx.call, _torch.backward_keeps_graph()
        if torch.is_grad_enabled():
            raise NotBuiltError(CREATE_GRAPH)
        if call.state == "done":
            raise LazyValueError(SECOND_TIME)
        reached = tuple(g is not None for g in gradients)
        carrier = call.carrier
        carrier.agree("the backward of a model call", sum(1 << n for n, flag in enumerate(reached) if flag))
        carrier.begin_backward(aside=True)
        carrier.backward_all(call, list(gradients) if carrier.is_home else None, reached, keep)
        own = carrier.end_backward({})
        if not keep:
            call.state = "done"
        inputs = {id(t): g for t, g in zip(call.inputs, call.input_gradients, strict=True)}
        found = [
            own.get(t) if isinstance(t, nn.Parameter) and id(t) not in inputs else inputs.get(id(t))
            for t in ctx.tensors
        ]
        return (None, None, None, None, *found)


def needs_engine(grad_fn: object) -> bool:
    """Whether an autograd node must be run by autograd itself, on every rank: the stand-in of a model call; a checkpoint of the
    reentrant kind, which brings gradients to parameters that no graph shows."""
    return type(grad_fn).__name__ in ("ModelBackwardBackward", "CheckpointFunctionBackward")


def stands_behind(grad_fn: object) -> bool:
    """Whether an autograd node is the stand-in of a model call."""
    return type(grad_fn).__name__ == "ModelBackwardBackward"
