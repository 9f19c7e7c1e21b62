"""What the code of the glue reads by name and no module's own attributes tell: a recording holds its values, too.

    SCALE = 2.0                                  a global: a number, or a list, tuple or dict
    settings = Settings()                        a global or a captured variable with attributes
    class Model(nn.Module):
        gain = 1.0                               an attribute of the class
        def forward(self, x):
            return self.head(self.body(x) * SCALE * settings.scale * self.gain * self.body.gain)
                                                 an attribute of a module that is recorded as a whole

Where to look is found out when the modules are (`Reads`), from the names in the code. What is there is compared at every call
(`Reads.key`), mostly by identity. What a module that is recorded as a whole does to its attributes is no concern of the
glue's, unless their names occur in it.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from operator import is_
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import nn

from epl.graph.record.fingerprint import MODULES_OWN, Same
from epl.graph.record.tree import freeze
from epl.graph.spec import Spec

_SCALARS = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset, OrderedDict, defaultdict, deque})
_NOT_THEIRS = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "numpy", "epl", "builtins"}
"""Packages whose code is not looked into: what it reads is its own affair."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_LOADS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_LOADS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_BY_NAME = frozenset({"getattr", "hasattr"})
_MISSING = object()


class _Names(NamedTuple):
    globals: frozenset[str]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> _Names:
    """What a function's code, and code inside it, reads by name: not what it only sets."""
    globals_, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS_GLOBAL:
            globals_.add(instruction.argval)
        elif instruction.opname in _LOADS_ATTRIBUTE:
            attributes.add(instruction.argval)
    if globals_ & _BY_NAME:
        attributes.update(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names = _names(inner)
            globals_ |= names.globals
            attributes |= names.attributes
    return _Names(frozenset(globals_), frozenset(name for name in attributes if not name.startswith("__")))


class _Cell:
    """A captured variable, read like an entry of a dict."""

    __slots__ = ("_cell",)

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, name: str, default: Any) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # it is empty
            return default


class Frozen:
    """A large value; its hash is worked out once."""

    __slots__ = ("_hash", "values")

    def __init__(self, values: Hashable) -> None:
        self.values, self._hash = values, hash(values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Frozen) and other.values == self.values)


class _Place(NamedTuple):
    owner: Any
    """A module, class, object, dict of globals or cell; it is told apart by identity."""
    get: Callable[[str, Any], Any]
    name: str


class Reads:
    """The places outside the glue's own attributes that its code reads; `key` tells what is there."""

    def __init__(self, glue: Collection[nn.Module] = (), leaves: Iterable[nn.Module] = ()) -> None:
        self._places: dict[tuple[int, str], _Place] = {}
        if glue:
            _Finder(self._add).find(glue, leaves)
        self._gets = [(place.get, place.name) for place in self._places.values()]
        self._values: list[Any] = []
        self._mutable: list[tuple[Any, list[Any]]] = []
        self._deep: list[tuple[Any, Hashable]] = []
        self._look([get(name, _MISSING) for get, name in self._gets])

    def key(self) -> Hashable:
        """Equal if the same values are in the same places."""
        values = [get(name, _MISSING) for get, name in self._gets]
        if not (
            all(map(is_, values, self._values))
            and all(_is_same(container, content) for container, content in self._mutable)
            and all(_freeze(value) == frozen for value, frozen in self._deep)
        ):
            self._look(values)
        return self._key

    def __iter__(self) -> Iterator[tuple[Callable[[str, Any], Any], str]]:
        """Every place, as (get, name): `get(name, default)` is what is there."""
        return iter(self._gets)

    def _add(self, owner: Any, name: str) -> None:
        """`owner`: a dict, a cell, or anything with attributes."""
        if (id(owner), name) not in self._places:
            if isinstance(owner, types.CellType):
                place = _Place(owner, _Cell(owner).get, name)
            else:
                place = _Place(owner, (owner if isinstance(owner, dict) else vars(owner)).get, name)
            self._places[id(owner), name] = place

    def _look(self, values: list[Any]) -> None:
        self._values, self._mutable, self._deep = values, [], []
        for value in values:
            kind = type(value)
            if kind in _CONTAINERS:
                content = _content(value)
                if not all(type(each) in _SCALARS for each in content):
                    self._deep.append((value, _freeze(value)))
                elif kind is not tuple:
                    self._mutable.append((value, content))
            elif isinstance(value, torch.Tensor) or _is_container(value):
                self._deep.append((value, _freeze(value)))
        places = self._places.values()
        self._key = Frozen(tuple([(Same(p.owner), p.name, _freeze(v)) for p, v in zip(places, values, strict=True)]))


