"""Python objects that a forward makes and hands to modules, such as Hugging Face's key-value caches.

An object without tensors of this forward is written down as a node that makes it afresh from its pickle; whoever is given
the same object later refers to the same node, even though a module has filled it meanwhile: at run time the module fills it
again. A module that uses what an earlier one has put into the object depends on that one, and has to be on the same stage.
An object around tensors is written down as a node that rebuilds it around theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from epl import _torch
from epl.cluster.pickling import FAILURES, dump_around_tensors, load_around_tensors
from epl.errors import RecordingError
from epl.graph.record import steps
from epl.graph.record.standin import StaysOnStages
from epl.graph.record.tree import skeleton
from epl.graph.record.where import user_line


@dataclass
class _Known:
    thing: Any  # kept, and so are its tensors: ids are unique only while their owners live
    node: fx.Node
    data: bytes
    tensors: list[torch.Tensor]
    versions: list[int] = field(default_factory=list)
    """Of the tensors, when the module that is running was called."""

    def is_as(self, data: bytes, tensors: Sequence[torch.Tensor]) -> bool:
        return data == self.data and list(map(id, tensors)) == list(map(id, self.tensors))


class Objects:
    """The objects of one recording, by identity."""

    def __init__(self, modules: Sequence[nn.Module], write: Callable[[Any, tuple[Any, ...]], fx.Node]) -> None:
        """`modules`: all of the model."""
        self._modules = modules
        self._write = write
        self._known: dict[int, _Known] = {}
        self._fillers: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    def is_known(self, thing: Any) -> bool:
        """Whether a module was given this object."""
        return id(thing) in self._known

    def argument(self, thing: Any, node_of: Callable[[torch.Tensor], fx.Node]) -> Any:
        """What stands for an object among the arguments of a node: the node that makes it, or itself if the model owns it."""
        known = self._known.get(id(thing))
        if known is None and self._is_owned(thing):
            return thing
        data, tensors = dump(thing)
        if known is not None:
            if not known.is_as(data, tensors):
                raise RecordingError(
                    f"the {type(thing).__name__} that is handed on at {user_line()} was changed by the code between two "
                    "modules that had it: on another stage that change would be lost. Change it inside a module, or hand "
                    "on tensors"
                )
            return known.node
        pristine = steps.Pristine(type(thing).__name__, data)
        if tensors:
            node = self._write(steps.rebuild_object, (pristine, [node_of(t) for t in tensors]))
        else:
            node = self._write(steps.make_afresh, (pristine,))
        self._known[id(thing)] = _Known(thing, node, data, tensors)
        return node

    def fillers(self, things: Sequence[Any]) -> dict[int, fx.Node]:
        """By the ids of the tensors that these objects hold now: the module that put them there."""
        tensors = (t for thing in things if id(thing) in self._known for t in dump(thing)[1])
        return {id(t): self._fillers[id(t)][1] for t in tensors if id(t) in self._fillers}

    def module_starts(self) -> None:
        """Note what the objects hold before a module runs."""
        for known in self._known.values():
            known.versions = list(map(_torch.version_of, known.tensors))

    def module_returned(self, node: fx.Node) -> None:
        """Note what the module that just ran has done to its objects: the tensors it has added, and those it has changed.

        What an object held before, and holds unchanged, comes from elsewhere: every stage can have that in its own.
        """
        for known in self._known.values():
            before = dict(zip(map(id, known.tensors), known.versions, strict=True))
            data, tensors = dump(known.thing)
            for tensor in tensors:
                if id(tensor) not in before:
                    self._fillers.setdefault(id(tensor), (tensor, node))
                elif _torch.version_of(tensor) != before[id(tensor)]:
                    self._fillers[id(tensor)] = (tensor, node)
            known.data, known.tensors = data, tensors

    def after(self, reader: fx.Node, filler: fx.Node) -> None:
        """Write down that `reader` uses what `filler` has put into an object that both were given."""
        for thing in [each for each in reader.all_input_nodes if each in filler.all_input_nodes]:
            if any(known.node is thing for known in self._known.values()):
                with reader.graph.inserting_before(reader):
                    filled = self._write(steps.changed, (thing, filler))
                filled.meta["taskgraph"] = filler.meta["taskgraph"]
                reader.replace_input_with(thing, filled)

    def _is_owned(self, thing: Any) -> bool:
        return any(id(thing) in map(id, module.__dict__.values()) for module in self._modules)


def dump(thing: Any) -> tuple[bytes, list[torch.Tensor]]:
    """An object as a pickle around its tensors; RecordingError if it cannot be."""
    try:
        return dump_around_tensors(thing)
    except FAILURES as error:
        raise RecordingError(
            f"a {type(thing).__name__} is handed on at {user_line()} that cannot be copied ({error}): every stage and micro "
            "batch needs one of its own. Hand on tensors, numbers, containers of them, or objects that can be pickled"
        ) from error


def put_back(thing: Any, data: bytes, tensors: Sequence[torch.Tensor]) -> None:
    """Give an object the state it had when it was dumped."""
    if hasattr(thing, "__dict__"):
        state = vars(load_around_tensors(data, tensors))
        vars(thing).clear()
        vars(thing).update(state)


def is_cache(thing: Any) -> bool:
    """Whether it is one of Hugging Face's key-value caches: nobody wants to have those brought together after a call."""
    return any(base.__name__ == "Cache" for base in type(thing).__mro__)


def without_caches(result: Any, given: Sequence[Any]) -> Any:
    """What a module returned, with stand-ins for the caches that it has made itself: their contents stay with it."""
    leaves, fill = skeleton(result)
    kept = [
        StaysOnStages(type(leaf).__name__) if is_cache(leaf) and not any(leaf is each for each in given) else leaf
        for leaf in leaves
    ]
    return fill(kept) if any(isinstance(each, StaysOnStages) for each in kept) else result
