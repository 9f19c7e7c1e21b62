"""Where this rank stands among pipeline stages of any width, and the process groups that follow.

widths 1, 2, 1 and two replicas          replica 0: ranks 0 | 1 2 | 3       replica 1: ranks 4 | 5 6 | 7

messages          among the ranks of a replica                     {0 1 2 3}  {4 5 6 7}
gradients         all lanes of a stage, of all replicas            {0 4}  {1 2 5 6}  {3 7}
batch norm        the lanes of a stage in one replica              {0} {1 2} {3} {4} {5 6} {7}
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch.distributed as dist

from epl.cluster.communication import Job, speaking
from epl.parallel.pipeline.lanes import Lanes
from epl.parallel.pipeline.transport import Direction, Edge, GroupTransport, Transport
from epl.train.place import NoTransport

Ranks = tuple[int, ...]


class LanePlace:
    """A place among logical devices that are one or several ranks each. Groups are made once and kept; all ranks ask together."""

    def __init__(
        self,
        devices: Sequence[Sequence[Ranks]],
        job: Job,
        *,
        num_chunks: int = 1,
        home: bool = False,
        copied: frozenset[int] = frozenset(),
        names: Sequence[str] = (),
    ) -> None:
        """`devices`: for each logical device its ranks in every replica (`PlacedTaskGraph.devices` of the first round); those `copied`
        divide parameters, not rows. `names`: the TaskGraph of each stage, for messages."""
        self._names = names
        self._devices, self._job = devices, job
        self.num_devices, self.num_chunks, self.num_replicas = len(devices), num_chunks, len(devices[0])
        where = ((d, r) for d, replicas in enumerate(devices) for r, ranks in enumerate(replicas) if job.rank in ranks)
        self.device, self.replica = next(where)
        self.width = len(devices[self.device][0])
        self.all_pipes: list[Ranks] = [  # sorted, as the ranks of a group always are
            tuple(sorted(rank for replicas in devices for rank in replicas[r])) for r in range(self.num_replicas)
        ]
        self.pipe_ranks = self.all_pipes[self.replica]
        index = {rank: n for n, rank in enumerate(self.pipe_ranks)}
        peers = [tuple(index[rank] for rank in replicas[self.replica]) for replicas in devices]
        last = [peers[-1][:1]] if home else []
        stages = frozenset(device + chunk * len(devices) for device in copied for chunk in range(num_chunks))
        self.lanes = Lanes((*peers * num_chunks, *last), index[job.rank], stages)
        self._copied = copied
        self._replica_groups: list[dist.ProcessGroup] = []
        self._pipe_group: dist.ProcessGroup | None = None
        self._lane_group: dist.ProcessGroup | None = None

    @property
    def lane(self) -> int:
        """This rank among those that divide its stages' rows."""
        return self._devices[self.device][self.replica].index(self._job.rank)

    @property
    def lane_ranks(self) -> Ranks:
        """The ranks of this one's stages in its replica."""
        return self._devices[self.device][self.replica]

    def gradient_factor(self, of_replica: float) -> float:
        """f of epl/parallel/reducer.py for a reduction over `replica_group`, from what this replica counts for among replicas.

        Lanes' gradients add up while the reducer averages over width × replicas ranks, so the width is multiplied in.
        """
        return self.sharing * of_replica

    @property
    def is_copied(self) -> bool:
        """Whether the lanes of this rank's stages all have the same rows, and their parameters are split."""
        return self.device in self._copied

    @property
    def sharing(self) -> int:
        """Ranks of this replica with the same parameters, and gradients that add up."""
        return 1 if self.is_copied else self.width

    def replica_group(self, number: int) -> dist.ProcessGroup:
        """The `number`-th group over all ranks with this rank's stages: their lanes (of a split the same one), in every replica."""
        while len(self._replica_groups) <= number:
            ranks: list[Ranks] = []
            for device, replicas in enumerate(self._devices):
                if device in self._copied:
                    ranks += zip(*replicas, strict=True)
                else:
                    ranks.append(tuple(rank for each in replicas for rank in each))
            self._replica_groups.append(self._make(ranks))
        return self._replica_groups[number]

    def lane_group(self) -> dist.ProcessGroup:
        """The group over the lanes of this rank's stages in its replica, for what couples rows (batch norm)."""
        if self._lane_group is None:
            self._lane_group = self._make([ranks for replicas in self._devices for ranks in replicas])
        return self._lane_group

    def pipe_group(self) -> dist.ProcessGroup:
        """The group over all ranks of this rank's replica; a place among `lanes` is a rank in it."""
        if self._pipe_group is None:
            self._pipe_group = self._make(self.all_pipes)
        return self._pipe_group

    def group_of_devices(self, devices: Sequence[int]) -> dist.ProcessGroup | None:
        """The group over all ranks of these devices in this rank's replica; None if it has none of them."""
        own = None
        with speaking(self._job, "making process groups"):
            for replica in range(self.num_replicas):
                ranks = [rank for device in devices for rank in self._devices[device][replica]]
                group = dist.new_group(ranks, timeout=self._job.timeout)
                own = group if self._job.rank in ranks else own
        return own

    def make_transport(self, edges: Sequence[Edge]) -> Transport:
        """How this rank reaches the others of its replica along these edges, whatever lanes they are between."""
        if self.lanes.size == 1:
            return NoTransport(self._job.device)
        pipe, lanes = self.pipe_group(), self.lanes
        apart: dict[tuple[Edge, Direction], dist.ProcessGroup] = {}
        if self._job.device.type != "cpu":  # NCCL has no tags
            directions: tuple[Direction, Direction] = ("forward", "backward")
            apart = {(edge, way): self._make(self.all_pipes) for edge in edges for way in directions}
        of_edge = (lambda edge: edge) if lanes.is_plain else lanes.stage_edge
        name = "stage {}".format if lanes.is_plain else lanes.name
        return GroupTransport(
            lambda edge, way: apart.get((of_edge(edge), way), pipe), pipe, self._job.device, self.guard, name
        )

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Inside, c10d's errors become epl's, with this rank's stages named."""
        count = self.num_devices * self.num_chunks  # without home
        here = [stage for stage in self.lanes.stages if stage < count]
        titles = [f"{stage} ({self._names[stage]})" if self._names else str(stage) for stage in here]
        return speaking(self._job, f"{what} (stage {', '.join(titles)} of {count} is here)")

    def _make(self, ranks: Sequence[Ranks]) -> dist.ProcessGroup:
        with speaking(self._job, "making process groups"):
            made = dist.new_subgroups_by_enumeration([list(r) for r in ranks], timeout=self._job.timeout)  # type: ignore[no-untyped-call]
        group: dist.ProcessGroup = made[0]
        return group
