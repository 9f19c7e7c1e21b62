"""A self-test of communication: every group of a topology adds, broadcasts, gathers and passes numbers in a ring."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from epl.cluster.axes import Ranks
from epl.cluster.communication import speaking
from epl.cluster.topology import Topology
from epl.errors import CommunicationError, list_problems


@dataclass(frozen=True)
class GroupCheck:
    """How one group did, as its slowest rank saw it."""

    axis: str
    ranks: Ranks
    milliseconds: float
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class CommunicationReport:
    """One check for every group of the topology, the same on every rank."""

    checks: tuple[GroupCheck, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"group {c.axis}, ranks: {list(c.ranks)}: {'ok' if c.ok else 'WRONG'}, {c.milliseconds:.1f} ms"
            for c in self.checks
        )


def check_communication(topology: Topology) -> CommunicationReport:
    """A report of what every group of the topology did with an all-reduce, broadcast, all-gather and a ring.

    Every rank calls this. Groups of any size are tested, the sizes 1, 2 and 3 included.

    Raises:
        CommunicationError: on every rank, naming the groups and ranks where a wrong number arrived.
    """
    mine = [_check_group(topology, axis) for axis in topology.axes.kinds]
    # Told to everybody before anybody raises, so that no rank is left waiting for one that saw a wrong number.
    everybody = cast(list[list[GroupCheck]], topology.job.gather("check_communication", mine))
    report = CommunicationReport(
        tuple(
            _merge([check for checks in everybody for check in checks if (check.axis, check.ranks) == (axis, ranks)])
            for axis in topology.axes.kinds
            for ranks in topology.all_groups(axis)
        )
    )
    wrong = [
        f"group {check.axis}, ranks {list(check.ranks)}: {problem}"
        for check in report.checks
        for problem in check.problems
    ]
    if wrong:
        raise CommunicationError(list_problems("wrong numbers arrived; check the network and its drivers", wrong))
    return report


def _merge(checks: list[GroupCheck]) -> GroupCheck:
    problems = tuple(problem for check in checks for problem in check.problems)
    return GroupCheck(checks[0].axis, checks[0].ranks, max(check.milliseconds for check in checks), problems)


def _check_group(topology: Topology, axis: str) -> GroupCheck:
    ranks, group = topology.ranks(axis), topology.group(axis)
    me, at = topology.job.rank, topology.rank(axis)
    start = time.perf_counter()
    with speaking(topology.job, f"check_communication of group {axis}, ranks {list(ranks)}"):
        # Rank r contributes r + 1, so that a number that was never sent (0) does not look right.
        found_and_expected = {
            "all-reduce": (_all_reduce(topology, group), sum(ranks) + len(ranks)),
            "broadcast": (_broadcast(topology, group), ranks[-1] + 1),
            "all-gather": (_all_gather(topology, group), [r + 1 for r in ranks]),
            "ring": (_ring(topology, group), ranks[at - 1] + 1),
        }
    milliseconds = (time.perf_counter() - start) * 1000
    problems = tuple(
        f"{name} on rank {me} expected {expected}, found {found}"
        for name, (found, expected) in found_and_expected.items()
        if found != expected
    )
    return GroupCheck(axis, ranks, milliseconds, problems)


def _number(topology: Topology) -> torch.Tensor:
    return torch.tensor([topology.job.rank + 1], device=topology.job.device)


def _all_reduce(topology: Topology, group: dist.ProcessGroup) -> int:
    number = _number(topology)
    dist.all_reduce(number, group=group)
    return int(number.item())


def _broadcast(topology: Topology, group: dist.ProcessGroup) -> int:
    number = _number(topology)
    dist.broadcast(number, group=group, group_src=dist.get_world_size(group) - 1)
    return int(number.item())


def _all_gather(topology: Topology, group: dist.ProcessGroup) -> list[int]:
    number = _number(topology)
    gathered = [torch.zeros_like(number) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, number, group=group)
    return [int(other.item()) for other in gathered]


def _ring(topology: Topology, group: dist.ProcessGroup) -> int:
    """What the rank before sent, while this one sends to the rank after."""
    number = _number(topology)
    size, at = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return int(number.item())
    received = torch.zeros_like(number)
    # Both ends at once: one after the other deadlocks where a send waits for its receiver.
    both = [
        dist.P2POp(dist.isend, number, group=group, group_peer=(at + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(at - 1) % size),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return int(received.item())
