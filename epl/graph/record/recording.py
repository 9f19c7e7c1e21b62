"""A forward written down at one size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from epl.cluster.pickling import load_around_tensors
from epl.graph.context import Context
from epl.graph.record import steps
from epl.graph.record.fakes import Held
from epl.graph.record.program import Env, Program
from epl.graph.record.standin import StaysOnStages
from epl.graph.record.tree import Rebuild


@dataclass(frozen=True)
class ObjectOf:
    """An object among the outputs, to be rebuilt around these nodes' values."""

    pristine: steps.Pristine
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Outputs:
    """A result in the user's structure, with nodes in the place of tensors."""

    leaves: tuple[fx.Node | ObjectOf | StaysOnStages, ...]
    fill: Rebuild = field(repr=False)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes whose values it is made of, each once."""
        found: list[fx.Node] = []
        for leaf in self.leaves:
            found += [leaf] if isinstance(leaf, fx.Node) else leaf.nodes if isinstance(leaf, ObjectOf) else []
        return tuple(dict.fromkeys(found))

    def rebuild(self, env: Env) -> Any:
        """The result, with the values from env."""
        return self.fill([_value(leaf, env) for leaf in self.leaves])


def _value(leaf: fx.Node | ObjectOf | StaysOnStages, env: Env) -> Any:
    if isinstance(leaf, fx.Node):
        return env[leaf]
    if isinstance(leaf, ObjectOf):
        return load_around_tensors(leaf.pristine.data, [env[node] for node in leaf.nodes])
    return leaf


@dataclass(frozen=True)
class Attribute:
    """What a call leaves in an attribute of a module whose forward is glue; for the caller to set after the call."""

    module: nn.Module
    name: str
    value: Outputs


@dataclass(eq=False)
class Recording:
    """The nodes of one forward, in the order in which they were written; carry out any of them with `replay`."""

    graph: fx.Graph
    placeholders: tuple[fx.Node, ...]
    """One per input tensor, in the order of the inputs; a tensor that is given twice has one."""
    outputs: Outputs
    attributes: tuple[Attribute, ...]
    hooks: tuple[tuple[Any, Any, Any], ...]
    """What the forward has put on modules: (where, what was there before, what is there afterwards)."""
    draws: tuple[fx.Node, ...]
    """The nodes that stand for random numbers drawn for the call."""
    modules: dict[str, nn.Module] = field(repr=False)
    held: dict[fx.Node, Held] = field(repr=False)
    """Of get_attr nodes: the module and the name under which it holds the tensor."""
    context: Context = field(repr=False)
    """What was in force when the model was called, and has to be when nodes are replayed."""
    nodes: tuple[fx.Node, ...] = field(init=False, repr=False)
    """All but the last, which stands for the outputs."""
    _programs: dict[tuple[fx.Node, ...], Program] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = tuple(node for node in self.graph.nodes if node.op != "output")

    def program(self, nodes: Sequence[fx.Node], keep: Iterable[fx.Node] = ()) -> Program:
        """These nodes as a function of env; it leaves there what other nodes or the outputs need, and what is in `keep`."""
        here = set(nodes)
        kept = {node for node in nodes if any(user not in here for user in node.users)} | (here & set(keep))
        return Program(nodes, kept, self.modules, self.held, self.context)

    def replay(self, nodes: Sequence[fx.Node], env: Env) -> None:
        """Carry these nodes out. `env` holds what they need from others, and afterwards what others need of them."""
        key = tuple(nodes)
        if key not in self._programs:
            self._programs[key] = self.program(key)
        self._programs[key](env)

    def rebuild_outputs(self, env: Env) -> Any:
        """What the model returns, in the user's structure, from the values of `outputs.nodes`."""
        return self.outputs.rebuild(env)

    def feed(self, tensors: Sequence[torch.Tensor], draws: Sequence[torch.Tensor] = ()) -> Env:
        """An env with the input tensors and the random numbers of a call in their places."""
        return dict(zip((*self.placeholders, *self.draws), (*tensors, *draws), strict=True))
