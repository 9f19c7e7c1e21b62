"""Puts the parts of a cut model together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from epl.env import Env
from epl.graph.record import Recordings
from epl.train.cut.generation import guard_generation
from epl.train.cut.model import CutModel, Placer
from epl.train.cut.placer import OneStage, Staged
from epl.train.cut.sources import StageSource

if TYPE_CHECKING:
    from epl.train.replicas import Replicas


def cut_model(env: Env, model: nn.Module, source: StageSource, replicas: Replicas) -> CutModel:
    """What stands in for the forward of this model under its plan."""
    plan, job = replicas.plan, env.job("epl.parallelize")
    placer: Placer
    if plan.layout == "staged":
        placer = Staged(env, model, source, replicas)
        recordings = Recordings(model, source.leaf_of, device=job.device)
    else:
        placer = OneStage(job, model, replicas.reducers)
        recordings = Recordings(model, lambda module: "model", device=job.device)
    cut = CutModel(model, recordings, plan.settings.num_micro_batch, placer)
    replicas.at_close(guard_generation(model, None if plan.layout == "staged" else cut.as_it_is))
    return cut
