"""The stage of every node of a recorded forward, by the rules that `epl.plan.stages` states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from epl.plan.memory import Memory
from epl.plan.nodes import GraphNode
from epl.plan.ordering import after_what_feeds_them


class Assignment:
    """Which nodes every rank can compute for itself, the order of the stages, and the one stage of every other node."""

    def __init__(
        self,
        nodes: Sequence[GraphNode],
        owners: Mapping[str, str | None],
        order: Sequence[str] | None,
        held: Mapping[str, Sequence[int]],
        home: frozenset[int],
        ran: Mapping[str, int],
    ) -> None:
        """`owners`: the TaskGraph of every parameter. `home`: what the last stage wants. `order`, `held` (where parameters
        and buffers are) and `ran` (where modules ran) are known when the model has been placed already."""
        self.nodes = {node.index: node for node in nodes}
        self.owners, self.home, self._held, self._ran = owners, home, held, ran
        executed = {node.taskgraph for node in nodes if node.kind == "leaf"}
        self._bare = {owner for owner in owners.values() if owner is not None} - executed
        """TaskGraphs of bare parameters, without a module: the glue that computes with them is what they execute."""
        self.memory = Memory(nodes)
        self.needs: dict[int, tuple[int, ...]] = {}
        self._users: dict[int, list[int]] = {node.index: [] for node in nodes}
        self._note_needs()
        self.free = self._free()
        self.order = tuple(order) if order is not None else self._order()
        self.stage_of_taskgraph = {name: stage for stage, name in enumerate(self.order)}
        self.last = len(self.order) - 1
        self.stage = self._assign() if self.order else {}
        self.stages = self._spread()

    def uses(self) -> Iterator[tuple[int, int, int | None]]:
        """(value, the stage that uses it, the node that uses it or None for what the last stage wants)."""
        for index, stages in self.stages.items():
            for stage in stages:
                for value in self.nodes[index].inputs:
                    yield value, stage, index
        for value in sorted(self.home):
            yield value, self.last, None

    def _note_needs(self) -> None:
        """What comes before every node; of something packed, also what is in it."""
        for index, node in self.nodes.items():
            needed = dict.fromkeys(self.memory.needs(node))
            for each in list(needed):
                if self.nodes[each].kind == "packing":
                    needed.update(dict.fromkeys(self.needs[each]))
            self.needs[index] = tuple(needed)
            for each in needed:
                self._users[each].append(index)

    def _free(self) -> frozenset[int]:
        """What every rank can compute for itself: it follows from inputs and constants alone, without chance."""
        bound: set[int] = set()  # changed in place by something that is not free: there must be one of it
        while True:
            free: set[int] = set()
            for node in self.nodes.values():
                if node.is_everywhere or (
                    node.kind in ("glue", "packing")
                    and node.taskgraph is None
                    and not node.random
                    and node.index not in bound
                    and not self._used_parameters(node)
                    and all(each in free for each in self.needs[node.index])
                ):
                    free.add(node.index)
            more = {
                index
                for values, effects in self.memory.changed_groups()
                if not free.issuperset(effects)
                for index in values
            }
            if more <= bound:
                return frozenset(free)
            bound |= more

    def _order(self) -> tuple[str, ...]:
        """The TaskGraphs, each after those that feed it, else by first execution; glue of a TaskGraph's bare parameters and
        inputs executes it too."""
        names: dict[str, None] = {}
        for node in self.nodes.values():
            if node.kind in ("leaf", "glue"):
                names.update(dict.fromkeys(self._owners(node)))
        return after_what_feeds_them(tuple(names), self._feeds())

    def _feeds(self) -> dict[str, set[str]]:
        """For every TaskGraph those whose values it uses, also through what belongs to none: with its users' stages in order,
        that can be on a stage between."""
        feeds: dict[str, set[str]] = {}
        sources: dict[int, set[str]] = {}
        for index, node in self.nodes.items():
            sources[index] = set().union(*(sources[each] for each in self.needs[index]))
            own = self._owners(node) if self._is_staged(index) else []
            if own:
                for name in own:
                    feeds.setdefault(name, set()).update(sources[index] - {name})
                sources[index] = set(own)
        return feeds

    def _owners(self, node: GraphNode) -> list[str]:
        """Its own TaskGraph or, of glue without another producer or with parameters of a TaskGraph without modules, its parameters'."""
        return [node.taskgraph] if node.taskgraph is not None else self._owners_of_root(node)

    def _owners_of_root(self, node: GraphNode) -> list[str]:
        """The TaskGraphs of the parameters that decide where this glue runs: if it has another producer, those without modules."""
        if node.kind != "glue":
            return []
        fed = any(self._is_staged(each) for each in self.needs[node.index])
        owners = (self.owners.get(name) for name in self._used_parameters(node))
        return [owner for owner in owners if owner is not None and (not fed or owner in self._bare)]

    def _is_staged(self, index: int) -> bool:
        """Whether exactly one stage computes this node."""
        return index not in self.free and self.nodes[index].kind in ("leaf", "glue")

    def _used_parameters(self, node: GraphNode) -> tuple[str, ...]:
        direct = (self.nodes[i].name for i in node.inputs if self.nodes[i].kind == "parameter")
        return (*node.parameters, *direct)

    def _assign(self) -> dict[int, int]:
        wanted = self._wanted()
        stage: dict[int, int] = {}
        for index, node in self.nodes.items():
            if not self._is_staged(index):
                continue
            producers = [stage[each] for each in self.needs[index] if each in stage]
            fixed = self._fixed(node)
            if fixed is not None:
                stage[index] = fixed if node.taskgraph is not None else max([fixed, *producers])
            elif node.kind == "glue" and producers:
                stage[index] = max(producers)
            else:
                consumer = wanted.get(index, max(producers, default=self.last))
                stage[index] = self._where_held(node, max([consumer, *producers]), max(producers, default=0))
        return stage

    def _fixed(self, node: GraphNode) -> int | None:
        """The stage by its own TaskGraph or by that of its parameters, where these decide."""
        return max((self.stage_of_taskgraph.get(owner, self.last) for owner in self._owners(node)), default=None)

    def _wanted(self) -> dict[int, int]:
        """For nodes without a TaskGraph the first stage that uses them, seen through glue that has no other reason to be
        anywhere."""
        reason: dict[int, int] = {}  # of glue: its latest producer, apart from what is itself placed by its consumers
        for index, node in self.nodes.items():
            if self._is_staged(index):
                fixed = self._fixed(node)
                if fixed is None and node.kind == "glue":
                    fixed = max((reason[each] for each in self.needs[index] if each in reason), default=None)
                if fixed is not None:
                    reason[index] = fixed
        wanted = dict(reason)
        for index in reversed(self.nodes):
            if index not in wanted and self._is_staged(index):
                consumers = [wanted[each] for each in self._users[index] if each in wanted]
                if self.nodes[index].kind == "leaf" and self.nodes[index].name in self._ran:
                    consumers = [self._ran[self.nodes[index].name]]  # its consumer may be one that this call leaves out
                if consumers:
                    producers = [reason[each] for each in self.needs[index] if each in reason]
                    wanted[index] = max([min(consumers), *producers])
        return wanted

    def _where_held(self, node: GraphNode, stage: int, at_least: int) -> int:
        """The stage, moved to one that holds what the node uses, if the model has been placed already."""
        names = (*self._used_parameters(node), *node.buffers)
        held = [set(self._held[name]) for name in names if name in self._held]
        common = sorted(set.intersection(*held)) if held else []
        if not common or stage in common:
            return stage
        return next((each for each in common if each >= at_least), common[-1])

    def _spread(self) -> dict[int, tuple[int, ...]]:
        """For every node its stage, or all the stages that need it."""
        spread: dict[int, set[int]] = {i: {self.stage[i]} if i in self.stage else set() for i in self.nodes}
        for index in self.home - self.stage.keys():
            spread[index].add(self.last)
        changed = [group for group in self.memory.changed_groups() if self.free.issuperset(group[1])]
        lasting = {
            e for values, effects in changed if any(self.nodes[v].is_everywhere for v in values) for e in effects
        }
        for index in lasting | {
            i for i in self.free if self.nodes[i].kept
        }:  # each rank has an input or buffer to change
            spread[index].update(range(len(self.order)))
        size = -1
        while size != (size := sum(map(len, spread.values()))):
            for index in reversed(self.nodes):
                for needed in self.needs[index]:
                    if needed not in self.stage:  # also what is packed beside its consumer
                        spread[needed] |= spread[index]
            for values, effects in changed:  # who reads one of the values must see every change
                readers = set().union(*(spread[value] for value in values))
                for effect in effects:
                    spread[effect] |= readers
        return {index: tuple(sorted(stages)) for index, stages in spread.items()}
