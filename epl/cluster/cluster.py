"""What this process runs on: ranks, workers, nodes and its device, as plain facts without any communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epl.cluster.surroundings import Kind, Surroundings
from epl.errors import ClusterError, list_problems


@dataclass(frozen=True)
class Cluster:
    """The facts about the ranks and devices of a job, as seen by one of its processes.

    One process drives one device, so **several ranks share a `worker_index`**: a worker is a group of
    `gpu_num_per_worker` processes on one host, as in `epl-launch --num_workers 2 --gpu_per_worker 4`. What must happen
    only once (printing, saving) therefore asks `is_first_rank` or `rank`, never `worker_index == 0`.
    On a CPU every rank counts as one device.
    """

    rank: int
    world_size: int
    worker_num: int
    worker_index: int
    gpu_num_per_worker: int
    total_gpu_num: int
    local_rank: int
    """This process among those of its node."""
    node_of_rank: tuple[int, ...]
    """The node of every rank; a node is a host, or `cluster.devices_per_node` consecutive ranks."""
    device: torch.device
    """The device that this process drives."""
    host: str
    kind: Kind
    """Who started this process."""

    @property
    def is_first_rank(self) -> bool:
        """True on exactly one process of the job."""
        return self.rank == 0

    @property
    def node_count(self) -> int:
        """How many nodes the job has."""
        return len(set(self.node_of_rank))

    @property
    def node_index(self) -> int:
        """The node of this process."""
        return self.node_of_rank[self.rank]

    def __str__(self) -> str:
        here = f"rank {self.rank} of {self.world_size} on {self.host} ({self.device}), started by {self.kind}"
        return (
            f"{_count(self.worker_num, 'worker')} × {_count(self.gpu_num_per_worker, 'device')} = "
            f"{_count(self.total_gpu_num, 'device')} on {_count(self.node_count, 'node')}\n"
            f"this is {here}, worker {self.worker_index}, node {self.node_index}"
        )


def make_cluster(
    surroundings: Surroundings,
    *,
    host: str = "localhost",
    cuda_devices: int = 0,
    run_visible_devices: str = "",
    devices_per_node: int = 0,
    node_of_rank: Sequence[int] | None = None,
) -> Cluster:
    """The cluster facts that follow from the surroundings and the `cluster.*` settings.

    Args:
        surroundings: who started this process, and as which rank.
        host: the name of this host, for messages.
        cuda_devices: how many CUDA devices this process sees; 0 means that ranks run on CPUs.
        run_visible_devices: `cluster.run_visible_devices`, for example "0,1": the devices of a worker, one per process.
        devices_per_node: `cluster.devices_per_node`; above 0, a node is that many consecutive ranks.
        node_of_rank: the node of every rank, where ranks have told each other (`number_nodes`); by default nodes are
            filled one by one.

    Raises:
        ClusterError: with everything that does not fit together.
    """
    problems: list[str] = []
    device = _choose_device(surroundings, cuda_devices, run_visible_devices, problems)
    nodes = _place_nodes(surroundings, devices_per_node, node_of_rank, problems)
    if problems:
        raise ClusterError(list_problems(f"rank {surroundings.rank} on {host} cannot be placed", problems))
    return Cluster(
        rank=surroundings.rank,
        world_size=surroundings.world_size,
        worker_num=surroundings.worker_num,
        worker_index=surroundings.worker_index,
        gpu_num_per_worker=surroundings.gpu_per_worker,
        total_gpu_num=surroundings.world_size,
        local_rank=surroundings.local_rank,
        node_of_rank=nodes,
        device=device,
        host=host,
        kind=surroundings.kind,
    )


def number_nodes(names: Sequence[str]) -> tuple[int, ...]:
    """The node of every rank from the node names that all ranks gave, numbered in order of appearance."""
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return tuple(order[name] for name in names)


def count_cuda_devices() -> int:
    """How many CUDA devices this process sees; 0 where there is no CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _choose_device(
    around: Surroundings, cuda_devices: int, run_visible_devices: str, problems: list[str]
) -> torch.device:
    cpu = torch.device("cpu")
    listed = _read_devices(run_visible_devices, problems)
    if listed is None:
        return cpu
    per_worker = around.gpu_per_worker
    if listed and len(listed) != per_worker:
        problems.append(
            f"cluster.run_visible_devices = {run_visible_devices!r} lists {_count(len(listed), 'device')}, but a "
            f"worker has {_count(per_worker, 'process', 'processes')}, one per device; list {per_worker}, or start "
            f"with epl-launch --gpu_per_worker {len(listed)}"
        )
        return cpu
    if not cuda_devices:
        return cpu
    if around.own_device_only:
        return torch.device("cuda", 0)
    if listed and around.local_size > per_worker:
        problems.append(
            f"cluster.run_visible_devices = {run_visible_devices!r} would give the same devices to each of the "
            f"{around.local_size // per_worker} workers on this node; leave it out, or start one worker per node"
        )
        return cpu
    if not listed and around.local_size > cuda_devices:
        problems.append(
            f"{_count(around.local_size, 'process', 'processes')} on this node, but only "
            f"{_count(cuda_devices, 'CUDA device')}; each process needs its own: start at most {cuda_devices} per node "
            f"(epl-launch --gpu_per_worker {cuda_devices}), or set CUDA_VISIBLE_DEVICES= to run on CPUs"
        )
        return cpu
    chosen = listed[around.local_rank] if listed else around.local_rank
    if beyond := [n for n in listed if n >= cuda_devices]:
        problems.append(
            f"cluster.run_visible_devices = {run_visible_devices!r} names {beyond}, but this host has "
            f"{_count(cuda_devices, 'CUDA device')}, numbered from 0"
        )
        return cpu
    return torch.device("cuda", chosen)


def _read_devices(run_visible_devices: str, problems: list[str]) -> list[int] | None:
    """The listed device numbers, empty if none are listed, None if the text is wrong."""
    entries = [entry.strip() for entry in run_visible_devices.split(",")] if run_visible_devices.strip() else []
    if not all(entry.isascii() and entry.isdecimal() for entry in entries):
        problems.append(
            f"cluster.run_visible_devices must be device numbers such as '0,1', found {run_visible_devices!r}"
        )
        return None
    listed = [int(entry) for entry in entries]
    if twice := sorted(n for n, times in Counter(listed).items() if times > 1):
        problems.append(f"cluster.run_visible_devices = {run_visible_devices!r} lists {twice} more than once")
        return None
    return listed


def _place_nodes(
    around: Surroundings, devices_per_node: int, node_of_rank: Sequence[int] | None, problems: list[str]
) -> tuple[int, ...]:
    size = around.world_size
    if devices_per_node < 0 or (devices_per_node and size % devices_per_node):
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        problems.append(
            f"cluster.devices_per_node = {devices_per_node} does not divide the {size} ranks; choose one of "
            f"{fitting}, or 0 to take nodes as found"
        )
        return ()
    if devices_per_node:
        return tuple(rank // devices_per_node for rank in range(size))
    if node_of_rank is None:
        return tuple(rank // around.local_size for rank in range(size))
    if len(node_of_rank) != size:
        problems.append(f"node_of_rank has {len(node_of_rank)} entries for {size} ranks")
    return tuple(node_of_rank)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
