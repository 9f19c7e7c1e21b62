"""Stages that epl chooses: the calls of a model's units, in order of execution, cut by what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from epl.graph.cost import Cost
from epl.graph.record import MIXED, Mixed, RecordedCall
from epl.plan.auto import AutoCut, Part, cut_parts
from epl.plan.spec import TaskGraphSpec

BYTES_HELD = 4
"""Times its own bytes that a trained parameter takes: itself, its gradient, and two moments of Adam."""


@dataclass(frozen=True)
class AutomaticStages:
    """Which TaskGraph every call of a unit belongs to. A module that is called several times may be in several."""

    calls: Mapping[str, tuple[str, ...]]
    """For every module the TaskGraphs of its calls, in order."""
    cut: AutoCut

    def of_call(self, path: str, number: int) -> str | None:
        """The TaskGraph of the `number`-th call of a module, counted from 0; of more calls than were seen, the last."""
        known = self.calls.get(path)
        return None if known is None else known[min(number, len(known) - 1)]

    def owners(self, model: nn.Module) -> dict[str, str | None]:
        """Every parameter and the TaskGraph that uses it first; None: no unit does."""
        found: dict[str, str | None] = {name: None for name, _ in model.named_parameters()}
        names = _first_names(model)
        for path, stages in self.calls.items():
            for parameter in model.get_submodule(path).parameters():
                name = names[id(parameter)]
                found[name] = min(stages[0], found[name] or stages[0], key=_number)
        return found


def automatic_specs(count: int) -> tuple[TaskGraphSpec, ...]:
    """The TaskGraphs of so many automatic stages, before it is known what is in them."""
    return tuple(TaskGraphSpec(f"stage_{number}", "replicate", 1) for number in range(count))


def unit_of(units: Mapping[str, nn.Module]) -> Callable[[nn.Module], str | Mixed]:
    """Of a module inside a unit, the unit's path; MIXED of those that were opened: for recording units as leaves."""
    inside = {part: path for path, unit in units.items() for part in unit.modules()}
    return lambda module: inside.get(module, MIXED)


def choose_stages(
    recorded: RecordedCall,
    model: nn.Module,
    costs: Mapping[fx.Node, Cost],
    *,
    live: Sequence[int],
    memory_limit: int | None = None,
) -> AutomaticStages:
    """The stages of a model whose units were recorded as leaves.

    `costs`: of every call of a leaf, for a micro batch. `live`: for each stage the micro batches it keeps at once.
    """
    calls = [node for node in recorded.body if node in costs]
    groups = _with_parameters(calls, recorded.whole.modules)
    names = _first_names(model)
    parts = [_part(group, costs, recorded.whole.modules, names) for group in groups]
    cut = cut_parts(parts, len(live), live=live, memory_limit=memory_limit)
    found: dict[str, tuple[str, ...]] = {}
    for number, group in enumerate(groups):
        for node in group:
            path = str(node.target)
            found[path] = (*found.get(path, ()), f"stage_{cut.stage_of(number)}")
    return AutomaticStages(found, cut)


def _with_parameters(calls: Sequence[fx.Node], modules: Mapping[str, nn.Module]) -> list[list[fx.Node]]:
    """The calls grouped so that each group has parameters: a dropout or an activation goes with what precedes it."""
    groups: list[list[fx.Node]] = []
    leading: list[fx.Node] = []
    for node in calls:
        if _has_parameters(modules[str(node.target)]):
            groups.append([*leading, node])
            leading = []
        elif groups:
            groups[-1].append(node)
        else:
            leading.append(node)
    return groups


def _part(
    group: Sequence[fx.Node], costs: Mapping[fx.Node, Cost], modules: Mapping[str, nn.Module], names: Mapping[int, str]
) -> Part:
    paths = [str(node.target) for node in group]
    weights = {
        names[id(parameter)]: parameter.nbytes * (BYTES_HELD if parameter.requires_grad else 1)
        for path in paths
        for parameter in modules[path].parameters()
    }
    return Part(
        next(path for path in paths if _has_parameters(modules[path])),
        sum(costs[node].time for node in group),
        weights,
        sum(costs[node].activations for node in group),
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _first_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _number(taskgraph: str) -> int:
    return int(taskgraph.rpartition("_")[2])
