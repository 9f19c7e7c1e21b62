"""Forward hooks of the user on modules that run as a whole, while they are recorded.

A hook may change what its module returns, so it runs, on fake tensors. What it wrote meanwhile is taken back: lists, dicts,
sets and plain objects that it can reach through its closure, its `self`, its defaults or the globals it names are put back,
one level deep. Only what it did to the outside world (printing, files) stays. A hook that needs numbers is left out: if
it changes what its module returns, the run notices that the shapes are others.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_DICTS = ("_forward_hooks", "_forward_pre_hooks")
_EXTRA = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_CONTAINERS = (list, dict, set, deque, bytearray)


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs before or after the forward of this module itself."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def around_hooks(leaves: Iterable[nn.Module]) -> list[nn.Module]:
    """Of these modules those with hooks on modules inside: they have to be looked into for what such a hook takes out to be seen."""
    return [leaf for leaf in leaves if any(has_hooks(each) for each in leaf.modules() if each is not leaf)]


@contextlib.contextmanager
def left_out(module: nn.Module) -> Iterator[None]:
    """Inside, no forward hook runs on this module or any in it."""
    saved = []
    for each in module.modules():
        for name in (*_DICTS, *_EXTRA):
            if each.__dict__[name]:
                saved.append((each.__dict__, name, each.__dict__[name]))
                each.__dict__[name] = type(each.__dict__[name])()
    try:
        yield
    finally:
        for state, name, hooks in saved:
            state[name] = hooks


@contextlib.contextmanager
def taken_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards, what the hooks of these modules can reach is as it was."""
    hooks = [hook for module in modules for name in _DICTS for hook in module.__dict__[name].values()]
    undo = [restore for hook in hooks for restore in _snapshots(hook)]
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _snapshots(hook: Any) -> Iterator[Callable[[], None]]:
    function = getattr(hook, "__func__", hook)
    if isinstance(function, types.FunctionType):
        yield functools.partial(function.__globals__.update, _named_globals(function))
    for thing in _reach(hook):
        if isinstance(thing, types.CellType):
            yield functools.partial(_set_cell, thing, thing.cell_contents)
        elif isinstance(thing, _CONTAINERS):
            yield functools.partial(_refill, thing, thing.copy())
        elif not isinstance(thing, (nn.Module, torch.Tensor, type, types.ModuleType)) and hasattr(thing, "__dict__"):
            yield functools.partial(_refill, thing.__dict__, dict(thing.__dict__))
            yield from (
                functools.partial(_refill, v, v.copy()) for v in thing.__dict__.values() if isinstance(v, _CONTAINERS)
            )


def _reach(hook: Any) -> Iterator[Any]:
    """The cells of its closure, and the things it could write to."""
    while isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values())
        hook = hook.func
    if isinstance(hook, types.MethodType):
        yield hook.__self__
        hook = hook.__func__
    if not isinstance(hook, types.FunctionType):
        yield hook
        return
    yield from hook.__defaults__ or ()
    for cell in hook.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
            yield cell
    yield from (value for value in _named_globals(hook).values() if isinstance(value, _CONTAINERS))


def _named_globals(function: types.FunctionType) -> dict[str, Any]:
    return {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}


def _set_cell(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
