"""Our own functions among the nodes of a recording; everything else is torch's or the user's.

part             the i-th tensor of a structured result            beside its producer
part_of_object   the i-th tensor inside an object of a result      beside its producer
changed          a value after another node has changed it         beside its producer
rebuild          a container, with these parts                     beside its consumer
rebuild_object   an object, with these tensors                     beside its consumer
make_afresh      an object as it was before any module saw it      beside its consumer: once per micro batch and stage
drawn            a number drawn at random for this call            fed: the same for all micro batches and ranks
assign           sets a buffer to a value                          beside its producer
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from epl.cluster.pickling import load_around_tensors
from epl.graph.record.tree import Rebuild, objects_of, tensors_inside, tensors_of


class Pristine:
    """An object as it was when a forward first handed it to a module, to be made again from its pickle."""

    def __init__(self, title: str, data: bytes) -> None:
        self.title, self.data = title, data

    def __repr__(self) -> str:
        return self.title


class Template:
    """A container without its parts."""

    def __init__(self, title: str, rebuild: Rebuild) -> None:
        self.title, self.rebuild = title, rebuild

    def __repr__(self) -> str:
        return self.title


def part(value: Any, index: int) -> torch.Tensor:
    return tensors_of(value)[index]


def part_of_object(value: Any, number: int, index: int) -> torch.Tensor:
    return tensors_inside(objects_of(value)[number])[index]


def changed(value: Any, by: object) -> Any:
    return value


def rebuild(template: Template, parts: list[Any]) -> Any:
    return template.rebuild(list(parts))


def rebuild_object(pristine: Pristine, tensors: list[torch.Tensor]) -> Any:
    return load_around_tensors(pristine.data, tensors)


def make_afresh(pristine: Pristine) -> Any:
    return load_around_tensors(pristine.data, ())


def drawn(index: int) -> torch.Tensor:
    raise AssertionError(f"draw {index} is fed to a replay, see RecordedCall.draws")


def assign(module: nn.Module, name: str, value: torch.Tensor) -> None:
    setattr(module, name, value)


_BESIDE_CONSUMER = frozenset({rebuild, rebuild_object, make_afresh, drawn})


def is_part(node: fx.Node) -> bool:
    """Whether it only takes a tensor out of a structured result: it belongs on the stage that makes the result."""
    return node.op == "call_function" and node.target in (part, part_of_object)


def is_packing(node: fx.Node) -> bool:
    """Whether it only packs values for one consumer, or makes something that every stage makes for itself."""
    return node.op == "call_function" and node.target in _BESIDE_CONSUMER


def is_drawn(node: fx.Node) -> bool:
    """Whether it stands for a number that is drawn anew for every call."""
    return node.op == "call_function" and node.target is drawn
