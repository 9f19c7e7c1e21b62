"""How a part of the model is to be parallel: `replicate` and `split`, as a scope, as the default, or on built modules.

with epl.replicate(device_count=1, name="stage_0"):   # around construction: what is built inside
    self.encoder = Encoder()
epl.set_default_strategy(epl.replicate(1))            # what no scope covers, built from here on
epl.annotate(epl.split(2), model.lm_head)             # what was built elsewhere
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType

import torch
from torch import nn

from epl.errors import StrategyError, UsageError, list_problems
from epl.graph import frames
from epl.graph.resolve import TaskGraphs, taskgraphs_of
from epl.graph.state import registry
from epl.graph.tagging import module_tag, tag_module, tensor_tags
from epl.graph.taskgraph import Annotation, Kind, Tag, TaskGraph


class Strategy:
    """A strategy for one part of a model, made by `epl.replicate` or `epl.split`; a scope, any number of times.

    Each time it is entered it makes a TaskGraph of what is built inside, except when its name is that of an earlier
    TaskGraph of the same strategy: then it continues that one.
    """

    def __init__(self, annotation: Annotation) -> None:
        self.annotation = annotation

    @property
    def kind(self) -> Kind:
        """`"replicate"` or `"split"`."""
        return self.annotation.kind

    @property
    def device_count(self) -> int:
        """How many devices one model replica gives to this part."""
        return self.annotation.device_count

    @property
    def name(self) -> str | None:
        """The name of its TaskGraph, or None for a name by order."""
        return self.annotation.name

    def __enter__(self) -> Strategy:
        registry.enter(self.annotation)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        registry.leave()

    def __repr__(self) -> str:
        name = "" if self.name is None else f", name={self.name!r}"
        return f"epl.{self.kind}(device_count={self.device_count}{name})"


def replicate(device_count: int | None = None, name: str | None = None) -> Strategy:
    """A strategy under which every device holds the whole part and computes its share of the rows.

    `device_count` is the number of devices of one model replica (None: 1); further devices make further replicas.
    """
    return Strategy(_annotation("replicate", device_count, name))


def split(device_count: int | None = None, name: str | None = None) -> Strategy:
    """A strategy under which the parameters of the part are cut over its devices.

    `device_count` is the number of devices of one model replica (None: 1); further devices make further replicas.
    """
    return Strategy(_annotation("split", device_count, name))


def set_default_strategy(strategy: Strategy | None) -> None:
    """From here on, what is built outside any scope belongs to a new TaskGraph of this strategy; None ends that.

    The first default also takes what was built before it and what no annotation reaches.
    """
    if strategy is not None:
        _check_strategy("set_default_strategy", strategy)
    scope = registry.scope
    if scope is not None:
        raise StrategyError(
            f"set_default_strategy inside the scope {scope.title}: the default is for what is outside of scopes; "
            "call it before the scope or after it"
        )
    if frames.place() == "forward":
        raise StrategyError("set_default_strategy inside a module's forward: call it once, before the model is built")
    registry.set_default(None if strategy is None else strategy.annotation)


def annotate(strategy: Strategy, *modules: nn.Module | Iterable[nn.Module]) -> None:
    """Make one TaskGraph of modules that are already built, with all their submodules, parameters and buffers.

    Each argument is a module or an iterable of modules (`model.layers[:6]`). A default's claim is overridden; a module
    that a scope or an earlier `annotate` has claimed for another TaskGraph is refused.
    """
    _check_strategy("annotate", strategy)
    found = list(_flatten(modules))
    scope = registry.scope
    if scope is not None:
        raise StrategyError(
            f"annotate({strategy.annotation.title}) inside the scope {scope.title}: annotations cannot be nested; "
            "call annotate before the scope or after it"
        )
    conflicts = _conflicts(found, registry.named(strategy.annotation))
    if conflicts:
        raise StrategyError(list_problems(f"annotate({strategy.annotation.title}) cannot claim", conflicts))
    taskgraph = registry.open(strategy.annotation)
    registry.mark(taskgraph)
    for module in found:
        for part in module.modules():
            tag_module(part, Tag(taskgraph, "annotate"))


def taskgraphs(model: nn.Module) -> TaskGraphs:
    """The TaskGraphs that the annotations make of a model: iterate over them, or print them as a table."""
    return taskgraphs_of(model, registry)


def _annotation(kind: Kind, device_count: int | None, name: str | None) -> Annotation:
    if device_count is None:
        device_count = 1
    if isinstance(device_count, bool) or not isinstance(device_count, int) or device_count < 1:
        raise StrategyError(
            f"epl.{kind}: device_count is a number of devices, an int of at least 1 (None means 1); "
            f"found {device_count!r} ({type(device_count).__name__})"
        )
    if name is not None and (not isinstance(name, str) or not name):
        raise StrategyError(f"epl.{kind}: name is a text that is not empty, or None; found {name!r}")
    return Annotation(kind, device_count, name)


def _check_strategy(function: str, strategy: object) -> None:
    if not isinstance(strategy, Strategy):
        raise UsageError(
            f"epl.{function} takes a strategy, epl.replicate(...) or epl.split(...); "
            f"found {strategy!r} ({type(strategy).__name__})"
        )


def _flatten(arguments: Iterable[object]) -> Iterator[nn.Module]:
    problems: list[str] = []
    found: list[nn.Module] = []
    for position, argument in enumerate(arguments, 1):
        # A module first: containers such as ModuleList are iterable too, and a tensor is iterable but no part of this.
        if isinstance(argument, nn.Module):
            found.append(argument)
        elif isinstance(argument, Iterable) and not isinstance(argument, (torch.Tensor, str, bytes)):
            for element in argument:
                if isinstance(element, nn.Module):
                    found.append(element)
                else:
                    problems.append(f"argument {position} holds a {type(element).__name__}")
        else:
            problems.append(f"argument {position} is a {type(argument).__name__}")
    if problems:
        raise UsageError(
            list_problems("epl.annotate takes modules, or iterables of modules, after the strategy", problems)
        )
    if not found:
        raise UsageError("epl.annotate takes at least one module after the strategy; found none")
    return iter(found)


def _conflicts(modules: Iterable[nn.Module], taskgraph: TaskGraph | None) -> list[str]:
    """What in these modules an explicit annotation has claimed for another TaskGraph than this one."""
    conflicts: dict[str, None] = {}
    for module in modules:
        for path, part in module.named_modules(prefix=type(module).__name__):
            tags = {"": module_tag(part), **tensor_tags(part)}
            for name, tag in tags.items():
                if tag is not None and tag.explicit and tag.taskgraph != taskgraph:
                    what = f"{path}.{name}" if name else f"{path} ({type(part).__name__})"
                    how = "the scope" if tag.by == "scope" else "an earlier annotate,"
                    conflicts[f"{what}: it belongs to {how} {tag.taskgraph.title}"] = None
    return list(conflicts)
