"""`epl.parallelize`: makes the user's own model, optimizers and loaders ready to train on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from epl.cluster.topology import Topology
from epl.config import Config
from epl.env import Env
from epl.errors import NotBuiltError, PlanError
from epl.graph import TaskGraphs, registry, taskgraphs_of
from epl.graph.forward_claims import claim_split_scopes, refuse_unclaimed
from epl.plan import ClusterShape, Plan, make_plan
from epl.plan.schedule import make_schedule
from epl.report.log import notice, warn
from epl.train.arguments import sort_arguments
from epl.train.cut.sources import stage_source
from epl.train.effect import settings_without_effect
from epl.train.foresee import plan_settings
from epl.train.replicas import Replicas


def parallelize(
    model: nn.Module,
    *optimizers_and_loaders: Optimizer | DataLoader[Any],
    loss_fn: Callable[..., Any] | None = None,
) -> Any:
    """The same objects in the same order, ready: train with them exactly as on one device.

        model, optimizer, loader = epl.parallelize(model, optimizer, loader)

    Weights and buffers become rank 0's on every rank, gradients are reduced during `backward()`, and the loader yields
    this rank's rows. A single argument comes back alone. Called again for the same model it makes further optimizers and
    loaders ready. `loss_fn`, if it is a module with parameters of its own, has them trained alike on every rank.
    """
    env = Env.get()
    job = env.job("epl.parallelize")
    registry.refuse_inside_scope("epl.parallelize")
    arguments = sort_arguments(model, optimizers_and_loaders, loss_fn)
    replicas = Replicas.of(model)
    if replicas is None:
        if job.world_size > 1:
            claim_split_scopes(model, registry)
        taskgraphs = taskgraphs_of(model, registry)
        source = stage_source(model, taskgraphs, env.config, job.device, job.world_size)
        plan = make_plan(
            source.specs(),
            ClusterShape(env.cluster.world_size, env.cluster.node_of_rank),
            plan_settings(env.config, micro_batch=_batch_size(arguments.loaders)),
        )
        _refuse_what_is_not_built(plan)
        _check_schedule(plan, env.config)
        if env.topology is not None:
            _check_topology(plan, env.topology)
        job.check_same("the plan", plan.to_dict(), "Build and annotate the model alike on every rank.")
        _tell(taskgraphs, plan, env.config)
        if plan.layout != "staged" and job.world_size > 1:  # on shared devices replicas have nothing to do for it
            registry.on_forward_scope = refuse_unclaimed
        replicas = Replicas(env, model, plan, source, taskgraphs)
        env.plan = plan
    replicas.take(arguments, loss_fn)
    everything = (model, *optimizers_and_loaders)
    return everything if optimizers_and_loaders else model


def _batch_size(loaders: tuple[DataLoader[object], ...]) -> int | None:
    return next((loader.batch_size for loader in loaders if loader.batch_size is not None), None)


def _refuse_what_is_not_built(plan: Plan) -> None:
    built = {"data_parallel", "pipeline", "interleaved", "wide_stage", "micro_batches", "split", "bridge"}
    missing = plan.needs() - built
    if missing:
        strategies = ", ".join(f"{t.name}: {t.strategy}" for t in plan.taskgraphs)
        raise NotBuiltError(
            f"this plan needs {', '.join(sorted(missing))}, which this version of epl does not have yet.\n{plan}\n"
            "What works today: data parallelism, one replicate(k) or several on the same devices "
            "(cluster.colocate_split_and_replicate), pipelines of replicate(k) stages, micro batches, and pipelines of your own stage "
            f"functions, epl.forward_backward. Found {strategies}. Several TaskGraphs also run on one device, without a launcher."
        )


def _check_schedule(plan: Plan, config: Config) -> None:
    """A schedule that cannot be is refused now, not in the first step."""
    if plan.layout == "staged":
        settings = plan.settings
        stages = len(plan.taskgraphs)
        make_schedule(
            config.pipeline.strategy, stages // settings.num_chunks, settings.num_micro_batch, settings.num_chunks
        )


def _check_topology(plan: Plan, topology: Topology) -> None:
    """A topology of the user's own must agree with the plan: its data axes are the ranks that see different rows."""
    shares = plan.num_replicas * plan.parts
    found = 1
    for name in topology.axes.data_axes:
        found *= topology.size(name)
    if found != shares:
        raise PlanError(
            f"epl.setup_process_groups and the annotations contradict each other: the plan has {shares} ranks that see "
            f"rows of their own, so the data axes must multiply to {shares}; found {topology.axes}. "
            f'Use [("data", {shares})], or change the annotations.\n{plan}'
        )


def _tell(taskgraphs: TaskGraphs, plan: Plan, config: Config) -> None:
    if plan.layout != "staged" or not taskgraphs.implicit:
        for text in taskgraphs.notices():
            notice(text)
    notice(plan.describe())
    for text in settings_without_effect(config, plan):
        warn(text)
