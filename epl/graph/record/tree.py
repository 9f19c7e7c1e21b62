"""Arguments and results of a forward as trees: what is inside them, and how they are put together again.

Walked are lists, tuples, dicts, slices, named tuples, dataclasses and everything registered with torch's pytree (Hugging
Face's outputs). *Plain* values are copied as they are. Anything else is an *object*: it is looked into only by pickling it
around its tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from epl import _torch
from epl.cluster.pickling import FAILURES, dump_around_tensors
from epl.graph.record.standin import StaysOnStages

Rebuild = Callable[[list[Any]], Any]

_PLAIN = (
    (int, float, bool, complex, str, bytes, type(None), type(...), type(NotImplemented), range, type, enum.Enum)
    + (
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        torch.Generator,
        nn.Module,
        StaysOnStages,
    )
    + (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial)
)
_PLAIN_EXACTLY = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def is_plain(value: object) -> bool:
    """Whether a value may be used again as it is: it holds no tensor of its own and nobody changes it."""
    return type(value) in _PLAIN_EXACTLY or isinstance(value, _PLAIN)


def children_of(value: Any) -> tuple[list[Any], Rebuild] | None:
    """The parts of a container and how to make one like it of others; None for everything else.

    How to make one is kept with recordings, and must not keep the parts: tensors of a batch, fakes with all their history.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return list(value), kind
    if kind is dict:
        keys = list(value)
        return list(value.values()), lambda parts: dict(zip(keys, parts, strict=True))
    if kind in _PLAIN_EXACTLY or isinstance(value, torch.Tensor):
        return None
    if kind is slice:
        return [value.start, value.stop, value.step], lambda parts: slice(*parts)
    known = _torch.tree_children(value)
    if known is not None:
        return known
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], functools.partial(
            _dataclass_like, _dataclass_like(value, names, [None] * len(names)), names
        )
    return None


def _dataclass_like(value: Any, names: list[str], parts: list[Any]) -> Any:
    # Not by its constructor: __post_init__ may check or convert, and has done so already.
    made = copy.copy(value)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


def _never(value: Any) -> bool:
    return False


def leaves_of(tree: Any, whole: Callable[[Any], bool] = _never) -> Iterator[Any]:
    """Every tensor and object of a tree, depth first; a container is not looked into if it is to be taken `whole`."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    if type(tree) in _PLAIN_EXACTLY:
        return
    inner = None if whole(tree) else children_of(tree)
    if inner is not None:
        for child in inner[0]:
            yield from leaves_of(child, whole)
    elif not is_plain(tree):
        yield tree


def tensors_of(tree: Any, whole: Callable[[Any], bool] = _never) -> list[torch.Tensor]:
    """Every tensor of a tree, in order; those inside objects are not among them."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in leaves_of(tree, whole) if isinstance(leaf, torch.Tensor)]


def objects_of(tree: Any) -> list[Any]:
    """Every object of a tree, in order."""
    return [leaf for leaf in leaves_of(tree) if not isinstance(leaf, torch.Tensor)]


def tensors_inside(thing: Any) -> list[torch.Tensor]:
    """The tensors that an object holds; none if it cannot be pickled."""
    try:
        return dump_around_tensors(thing)[1]
    except FAILURES:
        return []


def freeze(value: Any, leaf: Callable[[Any], Any], whole: Callable[[Any], bool] = _never) -> Any:
    """A hashable value, equal for equal trees and different for others; `leaf` gives it for tensors and objects."""
    kind = type(value)
    if kind in _PLAIN_EXACTLY:
        return kind, value
    inner = None if whole(value) else children_of(value)
    if inner is not None:
        keys = tuple(value) if isinstance(value, dict) else ()
        return kind, keys, tuple([freeze(child, leaf, whole) for child in inner[0]])
    return (kind, value) if is_plain(value) else leaf(value)


def skeleton(tree: Any, whole: Callable[[Any], bool] = _never) -> tuple[list[Any], Rebuild]:
    """The tensors and objects of a tree, and how to make the same tree around others."""
    leaves: list[Any] = []
    fill = _skeleton(tree, leaves, whole)
    return leaves, lambda others: fill(iter(others))


def _skeleton(tree: Any, leaves: list[Any], whole: Callable[[Any], bool]) -> Callable[[Iterator[Any]], Any]:
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
        return next
    inner = None if type(tree) in _PLAIN_EXACTLY or whole(tree) else children_of(tree)
    if inner is not None:
        children, rebuild = inner
        fills = [_skeleton(child, leaves, whole) for child in children]
        return lambda others: rebuild([fill(others) for fill in fills])
    if is_plain(tree):
        return lambda others: tree
    leaves.append(tree)
    return next
