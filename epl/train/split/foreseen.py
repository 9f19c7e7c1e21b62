"""How a model would be split, for `epl.plan`: as at its first call, but nobody has to agree on it, and nothing is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from epl.graph import TaskGraphs
from epl.graph.record import RecordedCall
from epl.plan import Plan
from epl.plan.splits import PartSplit
from epl.train.split.cutting import as_in_training, choose_by, plan_of, plans_of_all, split_parameters
from epl.train.split.ownrows import loose_parameters, split_modules
from epl.train.split.staged import plans_of_stages


def splits_of_stages(model: nn.Module, taskgraphs: TaskGraphs, plan: Plan, recorded: RecordedCall) -> list[PartSplit]:
    """Of the stages of a plan, called as recorded; SplitError with all that is in the way."""
    found = plans_of_stages(model, taskgraphs, plan, recorded, choose_by)
    return [split.summary(name) for name, split in found.items()]


def splits_on_shared_devices(
    model: nn.Module,
    taskgraphs: TaskGraphs,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recorded: RecordedCall | None,
) -> list[PartSplit]:
    """Where TaskGraphs share devices; `recorded` if ranks have rows of their own."""
    split = [t for t in plan.taskgraphs if t.kind == "split" and t.width > 1]
    if not split:
        return []
    ways, names = split[0].width, {t.name for t in split}
    own = split_parameters(model, taskgraphs, names)
    if recorded is None:
        return [plan_of(model, model, own, ways, [(args, kwargs)], choose_by).summary()]
    found = []
    if loose := loose_parameters(recorded, names, own):
        found.append(plan_of(model, model, loose, ways, [(args, kwargs)], choose_by).only(set(loose)).summary())
    with as_in_training(model):
        parts = split_modules(recorded, names, own)
    plans = plans_of_all({p.path: partial(plan_of, model, p.module, p.own, ways, p.examples, choose_by) for p in parts})
    return found + [split.summary(path) for path, split in plans.items()]
