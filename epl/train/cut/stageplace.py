"""Where this rank stands among the stages of its replica, and the lists of actions that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from epl.parallel.pipeline.lanes import Lanes
from epl.parallel.pipeline.route import Layout
from epl.parallel.pipeline.transport import Edge
from epl.plan.schedule import Schedule, backward_only, check, forward_only, make_schedule

ScheduleKind = Literal["train", "forward", "backward"]
Layouts = Mapping[Edge, Sequence[Layout]]


@dataclass(frozen=True)
class StagePlace:
    """The device of this rank, and what runs on it."""

    lanes: Lanes
    """Who computes each stage; with a home of its own that is the last one."""
    num_devices: int
    num_chunks: int
    device: int
    strategy: str
    """The schedule of a training step, by its name."""

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.num_devices * self.num_chunks

    @property
    def home_stage(self) -> int:
        """Where what follows the model runs: in the last stage, or, if that is wide, in a stage of its own after it."""
        return len(self.lanes.ranks) - 1

    @cached_property
    def at_lanes(self) -> StagePlace | None:
        """The same without a stage of its own after the last, where that is split: its lanes all have all rows, and compute what follows
        the model together."""
        last = self.num_stages - 1
        if self.home_stage == last or last not in self.lanes.copied:
            return None
        return replace(self, lanes=replace(self.lanes, ranks=self.lanes.ranks[:-1]))

    @property
    def stages(self) -> tuple[int, ...]:
        """Those on this rank."""
        return self.lanes.stages

    @property
    def model_stages(self) -> tuple[int, ...]:
        """Those on this rank that have a part of the model."""
        return tuple(stage for stage in self.stages if stage < self.num_stages)

    def schedule(self, kind: ScheduleKind, micro_batches: int, edges: Sequence[Edge], layouts: Layouts) -> Schedule:
        """The list that every device runs."""
        if kind == "train":
            made = make_schedule(self.strategy, self.num_devices, micro_batches, self.num_chunks)
        else:
            order = forward_only if kind == "forward" else backward_only
            made = order(self.num_devices, micro_batches, self.num_chunks)
        if self.home_stage == self.num_stages:
            made = made.with_home()
        made = made.with_communication(edges, self.lanes.bridged(edges, layouts))
        if kind == "train":
            made = made.with_reduce()
        if kind != "backward":  # a list of backwards alone is not complete, nor need it be
            check(made)
        return made