def _content(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _is_same(container: Any, content: list[Any]) -> bool:
    now = _content(container)
    return len(now) == len(content) and all(map(is_, now, content))


def _is_container(value: Any) -> bool:
    """Not one of a kind of their own, which may compute what it holds; but named tuples."""
    return type(value) in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _freeze(value: Any) -> Hashable:
    kind = type(value)
    if kind in _SCALARS:
        return kind, value
    if kind is set or kind is frozenset:
        return kind, frozenset(map(_freeze, value))
    if _is_container(value) or isinstance(value, torch.Tensor):
        frozen: Hashable = freeze(value, lambda leaf: Spec.of(leaf) if isinstance(leaf, torch.Tensor) else Same(leaf))
        try:
            hash(frozen)
        except TypeError:
            return Same(value)
        return frozen
    return Same(value)


def _is_data(value: Any, depth: int = 3) -> bool:
    """Whether it is a number, a string or the like, or a container of such."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    return _is_container(value) and depth > 0 and all(_is_data(each, depth - 1) for each in _content(value))


class _Finder:
    """Goes through the code of the glue, and through functions that are named in it."""

    def __init__(self, add: Callable[[Any, str], None]) -> None:
        self._add = add
        self._functions: dict[int, types.FunctionType] = {}
        self._todo: list[types.FunctionType] = []
        self._things: dict[int, Any] = {}
        """Whose attributes are read: classes of the glue, and what globals and captured variables name."""
        self._attributes: set[str] = set()

    def find(self, glue: Collection[nn.Module], leaves: Iterable[nn.Module]) -> None:
        """Add every place."""
        for module in glue:
            self._things[id(type(module))] = type(module)
            self._follow(type(module).forward)
            self._follow(vars(module).get("forward"))
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                self._follow(hook)
        looked_at = -1
        while self._todo or looked_at != len(self._attributes) + len(self._things):
            looked_at = len(self._attributes) + len(self._things)
            while self._todo:
                self._read(self._todo.pop())
            for thing in list(self._things.values()):
                self._look_at(thing)
            for module in glue:
                state = vars(module)
                for name in self._attributes & state.keys():
                    self._follow(state[name])
        for module in leaves:
            self._look_at_leaf(module)

    # ---- functions ---------------------------------------------------------------------------------------------------

    def _follow(self, value: Any) -> None:
        """If it is a function, read its code, too."""
        for _ in range(16):  # wrappers in wrappers
            if isinstance(value, types.MethodType | staticmethod | classmethod):
                value = value.__func__
            elif isinstance(value, property):
                value = value.fget
            elif isinstance(value, functools.partial | functools.partialmethod | functools.cached_property):
                value = value.func
            elif isinstance(value, types.FunctionType):
                if id(value) not in self._functions:
                    self._functions[id(value)] = value
                    self._todo.append(value)
                return
            elif callable(value) and "__wrapped__" in getattr(value, "__dict__", ()):
                value = value.__wrapped__
            else:
                return

    def _read(self, function: types.FunctionType) -> None:
        space = function.__globals__
        theirs, library = _is_theirs(space.get("__name__")), _is_library(space)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if theirs and not isinstance(value, types.FunctionType):
                self._named(cell, name, value, library)
            else:
                self._follow(value)  # a decorator's wrapper
        if theirs:
            names = _names(function.__code__)
            self._attributes |= names.attributes
            for name in sorted(names.globals & space.keys()):
                self._named(space, name, space[name], library)

    def _named(self, owner: Any, name: str, value: Any, library: bool) -> None:
        """A global or captured variable that the code reads; functions and settings of a library are its own affair."""
        if _is_data(value) or isinstance(value, torch.Tensor):
            self._add(owner, name)
        elif library or isinstance(value, types.BuiltinFunctionType):
            return
        elif isinstance(value, types.ModuleType | type):
            if _is_theirs(value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
                self._thing(value)
        elif isinstance(value, types.FunctionType):
            if _is_theirs(value.__globals__.get("__name__")):
                self._add(owner, name)
                self._follow(value)
        else:
            self._add(owner, name)
            self._thing(value)

    def _thing(self, value: Any) -> None:
        """A class, a Python module or an object whose attributes the code may read."""
        self._follow(value)
        space = (
            vars(sys.modules.get(value.__module__, sys))
            if isinstance(value, type)
            else getattr(value, "__dict__", None)
        )
        if (
            space is None
            or "__wrapped__" in space
            or isinstance(value, enum.Enum | torch.Tensor)
            or _is_container(value)
        ):
            return
        if not (isinstance(value, type | types.ModuleType) and _is_library(space)):
            self._things[id(value)] = value
            if not isinstance(value, type | types.ModuleType):
                self._follow(getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None))

    # ---- attributes --------------------------------------------------------------------------------------------------

    def _look_at(self, thing: Any) -> None:
        """Add what the code may read of a class, a Python module or an object."""
        own = MODULES_OWN if isinstance(thing, nn.Module) else frozenset()
        if not isinstance(thing, type):
            for name in sorted((self._attributes & vars(thing).keys()) - own):
                self._attribute(thing, name, vars(thing)[name])
        if not isinstance(thing, types.ModuleType):
            for kind, name, value in self._of_class(thing if isinstance(thing, type) else type(thing)):
                if _is_data(value) and not isinstance(thing, type):
                    self._add(thing, name)
                self._attribute(kind, name, value)

    def _look_at_leaf(self, module: nn.Module) -> None:
        state = vars(module)
        for name in sorted((self._attributes & state.keys()) - MODULES_OWN):
            if _is_data(state[name]):
                self._add(module, name)
        for kind, name, value in self._of_class(type(module)):
            if _is_data(value):
                self._add(module, name)
                self._add(kind, name)

    def _of_class(self, kind: type) -> Iterator[tuple[type, str, Any]]:
        """What classes of theirs define of the attributes; a class that stands before the one that does may do so later."""
        if not _is_theirs(kind.__module__):
            return
        before: list[type] = []
        for base in kind.__mro__:
            if not _is_theirs(base.__module__):
                continue
            for name in sorted(self._attributes & vars(base).keys()):
                value = vars(base)[name]
                if _is_data(value):
                    for each in before:
                        yield each, name, value
                yield base, name, value
            before.append(base)

    def _attribute(self, owner: Any, name: str, value: Any) -> None:
        if _is_data(value) or isinstance(value, torch.Tensor) or _is_container(value):
            self._add(owner, name)
        elif not isinstance(value, type | types.ModuleType | nn.Module):
            self._follow(value)
            if not callable(value) and hasattr(value, "__dict__"):
                self._add(owner, name)
                self._thing(value)


def _is_theirs(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in _NOT_THEIRS


def _is_library(space: dict[str, Any]) -> bool:
    """Whether these globals are those of an installed package: only its numbers, strings and tensors are watched."""
    file = space.get("__file__")
    return isinstance(file, str) and not _INSTALLED.isdisjoint(PurePath(file).parts)
