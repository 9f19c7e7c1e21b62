"""Which arguments of a model carry the batch, as far as earlier calls have shown.

One call alone cannot tell a memory bank of 7 rows from a batch of 7. But calls of one model are alike: what was as long as the
batch at several sizes of it is a batch; what once had another length is none, also when a smaller last batch happens to have
as many rows. All ranks see the same calls, and so decide alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from epl.graph.record.inputs import Inputs
from epl.graph.record.objects import dump
from epl.graph.record.tree import children_of, is_plain

Position = Hashable
"""Of a tensor among the arguments: the name of the parameter, the way inside it, and the kind of the tensor."""


@dataclass
class _Evidence:
    cut: set[int] = field(default_factory=set)
    """The sizes of the batch at which it was cut."""
    other_length: bool = False
    """Whether it was not as long as the batch."""

    @property
    def carries_batch(self) -> bool | None:
        if self.other_length:
            return False if len(self.cut) < 2 else None
        return True if len(self.cut) > 1 else None


class Roles:
    """What the calls of one model have shown."""

    def __init__(self, model: nn.Module) -> None:
        self._names = _parameters(model)
        self._seen: dict[Position, _Evidence] = {}

    def positions(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Inputs) -> list[Position]:
        """Where a call's tensors are among its arguments, in the order of the inputs."""
        named = {self._names[i] if i < len(self._names) else i: each for i, each in enumerate(args)} | kwargs
        ways: dict[int, Hashable] = {}
        for name, value in named.items():
            for way, leaf in _leaves(value, (name,)):
                inside = [leaf] if isinstance(leaf, torch.Tensor) else dump(leaf)[1]
                for number, tensor in enumerate(inside):
                    ways.setdefault(id(tensor), (way, number))
        return [(way, spec.dtype, len(spec.shape)) for way, spec in zip(ways.values(), inputs.specs, strict=True)]

    def known(self, positions: Sequence[Position]) -> tuple[bool | None, ...]:
        """Whether they carry the batch; None where that is not known."""
        return tuple(self._seen[each].carries_batch if each in self._seen else None for each in positions)

    def note(self, positions: Sequence[Position], inputs: Inputs, is_cut: Sequence[bool]) -> bool:
        """What a call shows; returns whether something that was cut before turns out not to carry the batch."""
        rows = inputs.rows
        found = False
        for position, spec, cut, marked in zip(positions, inputs.specs, is_cut, inputs.unbatched, strict=True):
            # A single row is as good as any number of them (it is broadcast), and says nothing.
            if rows is None or marked or not spec.shape or spec.shape[0] == 1:
                continue
            evidence = self._seen.setdefault(position, _Evidence())
            before = evidence.carries_batch
            if cut:
                evidence.cut.add(rows)
            elif spec.shape[0] != rows:
                evidence.other_length = True
            found |= bool(evidence.cut) and evidence.carries_batch is False and before is not False
        return found


def _parameters(model: nn.Module) -> tuple[str, ...]:
    """The names under which arguments without a name could be given as well."""
    try:
        parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in named)


def _leaves(tree: Any, way: tuple[Hashable, ...]) -> Iterator[tuple[tuple[Hashable, ...], Any]]:
    inner = None if isinstance(tree, torch.Tensor) else children_of(tree)
    if inner is not None:
        names = list(tree) if isinstance(tree, dict) else range(len(inner[0]))
        for name, child in zip(names, inner[0], strict=True):
            yield from _leaves(child, (*way, name))
    elif isinstance(tree, torch.Tensor) or not is_plain(tree):
        yield way, tree
