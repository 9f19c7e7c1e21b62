"""Tensors of a recording that no module holds as an attribute: from a list that a module has, from a global, from a closure.

What a module holds by name is read again whenever it is needed. These are in the recording themselves, so it fits only as long
as the same tensors are where they were found. (Their numbers may change: those are read when they are needed.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from epl.graph.record.fingerprint import MODULES_OWN
from epl.graph.record.modules import Modules
from epl.graph.record.recording import Recording
from epl.graph.record.tree import is_plain

_DEEP = 4
"""How far into containers in containers is looked."""


class Home(NamedTuple):
    """A place where a tensor of a recording was found."""

    tensor: torch.Tensor
    get: Callable[[str, Any], Any]
    name: str
    inside: tuple[Any, ...]
    """The way from what has this name to the tensor: indices, keys and names of attributes."""

    def is_current(self) -> bool:
        """Whether the tensor is still there."""
        value = self.get(self.name, None)
        try:
            for step in self.inside:
                value = vars(value)[step.name] if isinstance(step, _Attribute) else value[step]
        except (LookupError, TypeError):
            return False
        return value is self.tensor


class _Attribute(NamedTuple):
    name: str


def homes_of(recording: Recording, modules: Modules) -> tuple[Home, ...]:
    """Every place where a constant of this recording is: all of them must keep it, since the forward may mean any."""
    wanted = {id(node.meta["value"]) for node in recording.nodes if "value" in node.meta}
    if not wanted:
        return ()
    places = [
        (vars(module).get, name)
        for module in modules.model.modules()
        for name, value in vars(module).items()
        if name not in MODULES_OWN and not isinstance(value, torch.Tensor)
    ]
    return tuple(
        Home(tensor, get, name, inside)
        for get, name in (*places, *modules.reads)
        for inside, tensor in _tensors(get(name, None), ())
        if id(tensor) in wanted
    )


def _tensors(value: Any, way: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield way, value
    elif len(way) < _DEEP and not is_plain(value):
        if isinstance(value, dict):
            parts: Any = list(value.items())
        elif isinstance(value, list | tuple):
            parts = enumerate(value)
        else:
            parts = [(_Attribute(name), each) for name, each in getattr(value, "__dict__", {}).items()]
        for step, each in parts:
            yield from _tensors(each, (*way, step))
