"""`epl.plan`: what epl would do with a model on so many devices, without a launch and without a number computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from epl.config import Config
from epl.env import Env
from epl.errors import UsageError
from epl.graph import TaskGraphs, registry, taskgraphs_of
from epl.graph.automatic import automatic_specs, choose_stages, unit_of
from epl.graph.blocks import find_units
from epl.graph.cost import leaf_costs
from epl.graph.crossings import module_crossings
from epl.graph.forward_claims import claim_split_scopes
from epl.graph.forward_scopes import forward_scopes
from epl.graph.owners import owners_of, parameter_owners
from epl.graph.record import RecordedCall, Recordings
from epl.graph.record.modules import TaskGraphOf
from epl.graph.staging import graph_nodes, wanted_at_home
from epl.plan import ClusterShape, Plan, PlanSettings, TaskGraphSpec, cut_stages, make_plan
from epl.plan.stageplan import live_micro_batches
from epl.train.cut.sources import AutomaticChoice, crossings, in_stages
from epl.train.split.foreseen import splits_of_stages, splits_on_shared_devices


def plan(
    model: nn.Module,
    *example_inputs: Any,
    num_devices: int | None = None,
    num_micro_batch: int | None = None,
    devices_per_node: int | None = None,
    **kwargs: Any,
) -> Plan:
    """The plan for this model on `num_devices` devices, to be printed; also before `epl.init`, and of a model on meta.

        print(epl.plan(model, torch.zeros(32, 128, dtype=torch.long), num_devices=8, num_micro_batch=4))

    Inputs are given as the loop gives them to the model: all rows of one replica's step. They tell what the stages compute;
    without any, the plan only says which devices the TaskGraphs get. Settings are those of `epl.init`, or else the default
    ones and EPL_* variables; devices default to those of this run, a number of devices to one node.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"epl.plan takes a model and example inputs for it; found a {type(model).__name__}")
    registry.refuse_inside_scope("epl.plan")
    env = Env.get()
    cluster = _cluster(env, num_devices, devices_per_node)
    settings = plan_settings(env.config, num_micro_batch=num_micro_batch)
    if cluster.world_size > 1:
        claim_split_scopes(model, registry)
    taskgraphs = taskgraphs_of(model, registry)
    choice = AutomaticChoice(env.config, model, taskgraphs)
    foreseen = _Foreseen(model, example_inputs, kwargs, env.cluster.device)
    with registry.left_as_it_is(), torch.enable_grad():
        if choice.count:
            made = make_plan(automatic_specs(choice.count), cluster, settings)
            return foreseen.automatic(made) if made.layout == "staged" and foreseen.has_inputs else made
        made = foreseen.annotated(taskgraphs, cluster, settings)
    return replace(made, reason=choice.reason)


def plan_settings(
    config: Config, *, micro_batch: int | None = None, num_micro_batch: int | None = None
) -> PlanSettings:
    """What of a configuration decides a plan; `num_micro_batch`, if given, instead of the configured number."""
    return PlanSettings(
        num_micro_batch=config.pipeline.num_micro_batch if num_micro_batch is None else num_micro_batch,
        micro_batch=micro_batch,
        strategy=config.pipeline.strategy,
        num_chunks=config.pipeline.num_chunks,
        colocate=config.cluster.colocate_split_and_replicate,
        prefer_intra_node=config.cluster.device_place_prefer_intra_node,
        gradients_reduce_method=config.communication.gradients_reduce_method,
    )


