"""Where this rank stands in a pipeline: its device among those of its replica, and the process groups that follow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from epl.cluster.communication import Job, speaking
from epl.cluster.topology import Topology
from epl.parallel.pipeline.transport import Direction, Edge, GroupTransport, Pending, Transport


class PipelinePlace:
    """A place on the `pipe` axis of a topology, beside the replicas of its data axes. Groups are made once and kept."""

    def __init__(self, topology: Topology, job: Job, num_chunks: int) -> None:
        self.topology, self._job = topology, job
        piped = topology.has("pipe")
        self.num_devices, self.device = (topology.size("pipe"), topology.rank("pipe")) if piped else (1, 0)
        self.num_stages = self.num_devices * num_chunks
        self.stages = range(self.device, self.num_stages, self.num_devices)
        self.pipe_ranks: tuple[int, ...] = topology.ranks("pipe") if piped else (job.rank,)
        self.all_pipes: Sequence[Sequence[int]] = (
            topology.all_groups("pipe") if piped else [(rank,) for rank in range(job.world_size)]
        )
        data_axes = topology.axes.data_axes
        self._replicas = topology.axes.groups_over(*data_axes) if data_axes else []
        self.num_replicas = len(self._replicas[0]) if self._replicas else 1
        self._replica_groups: list[dist.ProcessGroup] = []
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def has_last_stage(self) -> bool:
        """Whether the last stage, where the loss is, is on this rank."""
        return self.num_stages - 1 in self.stages

    def replica_group(self, number: int) -> dist.ProcessGroup:
        """The `number`-th group over the ranks with this stage in every replica; all ranks ask together."""
        while len(self._replica_groups) <= number:
            self._replica_groups.append(self._make(self._replicas))
        return self._replica_groups[number]

    def group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of these ranks; all ranks ask together, whether they are in it or not."""
        key = tuple(ranks)
        if key not in self._groups:
            with speaking(self._job, "making a process group"):
                self._groups[key] = dist.new_group(list(ranks), timeout=self._job.timeout)
        return self._groups[key]

    def make_transport(self) -> Transport:
        """How this device reaches the others of its replica."""
        if self.num_devices == 1:
            return NoTransport(self._job.device)
        pipe = self._make(self.all_pipes)
        apart: dict[tuple[Edge, Direction], dist.ProcessGroup] = {}
        if self._job.device.type != "cpu":  # NCCL has no tags
            directions: tuple[Direction, Direction] = ("forward", "backward")
            for stage in range(self.num_stages - 1):
                apart |= {((stage, stage + 1), direction): self._make(self.all_pipes) for direction in directions}
        return GroupTransport(lambda edge, way: apart.get((edge, way), pipe), pipe, self._job.device, self.guard)

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Inside, c10d's errors become epl's, with this rank's stages named."""
        stages = ", ".join(map(str, self.stages))
        return speaking(self._job, f"{what} (stage {stages} of {self.num_stages} is here)")

    def _make(self, ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        with speaking(self._job, "making process groups"):
            made = dist.new_subgroups_by_enumeration([list(r) for r in ranks], timeout=self._job.timeout)  # type: ignore[no-untyped-call]
        group: dist.ProcessGroup = made[0]
        return group


class NoTransport:
    """One device has nobody to talk to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, peer: int, edge: Edge, direction: Direction, buffer: torch.Tensor) -> Pending:
        raise AssertionError("one device sends nothing")

    receive = send

    def share(self, buffer: torch.Tensor, source: int) -> None:
        raise AssertionError("one device shares nothing")
