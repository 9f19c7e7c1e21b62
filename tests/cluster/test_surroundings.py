"""Detection of every environment, the traps between them, and variables that do not fit together."""

from __future__ import annotations

import os

import pytest

from epl.cluster.surroundings import DERIVED_PORTS, Surroundings, discover
from epl.errors import ClusterError

Env = dict[str, str]


def torchrun(rank: int = 3, size: int = 4, local_size: int = 2, **more: str) -> Env:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(size // local_size),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    } | more


def epl_launch(workers: int = 2, per_worker: int = 2, **more: str) -> Env:
    return torchrun(**more) | {
        "EPL_LAUNCH_NUM_WORKERS": str(workers),
        "EPL_LAUNCH_GPU_PER_WORKER": str(per_worker),
    }  # fmt: skip


SALLOC: Env = {  # a shell inside an allocation: no step
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SBATCH: Env = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}  # the batch script itself
SRUN: Env = SALLOC | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
MPI: Env = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Surroundings("single", 0, 1, 0, 1, 0, 1, 0, 1, 1, "127.0.0.1", 0)),
        ({"MASTER_ADDR": "elsewhere"}, Surroundings("single", 0, 1, 0, 1, 0, 1, 0, 1, 1, "127.0.0.1", 0)),
        (torchrun(), Surroundings("torchrun", 3, 4, 1, 2, 1, 2, 1, 2, 2, "10.0.0.1", 29500)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            Surroundings("torchrun", 1, 2, 1, 2, 0, 1, 0, 1, 2, "localhost", 1),
        ),
        (epl_launch(), Surroundings("epl-launch", 3, 4, 1, 2, 1, 2, 1, 2, 2, "10.0.0.1", 29500)),
        (SRUN, Surroundings("slurm", 3, 4, 1, 2, 1, 2, 1, 2, 2, "gpu01", 15000 + 4711)),
        (MPI | {"MASTER_PORT": "77"}, Surroundings("openmpi", 3, 4, 3, 4, 0, 1, 0, 1, 4, "127.0.0.1", 77)),
        (
            MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
            | {"MASTER_ADDR": "h", "MASTER_PORT": "7"},
            Surroundings("openmpi", 3, 4, 1, 2, 1, 2, 1, 2, 2, "h", 7),
        ),
    ],
)  # fmt: skip
def test_detects(environ: Env, expected: Surroundings) -> None:
    assert discover(environ) == expected


@pytest.mark.parametrize(
    ("what", "environ", "kind"),
    [
        ("torchrun in an salloc shell", SALLOC | torchrun(), "torchrun"),
        ("torchrun in a batch script", SBATCH | torchrun(), "torchrun"),
        ("srun torchrun, one per node", SRUN | torchrun(), "torchrun"),
        ("srun epl-launch", SRUN | epl_launch(), "epl-launch"),
        ("plain python in an salloc shell", SALLOC, "single"),
        ("plain python in a batch script", SBATCH, "single"),
        ("salloc's interactive step", SBATCH | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, "single"),
        ("batch step by its number", SBATCH | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, "single"),
        ("mpirun in a Slurm job: the daemons are a step", SRUN | MPI, "openmpi"),
        ("srun with MASTER_ADDR exported by hand", SRUN | {"MASTER_ADDR": "h"}, "slurm"),
        ("srun with WORLD_SIZE exported by hand", SRUN | {"WORLD_SIZE": "4"}, "slurm"),
        ("torchrun under mpirun", MPI | torchrun(), "torchrun"),
    ],
)
def test_traps(what: str, environ: Env, kind: str) -> None:
    assert discover(environ).kind == kind, what


