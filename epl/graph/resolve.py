"""Which TaskGraph every module, parameter and buffer of one model belongs to, as a printable list.

A thing belongs to the first of these that exists:

    1. its own tag by a scope or by `annotate`
    2. the tag by a scope or by `annotate` of the nearest module around it
    3. its own tag by a default strategy, then that of the nearest module around it
    4. the first default strategy in force (it was built before there was one)
    5. the model's only TaskGraph, if that is a `replicate`; else it is *uncovered* (beside several it goes to its first consumer, once
       that is known; beside a `split` alone all its devices compute it alike)

So a default strategy takes exactly what would be uncovered without it: weight norm put on a scope's layer later, or the
layers that `nn.TransformerEncoder` copies inside a scope, stay with that scope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from epl.errors import StrategyError
from epl.graph.state import Registry
from epl.graph.tagging import module_tag, tensor_tags
from epl.graph.taskgraph import Tag, TaskGraph
from epl.plan.spec import TaskGraphSpec
from epl.plan.table import compact_names, table

# Containers that only hold their parts: an empty one has nothing to compute.
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Members:
    """One TaskGraph and what of the model belongs to it."""

    taskgraph: TaskGraph
    holds: tuple[str, ...]
    """The topmost modules that belong to it as a whole, and single parameters and buffers of other modules."""
    parameters: tuple[str, ...]
    """Every parameter once, by its first name."""
    buffers: tuple[str, ...]
    numel: int
    """Elements in its parameters; those of lazy ones are not known yet and not counted."""
    lazy: int
    """How many of its parameters are not materialised yet."""


@dataclass(frozen=True)
class SharedParameter:
    """One parameter that is reached by several names: each name and its TaskGraph (None: uncovered)."""

    names: tuple[tuple[str, str | None], ...]

    @property
    def taskgraphs(self) -> frozenset[str]:
        """The TaskGraphs that use it."""
        return frozenset(taskgraph for _, taskgraph in self.names if taskgraph is not None)


@dataclass(frozen=True)
class TaskGraphs:
    """The TaskGraphs of one model in order of creation; iterate over it, or print it."""

    members: tuple[Members, ...]
    uncovered: tuple[str, ...]
    """What belongs to none of several TaskGraphs: topmost modules, single parameters and buffers."""
    shared: tuple[SharedParameter, ...]
    implicit: bool
    """Whether the model has no annotation at all and was given one `replicate(1)`."""
    empty: tuple[TaskGraph, ...]
    """TaskGraphs of scopes that hold nothing; they get no devices."""
    of_module: Mapping[str, TaskGraph]
    of_parameter: Mapping[str, TaskGraph]
    of_buffer: Mapping[str, TaskGraph]

    def __iter__(self) -> Iterator[Members]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> Members:
        return self.members[index]

    def specs(self) -> tuple[TaskGraphSpec, ...]:
        """What the plan needs to know of them."""
        graphs = (m.taskgraph for m in self.members)
        return tuple(TaskGraphSpec(t.name, t.kind, t.device_count) for t in graphs)

    def notices(self) -> tuple[str, ...]:
        """What the user should be told about these annotations, one sentence each."""
        notices = []
        if self.implicit:
            notices.append(
                "the model has no annotation: it is trained data parallel, as under "
                "epl.set_default_strategy(epl.replicate(1))"
            )
        notices += [
            f"the scope {taskgraph.title} holds no module, parameter or buffer of its own: it gets no devices. "
            "Build inside the scope what is to belong to it"
            for taskgraph in self.empty
        ]
        return tuple(notices)

    def __str__(self) -> str:
        rows = [("TaskGraph", "strategy", "holds", "parameters", "shared")]
        for m in self.members:
            name = m.taskgraph.name
            shared = sum(name in s.taskgraphs for s in self.shared)
            count = f"{m.numel:,}" + (f" + {m.lazy} lazy" if m.lazy else "")
            rows.append((name, m.taskgraph.strategy, compact_names(m.holds), count, str(shared) if shared else "-"))
        lines = [table(rows, right=(3, 4))]
        if self.uncovered:
            lines.append(f"uncovered: {compact_names(self.uncovered)}")
        for s in self.shared:
            lines.append("shared: " + " = ".join(f"{name} ({graph or 'uncovered'})" for name, graph in s.names))
        return "\n".join(lines)


def taskgraphs_of(model: nn.Module, registry: Registry) -> TaskGraphs:
    """The TaskGraphs of this model, with everything in it assigned by the rule on top of this file."""
    walk = _Walk(model, registry.fallback)
    graphs = walk.taskgraphs()
    implicit = not graphs
    if implicit:
        graphs = [TaskGraph("model", "replicate", 1, 0, "implicit")]
    if len(graphs) == 1 and graphs[0].kind == "replicate":  # beside a split, it is computed alike on all its devices
        walk.give_uncovered_to(graphs[0])
    _refuse_same_names(graphs)
    hollow = [t for t in walk.hollow_scopes() if t not in registry.unused()]
    return TaskGraphs(
        members=tuple(walk.members(graph) for graph in graphs),
        uncovered=walk.holds(None),
        shared=walk.shared(),
        implicit=implicit,
        empty=(*registry.unused(), *hollow),
        of_module={path: t for path, t in walk.module_owner.items() if t is not None},
        of_parameter={path: t for path, t in walk.parameter_owner.items() if t is not None},
        of_buffer={path: t for path, t in walk.buffer_owner.items() if t is not None},
    )


def _refuse_same_names(graphs: list[TaskGraph]) -> None:
    names = [graph.name for graph in graphs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise StrategyError(
            f"the model holds two different TaskGraphs of the same name ({', '.join(map(repr, twice))}): "
            "its parts were built before and after epl.init(), or loaded from a file. "
            "Build the whole model after epl.init(), or give the scopes different names"
        )


@dataclass(frozen=True)
class _Claim:
    """The best claim on something so far: by an explicit tag, else by a default's."""

    explicit: TaskGraph | None = None
    default: TaskGraph | None = None

    def within(self, tag: Tag | None) -> _Claim:
        """The claim on a thing with this tag, inside a thing with this claim."""
        if tag is None:
            return self
        if tag.explicit:
            return _Claim(tag.taskgraph, self.default)
        return _Claim(self.explicit, tag.taskgraph)

    def owner(self, fallback: TaskGraph | None) -> TaskGraph | None:
        return self.explicit or self.default or fallback


