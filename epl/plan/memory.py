"""Values of a recorded forward that share memory, and what changing them in place means when the forward is cut.

A stage gets a value as it is when the stage that makes it is done, and changes its own copy; values that share memory no
longer do so where they have been received. Whether every node still sees what the program sees is found out by running
both, with numbers that stand for contents:

    h = a(x)        s0          in s0: h = 1, sent as it is        a change of h in s1 is seen in s1 ...
    h += 1          s1          in s1: h = 1, then 2
    c(h)            s1          sees 2, as in the program          ... and in whatever gets it from there
    d(h)            s0          sees 1, the program 2              but not here: refused
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from epl.plan.nodes import GraphNode


class Memory:
    """Groups of values that share memory, and the nodes that change such a group in place, in order."""

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self._root: dict[int, int] = {node.index: node.index for node in nodes}
        for node in nodes:
            for other in _shares(node):
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


@dataclass(frozen=True)
class Sight:
    """A value as somebody in a stage sees it, other than the program has it there."""

    value: int
    stage: int
    user: int | None
    """The node that uses it; None if it is what remains after the forward."""


def false_sights(
    nodes: Mapping[int, GraphNode], memory: Memory, stages: Mapping[int, Sequence[int]], home: Iterable[int], last: int
) -> list[Sight]:
    """Where the cut forward would not see what the whole one sees; `stages` compute the nodes, `home` is wanted by the last."""
    contents: dict[object, int] = {}
    whole = _Run(nodes, memory, contents)
    for index in nodes:
        whole.carry_out(index)
    wrong: list[Sight] = []
    runs: dict[int, _Run] = {}
    count = 1 + max((stage for each in stages.values() for stage in each), default=last)
    for stage in range(max(count, last + 1)):
        run = runs[stage] = _Run(nodes, memory, contents)
        for index in (i for i, found in stages.items() if stage in found):
            for value in nodes[index].inputs:
                run.receive(value, stages[value], runs)
            run.carry_out(index)
            pairs = zip(nodes[index].inputs, run.seen[index], whole.seen[index], strict=True)
            wrong += [Sight(value, stage, index) for value, here, there in pairs if here != there]
            if nodes[index].kind in ("constant", "parameter") and memory.effects(index):
                run.lasting.append(index)
    for index in home:
        runs[last].receive(index, stages[index], runs)
    for stage, run in runs.items():
        remaining = [*run.lasting, *(home if stage == last else ())]
        wrong += [Sight(index, stage, None) for index in remaining if run.content(index) != whole.content(index)]
    return wrong


class _Run:
    """One way of running the nodes: the content of every value, as a number that is equal for equal contents."""

    def __init__(self, nodes: Mapping[int, GraphNode], memory: Memory, contents: dict[object, int]) -> None:
        self._nodes, self._memory, self._contents = nodes, memory, contents
        self._cells: dict[int, list[int]] = {}
        self.seen: dict[int, tuple[int, ...]] = {}
        self.lasting: list[int] = []

    def content(self, index: int) -> int:
        return self._cells[index][0]

    def receive(self, value: int, made: Sequence[int], runs: Mapping[int, _Run]) -> None:
        if value not in self._cells and made and made[0] in runs and runs[made[0]] is not self:
            self._cells[value] = [runs[made[0]].content(value)]

    def carry_out(self, index: int) -> None:
        node = self._nodes[index]
        seen = self.seen[index] = tuple(self._cells[i][0] if i in self._cells else -1 for i in node.inputs)
        shared = [self._cells[i] for i in _shares(node) if i in self._cells]
        if node.effect_on is not None:
            cell = self._cells.setdefault(node.effect_on, [-1])
            cell[0] = self._number((index, seen))
        elif shared and all(cell is shared[0] for cell in shared):
            cell = shared[0]
        else:
            cell = [self._number((index, seen))]
        self._cells[index] = cell

    def _number(self, content: object) -> int:
        return self._contents.setdefault(content, len(self._contents))


def _shares(node: GraphNode) -> tuple[int, ...]:
    """The earlier values whose memory the value of this node shares."""
    return node.views if node.effect_on is None else (*node.views, node.effect_on)
