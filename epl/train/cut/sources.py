"""Where the stages of a model come from: annotations where modules are built, scopes in its forward, or epl itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import fx, nn

from epl.config import Config
from epl.errors import PlanError
from epl.graph import TaskGraphs, registry
from epl.graph.automatic import AutomaticStages, automatic_specs, choose_stages, unit_of
from epl.graph.blocks import find_units
from epl.graph.cost import Cost, leaf_costs
from epl.graph.crossings import stage_crossings
from epl.graph.forward_scopes import ForwardScopes, forward_scopes
from epl.graph.owners import owners_of, parameter_owners
from epl.graph.record import RecordedCall
from epl.graph.record.modules import TaskGraphOf
from epl.graph.staging import graph_nodes, stage_plans, wanted_at_home
from epl.plan import Plan
from epl.plan.spec import TaskGraphSpec
from epl.plan.stageplan import live_micro_batches
from epl.plan.stages import StageCut, cut_stages
from epl.report.log import notice


class StageSource(Protocol):
    """Says what TaskGraphs there are before the first call, and what is in them once it is recorded."""

    leaf_of: TaskGraphOf
    """Of a module that is to be recorded as a whole, its TaskGraph."""

    def specs(self) -> tuple[TaskGraphSpec, ...]:
        """The TaskGraphs, as far as they are known beforehand."""

    def cut(self, recorded: RecordedCall, plan: Plan, earlier: StageCut | None) -> StageCut:
        """The stages of a recorded call; `earlier` are those by which the model was placed."""

    def settle(self, plan: Plan, cut: StageCut, recorded: RecordedCall) -> Plan:
        """The plan with the TaskGraphs of this cut, and what is in its stages."""


def stage_source(
    model: nn.Module, taskgraphs: TaskGraphs, config: Config, device: torch.device, ranks: int
) -> StageSource:
    """The source of this model's stages; what the user should know is said."""
    choice = AutomaticChoice(config, model, taskgraphs)
    if choice.reason:
        notice(choice.reason)
    if choice.count:
        return Automatic(model, choice.count, device)
    scopes = forward_scopes(model) if taskgraphs.implicit else ForwardScopes()
    if scopes.annotations or scopes.unknown:
        return InForward(model, taskgraphs, device, scopes, config.pipeline.num_stages if ranks > 1 else 1)
    return Annotated(model, taskgraphs, device)


class AutomaticChoice:
    """Whether epl chooses the stages of a model, how many, and what to tell the user about that."""

    def __init__(self, config: Config, model: nn.Module, taskgraphs: TaskGraphs) -> None:
        self.count = 0
        """TaskGraphs that epl is to make; 0: it is not asked to, or the user has."""
        self.reason = ""
        scopes = forward_scopes(model)
        if not config.auto.auto_parallel:
            return
        if not taskgraphs.implicit or scopes.annotations or scopes.unknown:
            self.reason = "auto.auto_parallel has no effect: the model has annotations, and they win"
        elif config.pipeline.num_stages is None:
            self.reason = (
                "automatic stages: pipeline.num_stages is not set, so the whole model is one stage (data parallelism); "
                "set it to the number of devices that one copy of the model is to take"
            )
        elif config.pipeline.num_stages * config.pipeline.num_chunks > 1:
            self.count = config.pipeline.num_stages * config.pipeline.num_chunks


class Annotated:
    """Annotations where modules were built, or on built modules."""

    def __init__(self, model: nn.Module, taskgraphs: TaskGraphs, device: torch.device) -> None:
        self._model, self._taskgraphs, self._device = model, taskgraphs, device
        self.leaf_of: TaskGraphOf = owners_of(model, taskgraphs)

    def specs(self) -> tuple[TaskGraphSpec, ...]:
        return self._taskgraphs.specs()

    def cut(self, recorded: RecordedCall, plan: Plan, earlier: StageCut | None) -> StageCut:
        return cut_stages(
            graph_nodes(recorded, self._model),
            taskgraphs=self._names(recorded, plan),
            parameters=parameter_owners(self._model, self._taskgraphs),
            home=wanted_at_home(recorded),
            earlier=earlier,
            num_devices=_num_devices(plan),
        )

    def _names(self, recorded: RecordedCall, plan: Plan) -> Sequence[str]:
        return [t.name for t in plan.taskgraphs]

    def settle(self, plan: Plan, cut: StageCut, recorded: RecordedCall) -> Plan:
        costs = leaf_costs(recorded, self._model, plan.settings.num_micro_batch, self._device)
        return in_stages(self._ordered(plan, cut), recorded, self._model, cut, costs, reason=plan.reason)

    def _ordered(self, plan: Plan, cut: StageCut) -> Plan:
        return plan.in_order(cut.order)


