"""What planning needs to know of a recorded forward: its nodes as plain data, and which of their values share memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NodeKind = Literal["leaf", "glue", "input", "parameter", "constant"]
"""leaf: a module called as a whole. glue: a torch call between leaves, or an object made afresh. input: a tensor of the
model call; every rank of a replica has it. parameter: one that glue uses. constant: a buffer or tensor that glue uses."""


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """One step of a recorded forward."""

    index: int
    """Its place in the order of execution."""
    kind: NodeKind
    name: str
    """Module path, function, parameter or input: what messages call it."""
    taskgraph: str | None = None
    inputs: tuple[int, ...] = ()
    effect_on: int | None = None
    """The node whose value it changes in place."""
    views: tuple[int, ...] = ()
    """Those of its inputs whose memory its value shares."""
    random: bool = False
    """Whether it draws random numbers."""
    parameters: tuple[str, ...] = ()
    """What it uses; a parameter shared by several modules always by the same name."""
    buffers: tuple[str, ...] = ()
    where: str = ""
    """The user's line that wrote it, `file:line`."""

    @property
    def is_everywhere(self) -> bool:
        """Whether it is there on every rank without being computed: an input, a constant."""
        return self.kind in ("input", "constant")

    @property
    def title(self) -> str:
        """How messages speak of it: `'decoder.norm' (train.py:12)`."""
        return f"{self.name!r} ({self.where})" if self.where else repr(self.name)


class Memory:
    """Groups of values that share memory, and the nodes that change such a group in place, in order."""

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self._root: dict[int, int] = {node.index: node.index for node in nodes}
        for node in nodes:
            shared = node.views if node.effect_on is None else (*node.views, node.effect_on)
            for other in shared:
                self._root[self.group(other)] = self.group(node.index)
        self._effects: dict[int, list[int]] = {}
        for node in nodes:
            if node.effect_on is not None:
                self._effects.setdefault(self.group(node.index), []).append(node.index)
        self._members: dict[int, list[int]] = {group: [] for group in self._effects}
        for node in nodes:
            group = self.group(node.index)
            if group in self._members:
                self._members[group].append(node.index)

    def group(self, index: int) -> int:
        """A number that the values sharing memory with this one have in common."""
        while self._root[index] != index:
            self._root[index] = index = self._root[self._root[index]]
        return index

    def effects(self, index: int) -> Sequence[int]:
        """The nodes that change this value."""
        return self._effects.get(self.group(index), ())

    def changed_groups(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """(values, effects) of every group that something changes."""
        return ((self._members[group], effects) for group, effects in self._effects.items())

    def needs(self, node: GraphNode) -> tuple[int, ...]:
        """What must have happened before this node: its inputs, and the changes made to them earlier in the program."""
        changes = (e for i in node.inputs for e in self.effects(i) if e < node.index)
        return tuple(dict.fromkeys((*node.inputs, *changes)))


def users(needs: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """For every node those that need it, in order."""
    found: dict[int, list[int]] = {index: [] for index in needs}
    for index, needed in needs.items():
        for each in needed:
            found[each].append(index)
    return found
