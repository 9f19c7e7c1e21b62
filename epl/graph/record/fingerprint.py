"""What a module's results look like depends on this, and not on its numbers: so equal layers run once on fake tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from epl.graph.record.hooks import has_hooks
from epl.graph.record.tree import freeze, is_plain
from epl.graph.spec import Spec

# Every layer of a model has its own number, and hardly ever does the shape of its result depend on it.
_PLACES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_idx", "block_id"})
MODULES_OWN = frozenset(nn.Module().__dict__)
"""What every module has in its `__dict__`."""


_SIMPLE = frozenset({int, float, bool, str, type(None)})


class Same:
    """A thing by its identity; kept, since ids are unique only while their owners live."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing


def fingerprint(module: nn.Module) -> Hashable | None:
    """Equal for modules that turn equal specs into equal specs; None for one with hooks, of which nothing is known."""
    if has_hooks(module):
        return None
    parts: list[Any] = [type(module), module.training]
    for tensors in (module._parameters, module._buffers):
        parts += [(name, None if tensor is None else _spec(tensor)) for name, tensor in tensors.items()]
    for name, value in module.__dict__.items():
        if name not in MODULES_OWN and name not in _PLACES:
            parts.append((name, _attribute(value)))
    for name, child in module._modules.items():
        inner = None if child is None else fingerprint(child)
        if child is not None and inner is None:
            return None
        parts.append((name, inner))
    return tuple(parts)


def _spec(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _attribute(value: Any) -> Hashable:
    if type(value) in _SIMPLE:
        return type(value), value
    frozen: Hashable = freeze(value, lambda leaf: Spec.of(leaf) if isinstance(leaf, torch.Tensor) else Same(leaf))
    try:
        hash(frozen)
    except TypeError:
        return Same(value)
    return frozen


def plain_attributes(thing: Any) -> Hashable:
    """The numbers, strings, flags and containers of them that a thing has as attributes, and its functions by identity."""
    own = MODULES_OWN if isinstance(thing, nn.Module) else ()
    return tuple(
        (name, _attribute(value))
        for name, value in vars(thing).items()
        if name not in own and (is_plain(value) or isinstance(value, (list, tuple, dict)))
    )
