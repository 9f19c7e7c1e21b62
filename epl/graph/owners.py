"""Which TaskGraph a module with everything in it, or a parameter, belongs to: what recording and cutting ask."""

from __future__ import annotations

from torch import nn

from epl.graph.record import MIXED, Mixed
from epl.graph.record.modules import TaskGraphOf
from epl.graph.resolve import TaskGraphs


def owners_of(model: nn.Module, taskgraphs: TaskGraphs) -> TaskGraphOf:
    """A function that gives a module's TaskGraph, None if nothing in it has one, or MIXED.

    What counts is what computes or stores: modules without children, parameters and buffers. A model without annotations
    may have scopes in its forward: nothing in it has a TaskGraph by itself.
    """
    if taskgraphs.implicit:
        return lambda module: None
    found: dict[nn.Module, set[str | None]] = {}
    for path, module in reversed([*model.named_modules(remove_duplicate=False)]):
        inside = found.setdefault(module, set())
        children = [found[child] for child in module.children()]
        inside.update(*children)
        if not children:
            inside.add(_name(taskgraphs.of_module.get(path)))
        for name, _ in module.named_parameters(recurse=False):
            inside.add(_name(taskgraphs.of_parameter.get(f"{path}.{name}".lstrip("."))))
        for name, _ in module.named_buffers(recurse=False):
            inside.add(_name(taskgraphs.of_buffer.get(f"{path}.{name}".lstrip("."))))

    def owner_of(module: nn.Module) -> str | Mixed | None:
        owners = found.get(module, {None})
        return next(iter(owners)) if len(owners) == 1 else MIXED

    return owner_of


def parameter_owners(model: nn.Module, taskgraphs: TaskGraphs) -> dict[str, str | None]:
    """Every parameter, by its first name, with its TaskGraph; None: it has none by itself."""
    names = (name for name, _ in model.named_parameters())
    return {name: None if taskgraphs.implicit else _name(taskgraphs.of_parameter.get(name)) for name in names}


def _name(taskgraph: object) -> str | None:
    return getattr(taskgraph, "name", None)
