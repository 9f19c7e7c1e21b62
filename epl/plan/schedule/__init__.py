"""Pipeline schedules as data: lists of actions, the orders that make them, their check and their simulation.

schedule = make_schedule("PreferBackward", num_devices=4, num_micro_batch=8)    computations, in order
schedule = schedule.with_communication().with_reduce()                          and what must travel between them
check(schedule)                                                                 complete, ordered, free of deadlock
simulate(schedule).makespan                                                     how long it would take
"""

from __future__ import annotations

from epl.plan.schedule.action import Action, ActionKind
from epl.plan.schedule.checks import check
from epl.plan.schedule.chunked import backward_only, forward_only, interleaved
from epl.plan.schedule.orders import prefer_backward, prefer_backward_optimizer, prefer_forward, zero_bubble
from epl.plan.schedule.registry import SCHEDULES, make_schedule
from epl.plan.schedule.replay import Sends
from epl.plan.schedule.schedule import Edge, Schedule
from epl.plan.schedule.simulation import Simulation, TimedAction, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Edge",
    "Schedule",
    "Sends",
    "Simulation",
    "TimedAction",
    "backward_only",
    "check",
    "forward_only",
    "interleaved",
    "make_schedule",
    "prefer_backward",
    "prefer_backward_optimizer",
    "prefer_forward",
    "simulate",
    "zero_bubble",
]
