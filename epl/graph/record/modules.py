"""Which modules of a model are recorded as a whole, and which are looked into."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy

from epl import _torch
from epl.errors import RecordingError
from epl.graph.record.key import model_key
from epl.graph.record.reads import Frozen, Reads


class Mixed(enum.Enum):
    """What is said of a module whose parts belong to several TaskGraphs."""

    MIXED = "several TaskGraphs"


MIXED: Literal[Mixed.MIXED] = Mixed.MIXED
TaskGraphOf = Callable[[nn.Module], str | Mixed | None]


class Modules:
    """The leaves of a model and the modules around them.

    A module is a leaf if it is not the model itself and everything in it belongs to one TaskGraph or to none. Torch's loss
    modules never are: what comes after the last leaf is to be seen.
    """

    def __init__(self, model: nn.Module, taskgraph_of: TaskGraphOf) -> None:
        self.model = model
        self.paths: dict[nn.Module, str | None] = {}
        """The leaves, with their names."""
        self.glue: set[nn.Module] = set()
        """The modules that are looked into."""
        self._taskgraph_of = taskgraph_of
        self._owners: dict[nn.Module, str | None] = {}
        self._opened: set[nn.Module] = set()
        self.reads = Reads()
        """What the code of the glue reads beside its modules' own attributes."""
        self._key: Frozen | None = None

    def taskgraph_of(self, leaf: nn.Module) -> str | None:
        """The TaskGraph of a leaf."""
        return self._owners.get(leaf)

    def look_into(self, *modules: nn.Module) -> None:
        """From now on these modules are no leaves."""
        self._opened.update(modules)
        self._find()

    def leave_whole(self, *modules: nn.Module) -> None:
        """Undo `look_into`."""
        self._opened.difference_update(modules)
        self._find()

    def key(self) -> tuple[Hashable, bool]:
        """What decides what the forward does with given inputs, and whether it is another one than last time."""
        if not self.paths and not self.glue:
            _refuse_lazy(self.model)
        if self._key is not None and model_key(self.model, self.glue, self.reads) == self._key.values:
            return self._key, False
        self._find()
        self._key = Frozen(model_key(self.model, self.glue, self.reads))
        return self._key, True

    def _find(self) -> None:
        self.paths, self._owners, self.glue = {}, {}, set()
        for path, module in self.model.named_modules():
            owner = MIXED if module is self.model or module in self._opened else self._taskgraph_of(module)
            if not isinstance(owner, Mixed) and not _torch.is_loss(module):
                self.paths[module], self._owners[module] = path, owner
        stack = [self.model]
        while stack:
            module = stack.pop()
            if module not in self.glue and module not in self.paths:
                self.glue.add(module)
                stack.extend(child for child in module._modules.values() if child is not None)
        self.reads = Reads(self.glue, self.paths)


def _refuse_lazy(model: nn.Module) -> None:
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise RecordingError(
            f"the parameter {lazy[0]} has no shape yet (a lazy module): call the model once on example inputs before "
            "epl.parallelize()"
        )
