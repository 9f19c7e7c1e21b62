"""What a forward reads of the numbers in its inputs between its modules: `if labels.max() >= self.classes: raise`, `if mask.all():`.

Every rank has the inputs, so the question is put to them at every call, to the whole batch, before anything runs. The answer is a guard
of the recording, as that of a drawn number is (`draws`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from epl import _torch
from epl.graph.record import steps

ANSWERS = frozenset(
    {"item", "__bool__", "__int__", "__float__", "__index__", "__contains__", "is_nonzero", "equal", "allclose"}
)
"""Reads that give one number or truth value: their answers can be compared from call to call."""


class Peek:
    """One question, as a program over the inputs."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, nodes: Sequence[fx.Node]) -> None:
        """`args`, `kwargs`: with nodes in the place of tensors; `nodes`: all that they follow from, in order."""
        self._function, self._args, self._kwargs, self._nodes = function, args, kwargs, nodes

    @property
    def inputs(self) -> set[int]:
        """The numbers of the inputs that it looks at."""
        return {node.meta["input"] for node in self._nodes if node.op == "placeholder"}

    def __call__(self, tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> Any:
        """The answer for these inputs."""
        env: dict[fx.Node, Any] = {}
        with torch.no_grad():
            for node in self._nodes:
                if node.op == "placeholder":
                    env[node] = tensors[node.meta["input"]].detach()
                    continue
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                assert callable(node.target)
                with node.meta["context"]._replace(grad=False).restored():
                    env[node] = node.target(*args, **kwargs)
            args, kwargs = fx.map_arg((self._args, self._kwargs), env.__getitem__)
            return self._function(*args, **kwargs)


def peek(function: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Peek | None:
    """The question that a function asks of its arguments (nodes in the place of tensors); None if they do not follow from these inputs
    alone, or the inputs have no numbers yet."""
    needed: dict[fx.Node, None] = {}
    roots: list[fx.Node] = []
    fx.map_arg((args, kwargs), roots.append)
    stack = [(root, False) for root in roots]
    while stack:
        node, ready = stack.pop()
        if ready:
            needed[node] = None
        elif node not in needed:
            if not _follows_from_inputs(node, tensors):
                return None
            stack.append((node, True))
            stack.extend((source, False) for source in node.all_input_nodes)
    return Peek(function, args, kwargs, list(needed))


def _follows_from_inputs(node: fx.Node, tensors: Sequence[torch.Tensor]) -> bool:
    if node.op == "placeholder":
        number = node.meta["input"]
        return number < len(tensors) and _has_numbers(tensors[number])
    plain = node.op == "call_function" and not (
        node.meta.get("random") or node.meta.get("effect") or node.meta.get("changes")
    )
    return plain and (steps.is_part(node) or getattr(node.target, "__module__", None) != steps.__name__)


def _has_numbers(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta and not _torch.is_fake(tensor)
