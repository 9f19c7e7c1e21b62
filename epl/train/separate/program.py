"""A recorded expression as plain data: the operations between the outputs of model calls and a loss, without any tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from epl.graph.context import Context
from epl.graph.spec import Spec, leaves_of
from epl.plan.batch import RowDim


@dataclass(frozen=True, slots=True)
class Ref:
    """In the arguments of an entry: the value of an earlier one."""

    index: int


@dataclass(frozen=True, slots=True)
class Given:
    """In the arguments of an entry: a tensor that is there already; the same index is the same tensor."""

    index: int


VALUES = (Ref, Given)


@dataclass(frozen=True, slots=True)
class Output:
    """In the place of a function: a frontier value of a model call."""

    call: int
    kind: RowDim | Literal["coupled", "constant"]
    sizes: tuple[int, ...]


class Entry(NamedTuple):
    """One operation; `spec` is a Spec, or a tree of them for several results."""

    func: Callable[..., Any] | Output
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context
    spec: Any

    @property
    def name(self) -> str:
        """The operation, as people write it."""
        return (
            "an output of the model"
            if isinstance(self.func, Output)
            else str(getattr(self.func, "__name__", self.func))
        )

    @property
    def op(self) -> Callable[..., Any]:
        """The function, of an entry that is not an output of the model."""
        assert not isinstance(self.func, Output)
        return self.func

    @property
    def refs(self) -> list[Ref]:
        """What it is made from, given tensors aside."""
        return leaves_of((self.args, self.kwargs), Ref)

    @property
    def first(self) -> Spec:
        """Its spec, or that of its first result."""
        spec: Spec = self.spec if isinstance(self.spec, Spec) else leaves_of(self.spec, Spec)[0]
        return spec


class Program(NamedTuple):
    """Entries, each after what it is made from; the last one is the loss."""

    entries: tuple[Entry, ...]
    givens: tuple[Spec, ...]

    @property
    def slots(self) -> int:
        """The number of micro batches."""
        return max((len(e.func.sizes) for e in self.entries if isinstance(e.func, Output)), default=1)

    def key(self) -> Hashable | None:
        """Equal for programs that run the same code on the same shapes; None if an argument cannot be compared."""
        found = tuple((e.func, freeze(e.args), freeze(e.kwargs), e.context, freeze(e.spec)) for e in self.entries)
        key = (found, tuple((s.shape, s.dtype, s.device) for s in self.givens))
        try:
            hash(key)
        except TypeError:
            return None
        return key


def freeze(tree: Any) -> Hashable:
    """Nested arguments as something hashable, in which 1, 1.0 and True differ."""
    kind = type(tree)
    if isinstance(tree, (*VALUES, Spec)):
        return tree
    if isinstance(tree, torch.Size):
        return (kind, *tree)
    if isinstance(tree, (list, tuple)):
        return (kind, *map(freeze, tree))
    if kind is dict:
        return (kind, *((k, freeze(v)) for k, v in tree.items()))
    if kind is slice:
        return (kind, freeze(tree.start), freeze(tree.stop), freeze(tree.step))
    return (kind, tree)