class _Walk:
    """Every path of the model with its owner. A path is a name that leads to something; a shared module has several."""

    def __init__(self, model: nn.Module, fallback: TaskGraph | None) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        claims: dict[str, _Claim] = {}
        best: dict[int, _Claim] = {}
        for path, module in self.modules.items():
            around = _Claim() if path == "" else claims[_parent(path)]
            claim = claims[path] = around.within(module_tag(module))
            # A shared module is one thing: of all its paths the first explicit claim decides, else the first default's.
            known = best.get(id(module), _Claim())
            best[id(module)] = _Claim(known.explicit or claim.explicit, known.default or claim.default)

        self.module_owner: dict[str, TaskGraph | None] = {}
        self.parameter_owner: dict[str, TaskGraph | None] = {}
        self.buffer_owner: dict[str, TaskGraph | None] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for path, module in self.modules.items():
            claim = best[id(module)]
            tags = tensor_tags(module)
            self.module_owner[path] = claim.owner(fallback)
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self.parameters[_join(path, name)] = parameter
                self.parameter_owner[_join(path, name)] = claim.within(tags.get(name)).owner(fallback)
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
                self.buffer_owner[_join(path, name)] = claim.within(tags.get(name)).owner(fallback)

    def substance(self) -> Iterator[tuple[str, str, TaskGraph | None]]:
        """(name, path of its module, owner) of all that computes or stores: tensors and modules without children.

        A module with children and no tensors is glue between its parts; it claims no device.
        """
        children = {_parent(path) for path in self.modules if path}
        for path, module in self.modules.items():
            if path not in children and not isinstance(module, _HOLDERS):
                yield path, path, self.module_owner[path]
        for owners in (self.parameter_owner, self.buffer_owner):
            for name, owner in owners.items():
                yield name, _parent(name), owner

    def taskgraphs(self) -> list[TaskGraph]:
        """The TaskGraphs that own something, in order of creation."""
        return sorted({t for *_, t in self.substance() if t is not None}, key=lambda t: (t.index, t.session))

    def hollow_scopes(self) -> list[TaskGraph]:
        """TaskGraphs of explicit tags that own only glue."""
        tags = (module_tag(module) for module in self.modules.values())
        explicit = {tag.taskgraph for tag in tags if tag is not None and tag.explicit}
        return sorted(explicit.difference(self.taskgraphs()), key=lambda t: t.index)

    def give_uncovered_to(self, taskgraph: TaskGraph) -> None:
        """Let the model's only TaskGraph own whatever has no owner."""
        for owners in (self.module_owner, self.parameter_owner, self.buffer_owner):
            for path, owner in owners.items():
                if owner is None:
                    owners[path] = taskgraph

    def holds(self, taskgraph: TaskGraph | None) -> tuple[str, ...]:
        """The topmost names that belong to it as a whole."""
        within: dict[str, set[TaskGraph | None]] = {path: set() for path in self.modules}
        for _, path, owner in self.substance():
            for around in (path, *_parents(path)):
                within[around].add(owner)
        names: dict[str, None] = {}
        for name, path, owner in self.substance():
            if owner == taskgraph:
                whole = [p for p in (path, *_parents(path)) if within[p] == {taskgraph}]
                names[whole[-1] if whole else name] = None
        order = {path: position for position, path in enumerate(self.modules)}
        return tuple(sorted(names, key=lambda name: order.get(name, order[_parent(name)] if name else 0)))

    def members(self, taskgraph: TaskGraph) -> Members:
        """The TaskGraph with all that belongs to it."""
        own: dict[int, str] = {}
        for name, owner in self.parameter_owner.items():
            if owner == taskgraph:
                own.setdefault(id(self.parameters[name]), name)
        lazy = [name for name in own.values() if is_lazy(self.parameters[name])]
        return Members(
            taskgraph=taskgraph,
            holds=self.holds(taskgraph),
            parameters=tuple(own.values()),
            buffers=tuple(name for name, owner in self.buffer_owner.items() if owner == taskgraph),
            numel=sum(self.parameters[name].numel() for name in own.values() if name not in lazy),
            lazy=len(lazy),
        )

    def shared(self) -> tuple[SharedParameter, ...]:
        """Parameters with several names."""
        groups: dict[int, list[str]] = {}
        for name, parameter in self.parameters.items():
            groups.setdefault(id(parameter), []).append(name)
        owner = {name: t.name if t is not None else None for name, t in self.parameter_owner.items()}
        return tuple(
            SharedParameter(tuple((name, owner[name]) for name in names)) for names in groups.values() if len(names) > 1
        )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _parents(path: str) -> Iterator[str]:
    while path:
        path = _parent(path)
        yield path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
