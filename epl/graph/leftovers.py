"""What a run on fake tensors leaves behind outside the modules: masks and tables that the user's code keeps for the next time.

A `functools.lru_cache`, a dict at the top of a file or on a class, an object that a module holds: with a fake in it, the next run
would compute with a tensor without numbers. Modules themselves are put back by those who run them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from epl import _torch

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
_LOOKED_INTO = (*_CONTAINERS, tuple, frozenset)
_DEPTH = 3
"""Of containers in containers."""
_FOREIGN = frozenset({"torch", "epl", "numpy"})
"""Packages whose insides are none of the user's; those that come with Python are not, either."""
_LRU = type(functools.lru_cache(lambda: None))

_NO_KEEPERS = (nn.Module, type, types.ModuleType, torch.Tensor)

IsLeft = Callable[[torch.Tensor], bool]


@contextlib.contextmanager
def leaving_no_fakes(model: nn.Module, is_left: IsLeft = _torch.is_fake) -> Iterator[None]:
    """Afterwards what the code of the model's modules keeps outside of them holds no fakes (or what `is_left` says)."""
    spaces = [(space, dict(_of_interest(space))) for space in _namespaces(model)]
    contents = {id(value): (value, _copied(value)) for _, known in spaces for value in known.values()}
    try:
        yield
    finally:
        _clear_caches(is_left)
        for space, before in spaces:
            for name, value in list(space.items()):
                if isinstance(value, torch.Tensor) and is_left(value):
                    _restore(space, name, before)
                elif isinstance(value, _CONTAINERS) and _holds(value, is_left):
                    known = contents.get(id(value))
                    if known is None:  # made in the run
                        _restore(space, name, before)
                    else:
                        _put_back(*known)


# ---- where the code of a model keeps things ------------------------------------------------------------------------------


def _namespaces(model: nn.Module) -> Iterator[Any]:
    """The names of the files and classes that the modules are written in, and of plain objects there and on the modules."""
    seen: set[int] = set()

    def new(space: Any) -> bool:
        if id(space) in seen:
            return False
        seen.add(id(space))
        return True

    classes = dict.fromkeys(each for module in model.modules() for each in type(module).__mro__)
    own = [each for each in classes if not _is_foreign(each.__module__)]
    files = {each.__module__: vars(sys.modules[each.__module__]) for each in own if each.__module__ in sys.modules}
    for names in list(files.values()):  # and those of the functions that they call
        for value in list(names.values()):
            place = getattr(value, "__module__", None) if isinstance(value, (types.FunctionType, _LRU)) else None
            if isinstance(place, str) and not _is_foreign(place) and place in sys.modules:
                files.setdefault(place, vars(sys.modules[place]))
    holders: list[Any] = [each for each in own if new(each)]
    yield from map(_ClassNames, holders)
    for names in files.values():
        if new(names):
            yield names
            holders += [value for value in names.values() if isinstance(value, types.FunctionType)]
    objects = [value for names in (*files.values(), *map(vars, model.modules())) for value in names.values()]
    functions = [value for each in holders for value in vars(each).values() if isinstance(value, types.FunctionType)]
    for value in (*objects, *functions):
        if isinstance(value, types.FunctionType):
            if new(value):
                yield vars(value)
                yield dict(enumerate((*(value.__defaults__ or ()), *_enclosed(value))))
        elif not isinstance(value, _NO_KEEPERS) and not _is_foreign(type(value).__module__):
            inside = getattr(value, "__dict__", None)
            if type(inside) is dict and new(inside):
                yield inside


class _ClassNames:
    """The attributes of a class, as a mapping that can be changed."""

    def __init__(self, owner: type) -> None:
        self._owner = owner

    def items(self) -> Any:
        return vars(self._owner).items()

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)


def _enclosed(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            yield cell.cell_contents


def _is_foreign(name: str) -> bool:
    package = name.partition(".")[0]
    return package in _FOREIGN or package in sys.stdlib_module_names


def _of_interest(space: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(space.items()):
        if value is None or isinstance(value, (torch.Tensor, *_CONTAINERS)):
            yield name, value


# ---- afterwards ------------------------------------------------------------------------------------------------------------


def _clear_caches(is_left: IsLeft) -> None:
    """Empty the functools caches that hold fakes."""
    for cache in _caches():
        own = not _is_foreign(getattr(cache, "__module__", None) or "builtins") and cache.cache_info().currsize
        if own and any(_holds(value, is_left) for value in gc.get_referents(cache)):
            cache.cache_clear()


def _caches() -> Iterator[Any]:
    """All that there are: the collector's objects, and named ones, which it does not tell of after `gc.freeze()`."""
    found = {id(each): each for each in gc.get_referrers(_LRU) if type(each) is _LRU}
    some_untold = gc.get_freeze_count() > 0
    files = [each for name, each in list(sys.modules.items()) if some_untold and not _is_foreign(name)]
    for names in (vars(each) for each in files if isinstance(each, types.ModuleType)):
        for value in list(names.values()):
            inside = list(vars(value).values()) if isinstance(value, type) else [value]
            for each in inside:
                cache = each.__func__ if isinstance(each, (staticmethod, classmethod)) else each
                if type(cache) is _LRU:
                    found.setdefault(id(cache), cache)
    yield from found.values()


def _holds(value: Any, is_left: IsLeft, depth: int = _DEPTH) -> bool:
    if isinstance(value, torch.Tensor):
        return is_left(value)
    if not depth or not isinstance(value, _LOOKED_INTO):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return any(_holds(each, is_left, depth - 1) for each in list(inside))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, _CONTAINERS) else None


def _restore(space: Any, name: str, before: dict[str, Any]) -> None:
    if name in before:
        space[name] = before[name]
    else:
        del space[name]


def _put_back(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
