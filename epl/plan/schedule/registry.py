"""The schedules by name, as `pipeline.strategy` spells them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from epl.errors import PlanError
from epl.plan.schedule.chunked import interleaved
from epl.plan.schedule.orders import prefer_backward, prefer_backward_optimizer, prefer_forward, zero_bubble
from epl.plan.schedule.schedule import Schedule

_ONE_STAGE_EACH: Mapping[str, Callable[[int, int], Schedule]] = {
    "PreferForward": prefer_forward,
    "PreferBackward": prefer_backward,
    "PreferBackwardOptimizer": prefer_backward_optimizer,
    "ZeroBubble": zero_bubble,
}
SCHEDULES = (*_ONE_STAGE_EACH, "Interleaved")
"""Every name that `make_schedule` knows."""


def make_schedule(name: str, num_devices: int, num_micro_batch: int, num_chunks: int = 1) -> Schedule:
    """The computations of a schedule, by its name (in any case); PlanError with the remedy if there is none such."""
    known = {each.lower(): each for each in SCHEDULES}
    chosen = known.get(name.lower())
    if chosen is None:
        near = known[difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]]
        raise PlanError(f"pipeline.strategy is one of {', '.join(SCHEDULES)}; found {name!r}: did you mean {near!r}?")
    if chosen == "Interleaved":
        if num_chunks < 2:
            raise PlanError(
                f"Interleaved needs at least 2 stages per device; found pipeline.num_chunks = {num_chunks}: "
                "set pipeline.num_chunks = 2, or pipeline.strategy = 'PreferBackward' for one stage per device"
            )
        return interleaved(num_devices, num_micro_batch, num_chunks)
    if num_chunks != 1:
        raise PlanError(
            f"{chosen} has one stage per device; found pipeline.num_chunks = {num_chunks}: "
            "set pipeline.strategy = 'Interleaved', or pipeline.num_chunks = 1"
        )
    return _ONE_STAGE_EACH[chosen](num_devices, num_micro_batch)
