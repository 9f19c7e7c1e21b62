"""Who started this process: `epl-launch`, torchrun, OpenMPI, Slurm or nobody; and which rank that makes it.

Each environment is a small class with `detect(environ)`. The first that answers is believed, so their order matters:

    EplLaunch, Torchrun    explicit ranks; also inside an allocation of Slurm, whose variables are then the shell's
    OpenMpi                before Slurm: mpirun's daemons are a Slurm step, and ranks inherit their variables
    Slurm                  only inside a step of srun; in an sbatch or salloc shell SLURM_NTASKS is just a wish
    Single                 everything else
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from epl.cluster.hostlist import expand_counts, expand_hosts
from epl.cluster.variables import VariableReader
from epl.errors import ClusterError

Kind = Literal["epl-launch", "torchrun", "slurm", "openmpi", "single"]
LOOPBACK = "127.0.0.1"
DERIVED_PORTS = range(15000, 25000)  # below the ports that Linux hands out by itself (from 32768)


@dataclass(frozen=True)
class Surroundings:
    """What the starter of this process says about it. One process drives one device."""

    kind: Kind
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    """Processes on this node; all nodes have the same number."""
    node_index: int
    node_count: int
    worker_index: int
    worker_num: int
    gpu_per_worker: int
    """Processes of a worker. A worker is what `epl-launch` counts; elsewhere it is a node's processes."""
    master_addr: str
    master_port: int
    """Where ranks meet; 0 stands for any free port (a single process needs none)."""
    own_device_only: bool = False
    """Each process is shown only its own device (Slurm's `--gpus-per-task`), which is then number 0."""

    def node_name(self, host: str) -> str:
        """A name that processes share if and only if they share a node; `number_nodes` makes indices of such names."""
        # OpenMPI tells no node index (ours assumes that nodes are filled one by one), but there the host is the node.
        return host if self.kind == "openmpi" else f"node {self.node_index}"


class Environment(Protocol):
    """One way to be started."""

    @staticmethod
    def detect(environ: Mapping[str, str]) -> Surroundings | None:
        """The surroundings if this environment started the process, else None.

        Raises:
            ClusterError: if it did, but its variables are incomplete or contradict each other.
        """
        ...


class EplLaunch:
    """Started by `epl-launch`: torch elastic's variables, and how many workers of how many devices were asked for."""

    @staticmethod
    def detect(environ: Mapping[str, str]) -> Surroundings | None:
        if not {"EPL_LAUNCH_NUM_WORKERS", "EPL_LAUNCH_GPU_PER_WORKER"} & environ.keys():
            return None
        read = VariableReader(environ, "started by epl-launch", "start the script with epl-launch again")
        workers = read.integer("EPL_LAUNCH_NUM_WORKERS", minimum=1)
        per_worker = read.integer("EPL_LAUNCH_GPU_PER_WORKER", minimum=1)
        return _elastic(read, "epl-launch", workers=workers, per_worker=per_worker)


class Torchrun:
    """Started by torchrun, or by hand with the same variables."""

    @staticmethod
    def detect(environ: Mapping[str, str]) -> Surroundings | None:
        if not {"RANK", "TORCHELASTIC_RUN_ID"} & environ.keys():
            return None
        remedy = "start with epl-launch or torchrun, which set all of them, or unset RANK, WORLD_SIZE and LOCAL_RANK"
        return _elastic(VariableReader(environ, "started by torchrun (RANK is set)", remedy), "torchrun")


