"""Puts the parts of a cut model together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from epl.env import Env
from epl.graph import registry, taskgraphs_of
from epl.graph.record import Recordings
from epl.train.cut.generation import guard_generation
from epl.train.cut.model import CutModel, Placer
from epl.train.cut.placer import OneStage, Staged
from epl.train.cut.sources import StageSource
from epl.train.split.cutting import split_parameters

if TYPE_CHECKING:
    from epl.train.replicas import Replicas


def cut_model(env: Env, model: nn.Module, source: StageSource, replicas: Replicas) -> CutModel:
    """What stands in for the forward of this model under its plan."""
    plan, job = replicas.plan, env.job("epl.parallelize")
    placer: Placer
    bound = _split_parameters(model, replicas)
    if plan.layout == "staged":
        placer = Staged(env, model, source, replicas)
        recordings = Recordings(model, source.leaf_of, device=job.device, bound=bound)
    else:
        placer = OneStage(job, model, replicas.reducers, None if replicas.split is None else replicas.split.inside)
        # Where ranks compute together on rows of their own, they would read different numbers and go different ways.
        same = replicas.split is None
        recordings = Recordings(model, lambda module: "model", device=job.device, bound=bound, reads_inputs=same)
    own_rows = None if replicas.split is None else replicas.split.rows
    cut = CutModel(model, recordings, plan.settings.num_micro_batch, placer, own_rows, bound)
    replicas.at_close(guard_generation(model, None if plan.layout == "staged" else cut.as_it_is))
    return cut


def _split_parameters(model: nn.Module, replicas: Replicas) -> frozenset[str]:
    """All names of the parameters that are going to be cut over ranks."""
    names = {t.name for t in replicas.plan.taskgraphs if t.kind == "split" and t.width > 1}
    own = split_parameters(model, taskgraphs_of(model, registry), names) if names else set()
    cut = {id(p) for name, p in model.named_parameters() if name in own}
    return frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in cut)