class _Foreseen:
    """A model and what it would be called with."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        self._model, self._args, self._kwargs, self._device = model, args, kwargs, device
        self.has_inputs = bool(args or kwargs)

    def annotated(self, taskgraphs: TaskGraphs, cluster: ClusterShape, settings: PlanSettings) -> Plan:
        """The plan by the user's annotations, those inside the forward among them."""
        scopes = forward_scopes(self._model)
        inside = bool(scopes.annotations or scopes.unknown)
        specs = taskgraphs.specs()
        if not self.has_inputs or cluster.world_size == 1:
            return make_plan(specs, cluster, settings)
        if settings.colocate or (len(specs) == 1 and not inside):
            return self._on_shared_devices(taskgraphs, make_plan(specs, cluster, settings))
        recorded = self._record(owners_of(self._model, taskgraphs))
        nodes = graph_nodes(recorded, self._model)
        if inside:
            specs = _with_forward_scopes(specs if not taskgraphs.implicit else (), [n.taskgraph for n in nodes])
        made = make_plan(specs, cluster, settings)
        if made.layout != "staged":
            return made
        owners = parameter_owners(self._model, taskgraphs)
        names = [spec.name for spec in specs]
        cut = cut_stages(nodes, taskgraphs=names, parameters=owners, home=wanted_at_home(recorded))
        costs = leaf_costs(recorded, self._model, settings.num_micro_batch, self._device)
        made = _with_rows(made, recorded.rows).in_order(cut.order)
        made = in_stages(made, recorded, self._model, cut, costs)
        return made.with_splits(splits_of_stages(self._model, taskgraphs, made, recorded))

    def _on_shared_devices(self, taskgraphs: TaskGraphs, made: Plan) -> Plan:
        """All of a replica's devices have all TaskGraphs: what there is to know is how they are split, and the bridges between them."""
        if "split" not in made.needs():
            return made
        recorded = None
        if "bridge" in made.needs():
            recorded = self._record(owners_of(self._model, taskgraphs))
            crossing = module_crossings(recorded, made.settings.num_micro_batch, ranks=1)
            made = _with_rows(made, recorded.rows).with_bridges(crossing)
        return made.with_splits(
            splits_on_shared_devices(self._model, taskgraphs, made, self._args, self._kwargs, recorded)
        )

    def automatic(self, made: Plan) -> Plan:
        """The plan with stages that epl chooses."""
        count = len(made.taskgraphs)
        recorded = self._record(unit_of(find_units(self._model, count)))
        costs = leaf_costs(recorded, self._model, made.settings.num_micro_batch, self._device)
        chosen = choose_stages(recorded, self._model, costs, live=live_micro_batches(made.schedule()))
        nodes = graph_nodes(recorded, self._model, chosen.of_call)
        names = [t.name for t in made.taskgraphs]
        owners = chosen.owners(self._model)
        cut = cut_stages(nodes, taskgraphs=names, parameters=owners, home=wanted_at_home(recorded))
        reason = "\n".join([chosen.cut.reason, *crossings(made)])
        return in_stages(_with_rows(made, recorded.rows), recorded, self._model, cut, costs, reason=reason)

    def _record(self, leaf_of: TaskGraphOf) -> RecordedCall:
        return Recordings(self._model, leaf_of, device=self._device).of(self._args, self._kwargs, 1)


def _with_forward_scopes(specs: Sequence[TaskGraphSpec], executed: Sequence[str | None]) -> tuple[TaskGraphSpec, ...]:
    """The TaskGraphs, and those that the forward opened while it was recorded."""
    known = {spec.name for spec in specs}
    opened = {t.name: TaskGraphSpec(t.name, t.kind, t.device_count) for t in registry.taskgraphs}
    new = dict.fromkeys(name for name in executed if name is not None and name not in known)
    return (*specs, *(opened[name] for name in new))


def _with_rows(made: Plan, rows: int) -> Plan:
    """The plan for a batch of so many rows, if they make equal micro batches."""
    micro_batch, rest = divmod(rows, made.settings.num_micro_batch)
    known = micro_batch if micro_batch and not rest else None
    return replace(made, settings=replace(made.settings, micro_batch=known))


def _cluster(env: Env, num_devices: int | None, devices_per_node: int | None) -> ClusterShape:
    if num_devices is None and devices_per_node is None:
        return ClusterShape(env.cluster.world_size, env.cluster.node_of_rank)
    devices = env.cluster.world_size if num_devices is None else num_devices
    per_node = env.config.cluster.devices_per_node or devices if devices_per_node is None else devices_per_node
    for name, number in (("num_devices", devices), ("devices_per_node", per_node)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"epl.plan: {name} is a number of devices, an int of at least 1; found {number!r}")
    return ClusterShape(devices, tuple(rank // per_node for rank in range(devices)))
