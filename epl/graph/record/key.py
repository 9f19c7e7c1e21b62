"""What decides, beside its inputs, what a model's forward does: equal keys, equal recordings."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import nn

from epl import _torch
from epl.graph.context import Context
from epl.graph.record.fingerprint import Same, plain_attributes
from epl.graph.record.tree import is_plain

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def model_key(model: nn.Module, glue: Collection[nn.Module]) -> Hashable:
    """Flags and forms of everything in the model, and the plain attributes and hooks of the modules that are glue."""
    parts: list[Hashable] = [Context.now(), torch.get_default_dtype()]
    seen: set[int] = set()
    stack = [model]
    with _torch.no_tensor_subclass():
        while stack:
            module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            state = module.__dict__
            parts.append(state["training"])
            for tensor in state["_parameters"].values():
                if tensor is not None:
                    parts.append((tensor.requires_grad, tensor.shape, tensor.dtype))
            stack.extend(child for child in state["_modules"].values() if child is not None)
            if module in glue:
                parts.append(_glue(module))
    return tuple(parts)


def _glue(module: nn.Module) -> Hashable:
    own = plain_attributes(module)
    # A configuration object decides what the glue does as much as the module's own attributes do.
    inner = tuple(
        (name, plain_attributes(value))
        for name, value in vars(module).items()
        if not is_plain(value) and not isinstance(value, (torch.Tensor, Collection)) and hasattr(value, "__dict__")
    )
    children = tuple(Same(child) for child in module._modules.values())
    hooks = tuple(Same(hook) for name in _HOOKS for hook in module.__dict__[name].values())
    tensors = tuple((name, t.shape, t.dtype) for name, t in _tensors(module))
    return own, inner, children, hooks, tensors


def _tensors(module: nn.Module) -> list[tuple[str, Any]]:
    own = [(name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
    return own + [(name, tensor) for name, tensor in module._buffers.items() if tensor is not None]
