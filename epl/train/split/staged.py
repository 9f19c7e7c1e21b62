"""Split TaskGraphs that are stages of a pipeline: their ranks all have the rows of the stage, and divide its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from epl.cluster.communication import speaking
from epl.env import Env
from epl.errors import PlanError
from epl.graph import TaskGraphs, registry, taskgraphs_of
from epl.graph.deferred import is_deferred, materialise_whole
from epl.graph.record import RecordedCall
from epl.graph.record.chance import torch_streams_kept
from epl.graph.record.leaf import STAND_INS
from epl.parallel.split.part import SplitPart
from epl.parallel.split.ranks import GroupRanks, SplitRanks
from epl.plan import Plan
from epl.plan.split.splitplan import SplitPlan
from epl.report.log import notice
from epl.train.laneplace import LanePlace
from epl.train.lazy.lane import become_lane, become_single
from epl.train.split.cutting import CutParameters, Decide, decide, plan_of, plans_of_all, split_parameters
from epl.train.split.entries import mind_entries

if TYPE_CHECKING:
    from epl.train.cut.sources import StageSource
    from epl.train.replicas import Replicas


def split_devices(plan: Plan) -> frozenset[int]:
    """The logical devices of a staged plan whose ranks divide parameters, not rows."""
    count = len(plan.taskgraphs) // plan.settings.num_chunks
    found = {n % count for n, t in enumerate(plan.taskgraphs) if t.kind == "split" and t.width > 1}
    mixed = {n % count for n, t in enumerate(plan.taskgraphs) if t.kind != "split"} & found
    if mixed:
        raise PlanError(
            f"with pipeline.num_chunks = {plan.settings.num_chunks} TaskGraphs take turns on the same devices, and on device "
            f"{min(mixed)} of a replica some are split and some replicate: make them alike, or use one chunk\n{plan}"
        )
    return frozenset(found)


class StageSplit:
    """The split stages of one model: decided before anything is let go of, then cut on the ranks that have them."""

    def __init__(
        self, env: Env, model: nn.Module, replicas: Replicas, source: StageSource, recorded: RecordedCall
    ) -> None:
        self._env, self._model, self._replicas = env, model, replicas
        self._job = env.job("epl.parallelize")
        self.ranks: SplitRanks | None = None
        """The ranks of this one's stage, if that is split."""
        self.ids: set[int] = set()
        """Of the parameters that are cut here."""
        agreed = partial(decide, self._job)
        self._plans = plans_of_stages(model, taskgraphs_of(model, registry), replicas.plan, recorded, agreed)
        self._parts: dict[int, SplitPart] = {}
        """By stage, those of this rank."""
        self.splits = [plan.summary(name) for name, plan in self._plans.items()]
        """For the plan to list."""
        for split in self.splits:
            notice(split.describe())

    def cut(
        self, lanes: LanePlace, own: Mapping[str, nn.Parameter], owners: Mapping[str, int], together: Collection[str]
    ) -> None:
        """Cut what is here; all ranks call it together. `own`: the parameters of this rank's stages, `owners`: who answers for each,
        `together`: those that split stages alone have."""
        group = lanes.lane_group()
        stages = [t.name for t in self._replicas.plan.taskgraphs]
        here = [t.name for t in self._replicas.plan.taskgraphs if t.name in self._plans and self._job.rank in _ranks(t)]
        if not here:
            return
        self.ranks = GroupRanks(group, self._job.device, lambda what: speaking(self._job, what), self._job.standstill)
        cut = CutParameters(self.ranks)
        for name in here:
            plan = self._plans[name]
            part = cut.cut(self._model, plan, self._env.config, self._replicas.optimizers, wraps_itself=False)
            self._parts[stages.index(name)] = part
        self.ids = set(map(id, cut.layouts))
        for parameter in own.values():
            if is_deferred(parameter):  # tied between TaskGraphs: no plan has it
                materialise_whole(parameter)
        replicas = self._replicas
        replicas.at_close(cut.undo)
        here_too = lanes.lane_ranks
        for name, parameter in own.items():
            become_lane(parameter, here_too, owners[name], name, self.ranks, together=name in together)
            replicas.at_close(partial(become_single, parameter))
        replicas.at_close(mind_entries(self._model, self.ranks.rank))

    def inside(self, stage: int) -> AbstractContextManager[None]:
        """What surrounds the forward of a stage: code between its modules sees split parameters as split, too."""
        part = self._parts.get(stage)
        return contextlib.nullcontext() if part is None else part.entered()


def plans_of_stages(
    model: nn.Module, taskgraphs: TaskGraphs, plan: Plan, recorded: RecordedCall, decide: Decide
) -> dict[str, SplitPlan]:
    """How every split TaskGraph is cut, each its own parameters alone: chunks share ranks, and have plans of their own."""
    with torch_streams_kept():
        specs = [node.meta["spec"] for node in recorded.whole.placeholders]
        examples = [recorded.arguments([made(spec) for spec in specs]) for made in STAND_INS]
    split = [t for t in plan.taskgraphs if t.kind == "split" and t.width > 1]
    own = {t.name: split_parameters(model, taskgraphs, {t.name}) for t in split}
    found = plans_of_all(
        {t.name: partial(plan_of, model, model, own[t.name], t.width, examples, decide) for t in split}
    )
    return {name: plan.only(own[name]) for name, plan in found.items()}


def _ranks(taskgraph: Any) -> set[int]:
    return {rank for ranks in taskgraph.devices for rank in ranks}
