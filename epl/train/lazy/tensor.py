"""The tensor that the loop holds instead of a value that is not computed yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epl import _torch
from epl.graph.spec import leaves_of
from epl.train.lazy.live import enter
from epl.train.lazy.node import Node

Answer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[Callable[..., Any], Answer] = {}
"""Torch calls that are neither recorded nor run: metadata, reads, backward, hooks; filled by `handlers`."""


class LazyTensor(torch.Tensor):
    """Shape, dtype and requires_grad of a value that is computed when it is read or when backward is called."""

    epl_node: Node

    @staticmethod
    def __new__(cls, node: Node) -> LazyTensor:
        tensor: LazyTensor = _torch.wrapper_tensor(cls, node.spec)
        tensor.epl_node = node
        enter(tensor)
        return tensor

    def __init__(self, node: Node) -> None:
        super().__init__()

    @classmethod
    @_torch.without_dynamo  # inside torch.compile: a graph break at each lazy operation, not a trace of this file
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached only by code that goes round __torch_function__ (torch.tensor(lazy), vmap, TorchScript). Autograd has already
        # taken the wrapper for a leaf, so what arrives at that leaf is handed on to the value behind it.
        from epl.train.lazy.record import run_below

        for tensor in leaves_of((args, kwargs or {}), LazyTensor):
            with _torch.no_tensor_subclass():
                if tensor.requires_grad and not hasattr(tensor, "epl_delivers"):
                    tensor.epl_delivers = tensor.register_post_accumulate_grad_hook(_deliver)
        return run_below(func, args, kwargs or {})


def answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a torch call with a lazy argument gives."""
    return (HANDLERS.get(func) or _record)(func, args, kwargs)


def _record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from epl.train.lazy.record import record

    return record(func, args, kwargs)


def _deliver(lazy: torch.Tensor) -> None:
    assert isinstance(lazy, LazyTensor)
    with _torch.no_tensor_subclass():
        gradient, lazy.grad = lazy.grad, None
    value = lazy.epl_node.value
    torch.autograd.backward([value], [gradient], retain_graph=_torch.backward_keeps_graph())
