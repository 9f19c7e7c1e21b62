"""What is known of a tensor before it exists, and how trees of them are walked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from epl import _torch


class Spec(NamedTuple):
    """Shape, strides, dtype, device and requires_grad of a value that does not exist yet."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_view: bool = False
    """Whether it shares memory with an argument of the operation that made it."""

    @staticmethod
    def of(tensor: torch.Tensor) -> Spec:
        """The spec of a tensor, real, fake or lazy."""
        with _torch.no_tensor_subclass():
            stride = tensor.stride() if tensor.layout is torch.strided else ()
            return Spec(tensor.shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """A tensor of this spec with arbitrary numbers; under a fake mode, a fake one."""
        if len(self.stride) != len(self.shape):
            return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.shape.numel() * self.dtype.itemsize


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


Kinds = type[Any] | tuple[type[Any], ...]


def swap(tree: Any, kinds: Kinds, function: Callable[[Any], Any]) -> Any:
    """`tree` with every leaf of these kinds replaced; lists, tuples, dicts, slices and torch's named results are walked."""
    if isinstance(tree, kinds):
        return function(tree)
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([swap(t, kinds, function) for t in tree])
    if kind is dict:
        return {k: swap(t, kinds, function) for k, t in tree.items()}
    if kind is slice:
        return slice(*(swap(t, kinds, function) for t in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, tuple) and kind.__module__ == "torch.return_types":
        return kind([swap(t, kinds, function) for t in tree])
    return tree


def leaves_of(tree: Any, kinds: Kinds) -> list[Any]:
    """Every leaf of these kinds, in the order of `swap`."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    swap(tree, kinds, note)
    return found