def test_two_workers_of_epl_launch_on_one_machine() -> None:
    environ = epl_launch(LOCAL_WORLD_SIZE="4", LOCAL_RANK="3", GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    found = discover(environ)
    assert (found.worker_index, found.worker_num, found.gpu_per_worker) == (1, 2, 2)
    assert (found.node_index, found.node_count, found.local_size) == (0, 1, 4)


def test_slurm_job_variables_stand_in_for_those_of_the_step() -> None:
    old = {k: v for k, v in SRUN.items() if not k.startswith("SLURM_STEP")} | {"SLURM_STEPID": "0"}
    assert discover(old) == discover(SRUN)


def test_slurm_port() -> None:
    assert discover(SRUN | {"MASTER_PORT": "1234"}).master_port == 1234
    neighbours = [SRUN | {"SLURM_JOB_ID": str(n), "SLURM_STEP_ID": str(s)} for n in range(100) for s in range(3)]
    ports = [discover(environ).master_port for environ in neighbours]
    assert len(set(ports)) == len(ports)
    assert all(port in DERIVED_PORTS for port in ports)
    assert discover(SRUN | {"SLURM_JOB_ID": "123456789"}).master_port in DERIVED_PORTS


def test_slurm_master_address_may_be_given() -> None:
    assert discover(SRUN | {"MASTER_ADDR": "10.1.1.1"}).master_addr == "10.1.1.1"


def test_slurm_gpus_per_task() -> None:
    assert not discover(SRUN).own_device_only
    assert discover(SRUN | {"SLURM_GPUS_PER_TASK": "1"}).own_device_only
    assert discover(SRUN | {"SLURM_GPUS_PER_TASK": "a100:1"}).own_device_only
    assert not discover(SRUN | {"SLURM_GPUS_PER_TASK": "2"}).own_device_only


def test_openmpi_jobs_meet_at_their_own_port() -> None:
    first, second = (discover(MPI | {"PMIX_NAMESPACE": name}).master_port for name in ("prterun-1", "prterun-2"))
    assert first != second
    assert {first, second} <= set(DERIVED_PORTS)


def test_node_names() -> None:
    assert discover(SRUN).node_name("gpu02") == "node 1"
    assert discover(MPI).node_name("gpu02") == "gpu02"


def without(environ: Env, *names: str) -> Env:
    return {k: v for k, v in environ.items() if k not in names}


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE is missing", "MASTER_ADDR is missing", "MASTER_PORT is missing", "epl-launch"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE = '2', but RANK is missing", "unset WORLD_SIZE"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK = '1'", "RANK is missing"]),
        ({"TORCHELASTIC_RUN_ID": "x"}, ["RANK is missing", "WORLD_SIZE is missing"]),
        (torchrun(RANK="4"), ["RANK = 4 must be below WORLD_SIZE = 4"]),
        (torchrun(RANK="x"), ["RANK must be a whole number", "found 'x'"]),
        (torchrun(RANK="-1"), ["RANK", "found '-1'"]),
        (torchrun(WORLD_SIZE="0"), ["WORLD_SIZE", "from 1 on", "found '0'"]),
        (torchrun(WORLD_SIZE="2.5"), ["WORLD_SIZE", "found '2.5'"]),
        (torchrun(LOCAL_RANK="2"), ["LOCAL_RANK = 2 must be below LOCAL_WORLD_SIZE = 2"]),
        (torchrun(GROUP_RANK="2"), ["GROUP_RANK = 2 must be below GROUP_WORLD_SIZE = 2"]),
        (torchrun(RANK="4", LOCAL_RANK="2"), ["2 problems", "1. RANK = 4", "2. LOCAL_RANK = 2"]),
        (torchrun(LOCAL_WORLD_SIZE="3"), ["WORLD_SIZE = 4 is not 2 nodes × 3 processes"]),
        (torchrun(MASTER_PORT="99999"), ["MASTER_PORT", "found 99999"]),
        (torchrun(MASTER_PORT="x", WORLD_SIZE=""), ["MASTER_PORT", "found 'x'", "WORLD_SIZE is missing"]),
        (without(torchrun(), "LOCAL_WORLD_SIZE"), ["LOCAL_WORLD_SIZE is missing"]),
        (without(torchrun(), "LOCAL_WORLD_SIZE", "LOCAL_RANK"), ["2 problems", "LOCAL_RANK is", "LOCAL_WORLD_SIZE is"]),
        (torchrun(RANK="4", LOCAL_RANK=""), ["2 problems", "LOCAL_RANK is missing", "RANK = 4 must be below"]),
        (epl_launch(workers=2, per_worker=3), ["WORLD_SIZE = 4", "makes 6", "4 is not divisible by 3"]),
        (epl_launch(workers=3, per_worker=2), ["WORLD_SIZE = 4", "EPL_LAUNCH_NUM_WORKERS = 3", "makes 6"]),
        (epl_launch(workers=1, per_worker=4), ["LOCAL_WORLD_SIZE = 2 is not divisible", "GPU_PER_WORKER = 4"]),
        (without(epl_launch(), "EPL_LAUNCH_NUM_WORKERS"), ["EPL_LAUNCH_NUM_WORKERS is missing"]),
        ({"EPL_LAUNCH_GPU_PER_WORKER": "2"}, ["NUM_WORKERS is missing", "RANK is missing", "epl-launch again"]),
        (SRUN | {"SLURM_PROCID": "4"}, ["SLURM_PROCID = 4 must be below SLURM_STEP_NUM_TASKS = 4"]),
        (SRUN | {"SLURM_NODEID": "x"}, ["SLURM_NODEID", "found 'x'"]),
        (SRUN | {"SLURM_LOCALID": "2"}, ["SLURM_LOCALID = 2 must be below the tasks of this node = 2"]),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, ["[3, 1] tasks", "--ntasks-per-node"]),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "?"}, ["SLURM_STEP_TASKS_PER_NODE", "'?'"]),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu["}, ["SLURM_STEP_NODELIST", "'gpu['"]),
        (SRUN | {"WORLD_SIZE": "8"}, ["WORLD_SIZE = '8', but SLURM_STEP_NUM_TASKS = 4"]),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), ["NODELIST is missing", "MASTER_ADDR"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE is missing", "LOCAL_RANK is missing", "mpirun"]),
        (MPI | {"OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK = 4 must be below OMPI_COMM_WORLD_SIZE = 4"]),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ["MASTER_ADDR", "-x"]),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, ["OMPI_COMM_WORLD_SIZE = 4 is not nodes × 5"]),
    ],
)  # fmt: skip
def test_refused_with_found_values_and_remedy(environ: Env, parts: list[str]) -> None:
    with pytest.raises(ClusterError) as error:
        discover(environ)
    for part in parts:
        assert part in str(error.value)


def test_a_readable_error() -> None:
    with pytest.raises(ClusterError) as error:
        discover({"RANK": "2", "WORLD_SIZE": "two", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    assert str(error.value) == (
        "this process was started by torchrun (RANK is set), but: WORLD_SIZE must be a whole number from 1 on, found "
        "'two'\nRemedy: start with epl-launch or torchrun, which set all of them, or unset RANK, WORLD_SIZE and "
        "LOCAL_RANK."
    )


def test_reads_the_processes_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "EPL", "TORCHELASTIC")):
            monkeypatch.delenv(name)
    for name, value in torchrun().items():
        monkeypatch.setenv(name, value)
    assert discover().rank == 3
