"""Every decision, as plain printable data: pure functions that know neither processes nor tensors."""

from __future__ import annotations

from epl.plan.batch import Rows, cut_evenly, divide, share_rows
from epl.plan.placement import PlacedTaskGraph
from epl.plan.plan import DataShare, Plan, RankPlace, make_plan
from epl.plan.spec import ClusterShape, PlanSettings, TaskGraphSpec

__all__ = [
    "ClusterShape",
    "DataShare",
    "PlacedTaskGraph",
    "Plan",
    "PlanSettings",
    "RankPlace",
    "Rows",
    "TaskGraphSpec",
    "cut_evenly",
    "divide",
    "make_plan",
    "share_rows",
]
