"""Every decision, as plain printable data: pure functions that know neither processes nor tensors."""

from __future__ import annotations

from epl.plan.batch import Rows, cut_evenly, divide, share_rows
from epl.plan.nodes import GraphNode
from epl.plan.placement import PlacedTaskGraph
from epl.plan.plan import DataShare, Plan, RankPlace, make_plan
from epl.plan.spec import ClusterShape, PlanSettings, TaskGraphSpec
from epl.plan.stageplan import StagePlan
from epl.plan.stages import StageCut, cut_stages

__all__ = [
    "ClusterShape",
    "DataShare",
    "GraphNode",
    "PlacedTaskGraph",
    "Plan",
    "PlanSettings",
    "RankPlace",
    "Rows",
    "StageCut",
    "StagePlan",
    "TaskGraphSpec",
    "cut_evenly",
    "cut_stages",
    "divide",
    "make_plan",
    "share_rows",
]