class InForward(Annotated):
    """Scopes that the forward opens: their devices are counted from its source, their names are known when it is recorded."""

    def __init__(
        self,
        model: nn.Module,
        taskgraphs: TaskGraphs,
        device: torch.device,
        scopes: ForwardScopes,
        num_stages: int | None,
    ) -> None:
        super().__init__(model, taskgraphs, device)
        if scopes.unknown and num_stages is None:
            raise PlanError(
                f"the scopes in the forward at {', '.join(scopes.unknown)} get their names while it runs, and devices are dealt out "
                "before: set pipeline.num_stages to their number, or write them with a name and a count that stand in the source"
            )
        found = [TaskGraphSpec(a.name or "", a.kind, a.device_count) for a in scopes.annotations]
        unnamed = (num_stages or 0) - len(found) if scopes.unknown else 0
        self._found = (*found, *(TaskGraphSpec(f"scope {n} of the forward", "replicate", 1) for n in range(unnamed)))

    def specs(self) -> tuple[TaskGraphSpec, ...]:
        return self._found

    def _names(self, recorded: RecordedCall, plan: Plan) -> Sequence[str]:
        found = (node.meta.get("taskgraph") for node in recorded.whole.nodes)
        return list(dict.fromkeys(name for name in found if name is not None))

    def _ordered(self, plan: Plan, cut: StageCut) -> Plan:
        known = {t.name: t for t in registry.taskgraphs}
        specs = [TaskGraphSpec(name, known[name].kind, known[name].device_count) for name in cut.order]
        expected, found = (sum(each.device_count for each in some) for some in (self._found, specs))
        if (expected, len(self._found)) != (found, len(specs)):
            raise PlanError(
                f"the scopes in the forward were taken for {len(self._found)} TaskGraphs on {expected} devices, from its source and "
                f"pipeline.num_stages; the forward that ran opened {len(specs)} on {found}: {', '.join(cut.order)}. Set "
                "pipeline.num_stages to their number."
            )
        return plan.with_taskgraphs(specs)


class Automatic:
    """Stages that epl chooses by what the parts of the model cost."""

    def __init__(self, model: nn.Module, count: int, device: torch.device) -> None:
        self._model, self._count, self._device = model, count, device
        self.leaf_of: TaskGraphOf = unit_of(find_units(model, count))
        self._chosen: AutomaticStages | None = None
        self._costs: dict[fx.Node, Cost] = {}

    def specs(self) -> tuple[TaskGraphSpec, ...]:
        return automatic_specs(self._count)

    def cut(self, recorded: RecordedCall, plan: Plan, earlier: StageCut | None) -> StageCut:
        if self._chosen is None:
            costs = self._costs = leaf_costs(recorded, self._model, plan.settings.num_micro_batch, self._device)
            live = live_micro_batches(plan.schedule())
            self._chosen = choose_stages(recorded, self._model, costs, live=live)
            notice(self._chosen.cut.reason)
        return cut_stages(
            graph_nodes(recorded, self._model, self._chosen.of_call),
            taskgraphs=[t.name for t in plan.taskgraphs],
            parameters=self._chosen.owners(self._model),
            home=wanted_at_home(recorded),
            earlier=earlier,
            num_devices=_num_devices(plan),
        )

    def settle(self, plan: Plan, cut: StageCut, recorded: RecordedCall) -> Plan:
        assert self._chosen is not None
        reason = "\n".join([self._chosen.cut.reason, *crossings(plan)])
        return in_stages(plan.in_order(cut.order), recorded, self._model, cut, self._costs, reason=reason)


def in_stages(
    plan: Plan,
    recorded: RecordedCall,
    model: nn.Module,
    cut: StageCut,
    costs: Mapping[fx.Node, Cost],
    *,
    reason: str = "",
) -> Plan:
    """The plan, its TaskGraphs in the order of this cut, with what each stage computes, holds and keeps on one of its devices."""
    widths = [t.width for t in plan.taskgraphs]  # a wide stage divides its rows, a split one its operators
    stages = stage_plans(recorded, model, cut, costs)
    each = [0.0 if stage.time is None else stage.time / width for stage, width in zip(stages, widths, strict=True)]
    stages = [
        replace(
            stage,
            time=None if stage.time is None else time / (sum(each) or 1.0),
            activations=None if stage.activations is None else stage.activations // width,
        )
        for stage, width, time in zip(stages, widths, each, strict=True)
    ]
    travelling = stage_crossings(recorded, cut, plan.settings.num_micro_batch)
    return plan.with_stages(stages, reason).with_bridges(travelling)


def crossings(made: Plan) -> list[str]:
    """What is to be said if the stages of a replica are on several nodes."""
    node = made.cluster.node_of_rank
    found = [
        f"{before.name} and {after.name}"
        for before, after in pairwise(made.taskgraphs)
        if any(
            {node[rank] for rank in left} != {node[rank] for rank in right}
            for left, right in zip(before.devices, after.devices, strict=True)
        )
    ]
    text = f"stages span nodes: values cross between {', '.join(found)}. That takes nothing more than their order"
    return [text] if found else []


def _num_devices(plan: Plan) -> int:
    return max(1, len(plan.taskgraphs) // plan.settings.num_chunks)
