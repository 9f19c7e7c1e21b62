"""Real tensors with gradients that the loop's code uses beside lazy values: a loss module's weights, an encoder before the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from epl import _torch
from epl.graph.spec import Spec, leaves_of
from epl.train.lazy.node import Node, foreign, output_of


def outer_tensors(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """Those among the arguments of these operations, in their order."""
    found: dict[int, torch.Tensor] = {}
    for node in nodes:
        if node.func is not foreign and node.func is not output_of:
            for tensor in leaves_of((node.args, node.kwargs), torch.Tensor):
                if tensor.requires_grad:
                    found.setdefault(id(tensor), tensor)
    return list(found.values())


def graph_nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The autograd nodes behind real tensors, depth first, arguments from left to right: alike on ranks that ran alike."""
    seen: set[Any] = set()
    stack = [t.grad_fn for t in reversed(list(tensors)) if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(n for n, _ in reversed(node.next_functions) if n is not None)


def leaves_behind(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward from these tensors would bring gradients to, in an order that ranks share."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.grad_fn is None:
            found.setdefault(id(tensor), tensor)
            continue
        for node in graph_nodes([tensor]):
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):
                found.setdefault(id(leaf), leaf)
    return list(found.values())


@contextmanager
def without_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Even autograd.grad runs the hooks of a leaf it is asked about; they must see the whole batch's gradient, once."""
    taken = [(t, _torch.take_hooks(t)) for t in tensors if t.grad_fn is None and _torch.count_hooks(t)]
    try:
        yield
    finally:
        for tensor, hooks in taken:
            _torch.give_hooks(tensor, hooks)


# ---- gradients with holes, from home to every rank -------------------------------------------------------------------

_NONE, _DENSE = 0, 1  # and 2 + n: sparse with n sparse dims


def pack(gradients: list[torch.Tensor | None], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients as tensors of shapes that all ranks know, with a first one that says which are there and which are sparse."""
    kinds = [_NONE if g is None else 2 + g.sparse_dim() if g.is_sparse else _DENSE for g in gradients]
    dense = [
        torch.zeros_like(t) if g is None else g.to_dense() if g.is_sparse else g
        for g, t in zip(gradients, like, strict=True)
    ]
    device = like[0].device
    return [torch.tensor(kinds, dtype=torch.int64, device=device), *(g.contiguous() for g in dense)]


def packed_specs(like: list[torch.Tensor]) -> list[Spec]:
    """What `pack` gives, as all ranks know it."""
    first = Spec(torch.Size([len(like)]), (1,), torch.int64, like[0].device, False)
    return [first, *(Spec.of(t)._replace(stride=_contiguous(t.shape), requires_grad=False) for t in like)]


def unpack(packed: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Undo `pack`."""
    kinds = packed[0].tolist()
    return [
        None if kind == _NONE else tensor if kind == _DENSE else tensor.to_sparse(kind - 2)
        for kind, tensor in zip(kinds, packed[1:], strict=True)
    ]


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return tuple(torch.Size(shape[i + 1 :]).numel() for i in range(len(shape)))
