"""What decides, beside its inputs, what a model's forward does: equal keys, equal recordings."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import nn

from epl import _torch
from epl.graph.context import Context
from epl.graph.record.fingerprint import MODULES_OWN, Same, plain_attributes
from epl.graph.record.reads import Reads
from epl.graph.record.tree import is_plain

_PLAIN = frozenset({int, float, bool, str, type(None), list, tuple, dict})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def model_key(model: nn.Module, glue: Collection[nn.Module], reads: Reads) -> Hashable:
    """Flags and forms of everything in the model, the plain attributes and hooks of the modules that are glue, and what else
    their code reads."""
    parts: list[Any] = [Context.now(), torch.get_default_dtype()]
    seen: set[int] = set()
    stack = [model]
    with _torch.no_tensor_subclass():
        while stack:
            module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            state = module.__dict__
            parts.append((id(module), state["training"]))
            for tensor in state["_parameters"].values():
                if tensor is not None:
                    parts += (id(tensor), tensor.requires_grad, tensor.dtype)
            for tensor in state["_buffers"].values():
                if tensor is not None:
                    parts.append((tensor.shape, tensor.dtype))
            stack.extend(child for child in state["_modules"].values() if child is not None)
            if module in glue:
                parts += _glue(module, seen)
        parts.append(reads.key())
    return tuple(parts)


def _glue(module: nn.Module, seen: set[int]) -> list[Any]:
    parts: list[Any] = [plain_attributes(module)]
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            parts.append((name, value.shape, value.dtype, value.requires_grad))
        elif type(value) not in _PLAIN and not is_plain(value) and id(value) not in seen and name not in MODULES_OWN:
            # A configuration object decides what the glue does as much as the module's own attributes do.
            seen.add(id(value))
            if hasattr(value, "__dict__"):
                parts.append((name, plain_attributes(value)))
    parts += [Same(hook) for name in _HOOKS for hook in module.__dict__[name].values()]
    return parts