class OpenMpi:
    """Started by OpenMPI's mpirun."""

    @staticmethod
    def detect(environ: Mapping[str, str]) -> Surroundings | None:
        if "OMPI_COMM_WORLD_RANK" not in environ:
            return None
        read = VariableReader(
            environ, "started by OpenMPI (OMPI_COMM_WORLD_RANK is set)", "start it with mpirun -n <ranks>"
        )
        rank = read.integer("OMPI_COMM_WORLD_RANK")
        size = read.integer("OMPI_COMM_WORLD_SIZE", minimum=1)
        local_rank = read.integer("OMPI_COMM_WORLD_LOCAL_RANK")
        local_size = read.integer("OMPI_COMM_WORLD_LOCAL_SIZE", minimum=1)
        address = environ.get("MASTER_ADDR", "")
        if not address and read.good and local_size < size:
            read.problem(
                f"MASTER_ADDR is missing, and the {size} ranks are on several hosts ({local_size} here): "
                "pass the first host with mpirun -x MASTER_ADDR=<host> -x MASTER_PORT=<port>"
            )
        jobs = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
        job = next((environ[name] for name in jobs if name in environ), "")
        port = read.port(default=DERIVED_PORTS[zlib.crc32(job.encode()) % len(DERIVED_PORTS)])
        read.compare("OMPI_COMM_WORLD_RANK", rank, "OMPI_COMM_WORLD_SIZE", size)
        read.compare("OMPI_COMM_WORLD_LOCAL_RANK", local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE", local_size)
        if read.good and size % local_size:
            read.problem(_uneven(f"OMPI_COMM_WORLD_SIZE = {size}", local_size))
        read.finish()
        return Surroundings(
            kind="openmpi",
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_index=rank // local_size,
            node_count=size // local_size,
            worker_index=rank // local_size,
            worker_num=size // local_size,
            gpu_per_worker=local_size,
            master_addr=address or LOOPBACK,
            master_port=port,
        )


class Slurm:
    """Started by srun as a step of a Slurm job."""

    FIRST_SPECIAL_STEP = 0xFFFFFFF0
    """Steps from here on are Slurm's own (batch script, interactive shell, extern), not one of srun."""

    @staticmethod
    def detect(environ: Mapping[str, str]) -> Surroundings | None:
        step_name = next((n for n in ("SLURM_STEP_ID", "SLURM_STEPID") if n in environ), None)
        if step_name is None or "SLURM_PROCID" not in environ:
            return None
        read = VariableReader(
            environ, "started by srun (SLURM_STEP_ID is set)", "start it with srun --ntasks-per-node=<n>"
        )
        step = read.integer(step_name)
        if read.good and step >= Slurm.FIRST_SPECIAL_STEP:
            return None
        rank = read.integer("SLURM_PROCID")
        size_name = read.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        size = read.integer(size_name, minimum=1)
        local_rank = read.integer("SLURM_LOCALID")
        node_index = read.integer("SLURM_NODEID")
        nodes_name = read.first("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        node_count = read.integer(nodes_name, minimum=1)
        job = read.integer("SLURM_JOB_ID")
        # Steps side by side in one job, and jobs one after the other, get different ports.
        port = read.port(default=DERIVED_PORTS[(job + 1009 * step) % len(DERIVED_PORTS)])
        address = environ.get("MASTER_ADDR") or _first_host(read)
        read.compare("SLURM_PROCID", rank, size_name, size)
        read.compare("SLURM_NODEID", node_index, nodes_name, node_count)
        local_size = 1
        if read.good:
            local_size = _tasks_here(read, size_name, size, nodes_name, node_count)
            read.compare("SLURM_LOCALID", local_rank, "the tasks of this node", local_size)
        if read.good and "WORLD_SIZE" in environ and environ["WORLD_SIZE"] != str(size):
            read.problem(
                f"WORLD_SIZE = {environ['WORLD_SIZE']!r}, but {size_name} = {size}: unset WORLD_SIZE or correct it"
            )
        read.finish()
        return Surroundings(
            kind="slurm",
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_index=node_index,
            node_count=node_count,
            worker_index=node_index,
            worker_num=node_count,
            gpu_per_worker=local_size,
            master_addr=address,
            master_port=port,
            own_device_only=environ.get("SLURM_GPUS_PER_TASK", "").split(":")[-1] == "1",
        )


class Single:
    """Started by nobody in particular: one process, one device."""

    @staticmethod
    def detect(environ: Mapping[str, str]) -> Surroundings | None:
        half = [name for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if environ.get(name)]
        if half:
            found = ", ".join(f"{name} = {environ[name]!r}" for name in half)
            raise ClusterError(
                f"{found}, but RANK is missing: start with epl-launch or torchrun, which set all of them, "
                f"or unset {' and '.join(half)} to run as a single process"
            )
        return Surroundings("single", 0, 1, 0, 1, 0, 1, 0, 1, 1, LOOPBACK, 0)


ENVIRONMENTS: tuple[type[Environment], ...] = (EplLaunch, Torchrun, OpenMpi, Slurm, Single)


def discover(environ: Mapping[str, str] = os.environ) -> Surroundings:
    """What started this process and which rank it is, from the first environment that answers.

    Raises:
        ClusterError: if the variables of that environment are incomplete or contradict each other.
    """
    for environment in ENVIRONMENTS:
        found = environment.detect(environ)
        if found is not None:
            return found
    raise AssertionError("a single process is always possible")


def _elastic(read: VariableReader, kind: Kind, *, workers: int = 0, per_worker: int = 0) -> Surroundings:
    """The surroundings from torch elastic's variables; without a count of workers, each node is one."""
    environ = read.environ
    rank, size = read.integer("RANK"), read.integer("WORLD_SIZE", minimum=1)
    address = environ.get("MASTER_ADDR", "").strip()
    if not address:
        read.problem("MASTER_ADDR is missing")
    port = read.port()
    by_hand = not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environ.keys()
    if by_hand and address in (LOOPBACK, "localhost", "::1"):
        local_rank, local_size = rank, size  # ranks that meet on loopback are all on this host
    else:
        local_rank, local_size = read.integer("LOCAL_RANK"), read.integer("LOCAL_WORLD_SIZE", minimum=1)
    node_index = read.integer("GROUP_RANK", default=rank // local_size)
    node_count = read.integer("GROUP_WORLD_SIZE", minimum=1, default=max(1, size // local_size))
    read.compare("RANK", rank, "WORLD_SIZE", size)
    if not by_hand:
        read.compare("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    if {"GROUP_RANK", "GROUP_WORLD_SIZE"} <= environ.keys():
        read.compare("GROUP_RANK", node_index, "GROUP_WORLD_SIZE", node_count)
    if read.good and node_count * local_size != size:
        read.problem(_uneven(f"WORLD_SIZE = {size}", local_size, node_count))
    if read.good and per_worker and workers * per_worker != size:
        divides = "" if size % per_worker == 0 else f" ({size} is not divisible by {per_worker})"
        read.problem(
            f"WORLD_SIZE = {size}, but EPL_LAUNCH_NUM_WORKERS = {workers} × EPL_LAUNCH_GPU_PER_WORKER = {per_worker} "
            f"makes {workers * per_worker}{divides}"
        )
    if read.good and per_worker and local_size % per_worker:
        read.problem(
            f"LOCAL_WORLD_SIZE = {local_size} is not divisible by EPL_LAUNCH_GPU_PER_WORKER = {per_worker}: "
            "a worker's processes are on one host"
        )
    read.finish()
    per_worker = per_worker or local_size
    return Surroundings(
        kind=kind,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_index=node_index,
        node_count=node_count,
        worker_index=rank // per_worker,
        worker_num=size // per_worker,
        gpu_per_worker=per_worker,
        master_addr=address,
        master_port=port,
    )


def _uneven(total: str, local_size: int, node_count: int | None = None) -> str:
    nodes = "nodes" if node_count is None else f"{node_count} nodes"
    return (
        f"{total} is not {nodes} × {local_size} processes as on this one; "
        "start the same number of processes on every node"
    )


def _first_host(read: VariableReader) -> str:
    name = read.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if not read.environ.get(name, "").strip():
        read.problem(f"{name} is missing, so the first host is unknown; MASTER_ADDR would do as well")
        return ""
    try:
        return expand_hosts(read.environ[name])[0]
    except ValueError as error:
        read.problem(f"{name}: {error}")
        return ""


def _tasks_here(read: VariableReader, size_name: str, size: int, nodes_name: str, node_count: int) -> int:
    """How many tasks every node of the step has."""
    name = read.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = read.environ.get(name) or str(size // node_count) + f"(x{node_count})"
    try:
        counts = expand_counts(text)
    except ValueError as error:
        read.problem(f"{name}: {error}")
        return 1
    if len(set(counts)) != 1 or len(counts) != node_count or sum(counts) != size:
        read.problem(
            f"{name} = {text!r} gives {counts} tasks, expected the same number on each of {nodes_name} = {node_count} "
            f"nodes and {size_name} = {size} together: srun --nodes={node_count} --ntasks-per-node=<n>"
        )
    return counts[0]
