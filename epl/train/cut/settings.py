"""What the modules of a model are set to, which their forwards read when a call runs, not when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from epl import _torch
from epl.train.lazy import LazyTensor

_STANDARD = frozenset(nn.Module().__dict__)
_SIMPLE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)

Place = tuple[nn.Module, str]
"""A module and the name of something in it."""


class Snapshot(NamedTuple):
    """The values of all places, and the versions of all buffers."""

    values: list[Any]
    versions: list[int]


class Settings:
    """Attributes that are plain values; parameters, parts and buffers by identity, and whether buffers were changed in place.

    `training` is not among them: a call remembers it, and runs with it.
    """

    def __init__(self, modules: Iterable[nn.Module], theirs: set[Place]) -> None:
        """`theirs`: what the modules' own forwards were seen to change; added to."""
        self._theirs = theirs
        self._places: list[Place] = []
        self._holders: list[tuple[dict[str, Any], str]] = []
        self._buffer_places: list[Place] = []
        self._buffers: list[torch.Tensor] = []
        for module in modules:
            own, parts = list(_simple(module)), ("_parameters", "_modules", "_buffers")
            holders = [(module.__dict__, name) for name in own]
            holders += [(held, name) for held in map(module.__dict__.__getitem__, parts) for name in held]
            self._holders += holders
            self._places += [(module, name) for _, name in holders]
            buffers = {n: b for n, b in module._buffers.items() if b is not None and not b.is_inference()}
            self._buffers += buffers.values()
            self._buffer_places += [(module, name) for name in buffers]

    def now(self) -> Snapshot:
        """As they are set."""
        return Snapshot(
            [holder.get(name) for holder, name in self._holders], list(map(_torch.version_of, self._buffers))
        )

    def changed_since(self, then: Snapshot) -> str:
        """Something that somebody has set to something else, by its name; "" if nobody has."""
        for module, name in self._changes(then):
            # A value that follows from this very call (model.loss = …) is nothing that its forward could read.
            if (module, name) not in self._theirs and not isinstance(module.__dict__.get(name), LazyTensor):
                return f"{type(module).__name__}.{name}"
        return ""

    def forwards_ran_since(self, then: Snapshot) -> None:
        """Only the modules themselves have run: what has changed is theirs to change."""
        self._theirs.update(self._changes(then))

    def _changes(self, then: Snapshot) -> list[Place]:
        now = self.now()
        found: list[Place] = []
        if not all(map(is_, now.values, then.values)):
            pairs = zip(self._places, now.values, then.values, strict=True)
            found = [place for place, a, b in pairs if a is not b and not _equal(a, b)]
        if now.versions != then.versions:
            pairs = zip(self._buffer_places, now.versions, then.versions, strict=True)
            found += [place for place, a, b in pairs if a != b]
        return found


def _simple(module: nn.Module) -> Iterator[str]:
    """The names of a module's attributes that are plain values: its own, and those of its class that it may come to have."""
    for name, value in module.__dict__.items():
        if name not in _STANDARD and isinstance(value, _SIMPLE):
            yield name
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        if not kind.__module__.startswith("torch."):
            for name, value in vars(kind).items():
                if isinstance(value, _SIMPLE) and not name.startswith("__") and name not in module.__dict__:
                    yield name


def _equal(a: object, b: object) -> bool:
    return isinstance(a, _SIMPLE) and type(a) is type(b) and a == b
