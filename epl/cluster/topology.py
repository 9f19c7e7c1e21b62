"""The process groups of an ordered topology: one per axis, plus `model`, `node` and `global`.

    topology = epl.setup_process_groups([("pipe", 2), ("tensor", 2), ("data", world_size / 4)])
    dist.all_reduce(loss, group=topology.group("data"))

Which ranks form which group is arithmetic (`epl.cluster.axes`); here the groups are made, asked and given back.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from epl.cluster.axes import Axes, Ranks
from epl.cluster.batch import broadcast_batch
from epl.cluster.cluster import Cluster
from epl.cluster.communication import Job, speaking
from epl.errors import RanksDisagreeError, TopologyError

if TYPE_CHECKING:
    from epl.cluster.selftest import CommunicationReport

T = TypeVar("T")


class Topology:
    """Process groups by name. An axis is one of those set up, or `model`, `node`, `global`.

    `model` are the ranks that compute on the same data (they differ on every axis but the data ones), `node` those on
    the same node, `global` all. Ranks are global ranks unless a name says otherwise.
    """

    def __init__(self, axes: Axes, job: Job, groups: dict[str, dist.ProcessGroup]) -> None:
        """Use `setup_process_groups`; this one takes groups that are made already."""
        self.axes = axes
        self.job = job
        self._groups = groups
        self._world = dist.group.WORLD
        self._own = {kind: axes.ranks(kind, job.rank) for kind in axes.kinds}
        box = torch.arange(axes.world_size, dtype=torch.int).view(axes.sizes)
        self._mesh = DeviceMesh.from_group(
            [groups[name] for name in axes.names], job.device.type, box, mesh_dim_names=axes.names
        )

    @property
    def mesh(self) -> DeviceMesh:
        """The axes as torch's `DeviceMesh`, on the same process groups."""
        self._refuse_if_destroyed()
        return self._mesh

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along an axis."""
        self.axes.check(axis)
        self._refuse_if_destroyed()
        return self._groups[axis]

    def ranks(self, axis: str) -> Ranks:
        """The ranks of that group; a rank's place in it is its rank in the group."""
        self.axes.check(axis)
        return self._own[axis]

    def all_groups(self, axis: str) -> list[Ranks]:
        """The ranks of every group along an axis, also of those without this rank."""
        return self.axes.groups(axis)

    def size(self, axis: str) -> int:
        """How many ranks are in this rank's group."""
        return len(self.ranks(axis))

    def rank(self, axis: str) -> int:
        """This rank's place in its group, from 0."""
        return self.ranks(axis).index(self.job.rank)

    def has(self, axis: str) -> bool:
        """True if there is such an axis and it has more than one rank."""
        return axis in self.axes.kinds and self.size(axis) > 1

    def is_first(self, axis: str) -> bool:
        """True on the first rank of each group."""
        return self.ranks(axis)[0] == self.job.rank

    def is_last(self, axis: str) -> bool:
        """True on the last rank of each group."""
        return self.ranks(axis)[-1] == self.job.rank

    @overload
    def next_rank(self, axis: str) -> int: ...
    @overload
    def next_rank(self, axis: str, *, wrap: bool) -> int | None: ...
    def next_rank(self, axis: str, *, wrap: bool = True) -> int | None:
        """The rank after this one; after the last comes the first, or None without `wrap`."""
        return None if not wrap and self.is_last(axis) else self._neighbour(axis, 1)

    @overload
    def previous_rank(self, axis: str) -> int: ...
    @overload
    def previous_rank(self, axis: str, *, wrap: bool) -> int | None: ...
    def previous_rank(self, axis: str, *, wrap: bool = True) -> int | None:
        """The rank before this one; before the first comes the last, or None without `wrap`."""
        return None if not wrap and self.is_first(axis) else self._neighbour(axis, -1)

    def broadcast_in_model_group(self, batch: T | None) -> T:
        """The batch of the model group's first rank, on all ranks of that group, with tensors on the rank's device.

        Only the first rank's `batch` counts; the others may pass None. Any nesting that can be pickled will do.
        """
        return broadcast_batch(batch, self.group("model"), self.job)

    def dump(self) -> str:
        """Every group on a line of its own."""
        return self.axes.dump()

    def check(self) -> CommunicationReport:
        """Try communication in every group: collectives and a ring of messages, with the numbers checked."""
        from epl.cluster.selftest import check_communication  # it needs Topology

        return check_communication(self)

    def destroy(self) -> None:
        """Give the process groups back; `setup_process_groups` may then be called again. Twice does no harm."""
        # Destroying the default group, as `epl.init()` does when called anew, has taken these along.
        if dist.is_initialized() and dist.group.WORLD is self._world:
            for group in dict.fromkeys(self._groups.values()):
                if group is not self._world:
                    dist.destroy_process_group(group)
        self._groups = {}

    def __str__(self) -> str:
        return f"topology of {self.axes}"

    def _neighbour(self, axis: str, step: int) -> int:
        ranks = self.ranks(axis)
        return ranks[(ranks.index(self.job.rank) + step) % len(ranks)]

    def _refuse_if_destroyed(self) -> None:
        if not self._groups or dist.group.WORLD is not self._world:
            raise TopologyError(
                f"the process groups of this topology ({self.axes}) were destroyed; "
                "call epl.setup_process_groups again and use what it returns"
            )


