"""What is planned: a module and what it is called with, run again and again without leaving a trace on either."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from epl import _torch
from epl.graph.spec import leaves_of
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Subject:
    """A module with example arguments; on fake tensors as long as its code does not look at values, then on real ones."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeOrReal) -> None:
        self.module, self.args, self.kwargs, self.mode = module, args, kwargs, mode

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments for one run."""
        copied: tuple[tuple[Any, ...], dict[str, Any]] = copied_with((self.args, self.kwargs), self.mode.like)
        return copied


class FakeOrReal:
    """How tensors are made for planning: fakes of one mode, or real copies once `real` is set."""

    def __init__(self, device: torch.device) -> None:
        self.real = False
        self._fake = _torch.fake_mode()
        self._device = device
        """Where parameters without memory are thought to be."""
        self._spare: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def on(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, tensors are made so."""
        return contextlib.nullcontext() if self.real else self._fake

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A leaf of the same kind, with the same numbers if they are real."""
        if self.real:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if tensor.layout is not torch.strided:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=self.device_of(tensor),
            requires_grad=tensor.requires_grad,
        )

    def block(self, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """A fake leaf of another shape."""
        return torch.empty(shape, dtype=like.dtype, device=self.device_of(like))

    def spare(self, tensor: torch.Tensor) -> torch.Tensor:
        """One with the same numbers, to be changed in its place.

        A run on fakes that did not change it leaves it for the next one: code may hold large masks, and runs are many.
        """
        known = self._spare.get(id(tensor))
        if known is None or self.real or _torch.version_of(known[1]) != known[2]:
            made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            known = self._spare[id(tensor)] = tensor, made, _torch.version_of(made)
        return known[1]

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """The device of its stand-in."""
        return self._device if tensor.is_meta else tensor.device


class _Copying(TorchFunctionMode):
    """Inside, deepcopy copies tensors by a function; torch itself refuses those that have a graph."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._make(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def copied_with(tree: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """`tree` with every tensor replaced, also in objects such as caches, which a run may change: they are copied."""
    made: dict[int, Any] = {}

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in made:
                made[id(leaf)] = make(leaf)
            return made[id(leaf)]
        if isinstance(leaf, (*_SIMPLE, nn.Module, type)) or callable(leaf):
            return leaf
        with _Copying(make):
            return copy.deepcopy(leaf)

    return _torch.tree_map(one, tree)


def signature_of(tree: Any) -> object:
    """Equal for arguments of the same structure, shapes and plain values."""
    found: list[object] = []
    for leaf in _torch.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append((leaf.shape, leaf.dtype))
        else:
            found.append(leaf if isinstance(leaf, _SIMPLE) else type(leaf))
    return tuple(found)


@contextlib.contextmanager
def untouched(module: nn.Module, mode: FakeOrReal) -> Iterator[None]:
    """Afterwards the modules' attributes and buffers and all random states are what they were before."""
    states: list[tuple[dict[str, Any], dict[str, Any]]] = []
    contents: list[tuple[Any, Any]] = []
    devices = {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")} if mode.real else set()
    randomness = random.getstate()
    spares: dict[int, torch.Tensor] = {}

    def spared(value: Any) -> Any:
        # On fakes, too: where all arguments have numbers, a fake mode computes with them, and `self.count += 1` would count runs.
        if not _holds_numbers(value):
            return value
        if id(value) not in spares:
            spares[id(value)] = mode.spare(value)
        return spares[id(value)]

    try:
        for part in module.modules():
            state = part.__dict__
            states.append((state, state.copy()))
            contents += [(value, copy.copy(value)) for value in state.values() if type(value) in _CONTAINERS]
            for name, value in list(state.items()):
                if name == "_buffers":
                    state[name] = {key: spared(b) for key, b in value.items()}
                elif type(value) in _CONTAINERS and type(value) is not set:
                    for key in range(len(value)) if isinstance(value, (list, deque)) else list(value):
                        if _holds_numbers(value[key]):
                            value[key] = spared(value[key])
                else:
                    state[name] = spared(value)
        with torch.random.fork_rng([device.index for device in devices if device.index is not None]):
            yield
    finally:
        random.setstate(randomness)
        for state, before in states:
            state.clear()
            state.update(before)
        for container, content in reversed(contents):  # one that several modules have was first seen as it is
            _put_back(container, content)


def _holds_numbers(value: Any) -> bool:
    """Whether it is a tensor that code may change in place; not parameters, which are seen as others anyway."""
    if not isinstance(value, torch.Tensor) or isinstance(value, (nn.Parameter, SplitTensor)):
        return False
    return value.is_leaf and not value.is_meta and not _torch.is_fake(value)


def _put_back(container: Any, content: Any) -> None:
    if isinstance(container, (list, deque)):
        if len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
            container.clear()
            container.extend(content)
    elif isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif list(container) != list(content) or any(dict.get(container, key) is not content[key] for key in content):
        container.clear()
        container.update(content)


def device_of(module: nn.Module, tree: Any) -> torch.device:
    """Where the module will run: where its arguments are, or its parameters."""
    for tensor in (*leaves_of(tree, torch.Tensor), *module.parameters()):
        if not tensor.is_meta:
            return tensor.device  # type: ignore[no-any-return]
    return torch.device("cpu")


@contextlib.contextmanager
def planned_region() -> Iterator[None]:
    """Inside, parameters show as split values, and nothing of a part that is running is seen."""
    before = region.depth, region.entered, region.sequence, region.exact_dropout
    region.depth, region.entered, region.sequence, region.exact_dropout = 1, {}, None, False
    try:
        yield
    finally:
        region.depth, region.entered, region.sequence, region.exact_dropout = before