def setup_process_groups(
    axes: Sequence[tuple[str, float]], *, cluster: Cluster, job: Job, timeout: float | None = None
) -> Topology:
    """The topology with these axes, outermost first; every rank calls this with the same list.

    Args:
        axes: (name, size) pairs whose sizes multiply to the number of ranks; the last axis has consecutive ranks.
            `data` and names that start with `data_` are axes along which ranks compute on different data.
        cluster: the facts about the ranks and nodes.
        job: the running job, over which the groups are made.
        timeout: deadline in seconds of every collective in these groups; by default the job's.

    Raises:
        TopologyError: if the list is wrong; on every rank, with everything that is wrong.
        RanksDisagreeError: if ranks asked for different axes.
    """
    agreed = _agree(axes, cluster, job)
    deadline = job.timeout if timeout is None else datetime.timedelta(seconds=timeout)
    with speaking(job, f"setup_process_groups({agreed})"):
        return Topology(agreed, job, _make_groups(agreed, deadline))


def _agree(axes: Sequence[tuple[str, float]], cluster: Cluster, job: Job) -> Axes:
    """The parsed axes, once all ranks have shown that they mean the same; otherwise the same error on all of them."""
    mine: Axes | str
    try:
        mine = Axes.parse(axes, cluster.world_size, node_of_rank=cluster.node_of_rank)
    except TopologyError as error:
        mine = str(error)
    asked = job.gather("setup_process_groups", mine)
    if any(other != mine for other in asked):
        found = "\n".join(f"  rank {rank}: {_describe(other)}" for rank, other in enumerate(asked))
        raise RanksDisagreeError(
            f"setup_process_groups expects the same axes and nodes on every rank, found\n{found}\n"
            "Make the list from values that are alike everywhere, such as the world size."
        )
    if isinstance(mine, str):
        raise TopologyError(mine)
    return mine


def _describe(asked: object) -> str:
    return f"{asked}, node of each rank {list(asked.node_of_rank)}" if isinstance(asked, Axes) else str(asked)


def _make_groups(axes: Axes, deadline: datetime.timedelta) -> dict[str, dist.ProcessGroup]:
    """The group of this rank for every kind. Kinds with the same ranks share one, which spares connections."""
    # Not by init_device_mesh: its groups get c10d's own timeout, half an hour, instead of ours.
    made: dict[tuple[Ranks, ...], dist.ProcessGroup] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for kind in axes.kinds:
        if kind == "global":
            assert dist.group.WORLD is not None
            groups[kind] = dist.group.WORLD
            continue
        partition = tuple(sorted(axes.groups(kind)))
        if partition not in made:
            made[partition], _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                [list(ranks) for ranks in partition], timeout=deadline, group_desc=f"epl_{kind}"
            )
        groups[kind] = made[partition]
    return groups
