"""`epl.init()` and `Env`: what this process knows about the run it is part of."""

from __future__ import annotations

import atexit
import contextlib
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from epl.cluster.cluster import Cluster, count_cuda_devices, make_cluster, number_nodes
from epl.cluster.communication import Job, speaking
from epl.cluster.quiet import wait_for_gloo_threads
from epl.cluster.surroundings import Surroundings, discover
from epl.cluster.topology import Topology
from epl.cluster.topology import setup_process_groups as make_topology
from epl.config import Config
from epl.errors import ClusterError, NotInitializedError, PlanError, UsageError
from epl.graph import Annotation, registry
from epl.launch.failure import record_failure
from epl.plan.plan import Plan
from epl.report.log import set_up_log


class Env:
    """What this process knows: `config`, `cluster`, and after `epl.init()` how to talk to the other ranks.

    `Env.get()` works before `epl.init()` too: it then gives what was discovered, and the default settings.
    """

    _current: Env | None = None

    def __init__(self, config: Config, cluster: Cluster, job: Job | None = None) -> None:
        self.config, self.cluster = config, cluster
        self.topology: Topology | None = None
        self.plan: Plan | None = None
        """The plan of the model that was parallelized last."""
        self._job = job
        self._communicators: list[dist.ProcessGroup] = []
        self._at_close: list[Callable[[], None]] = []

    @classmethod
    def get(cls) -> Env:
        """The environment of this process."""
        if cls._current is None:
            config = Config()
            return cls(config, _describe(discover(), config))
        return cls._current

    @property
    def initialized(self) -> bool:
        """Whether `epl.init()` has been called."""
        return self._job is not None

    def job(self, what: str) -> Job:
        """The process group of this run; `what` is the call that needs it, for the error if there is none."""
        if self._job is None:
            raise NotInitializedError(
                f"{what} talks to the other ranks: call epl.init() first, at the top of the script"
            )
        return self._job

    def communicators(self) -> list[dist.ProcessGroup]:
        """`communication.num_communicators` groups over all ranks, made when first needed; all ranks call it together."""
        job = self.job("a gradient reducer")
        while len(self._communicators) < self.config.communication.num_communicators:
            with speaking(job, "making a process group"):
                self._communicators.append(dist.new_group(timeout=job.timeout))
        return self._communicators

    def at_close(self, undo: Callable[[], None]) -> None:
        """Run `undo` when the environment is replaced: `epl.init()` twice leaves nothing of the first run behind."""
        self._at_close.append(undo)

    def close(self, *, keep_job: bool = False) -> None:
        """Take epl off everything it was put on, and end the process group it started."""
        while self._at_close:
            self._at_close.pop()()
        if self.topology is not None:
            self.topology.destroy()
            self.topology = None
        if self._job is not None and not keep_job:
            self._job.close()
        elif self._communicators and dist.is_initialized():
            for group in self._communicators:
                dist.destroy_process_group(group)
        self._communicators = []
        registry.reset()


def init(config: Config | None = None) -> None:
    """Find out what this process is part of, and join the other ranks. Call it once, at the top of the script.

    Started by `epl-launch`, torchrun, Slurm or OpenMPI it finds its rank by itself; started plainly it is a run of one.
    A second call starts anew: settings, annotations and models of the first are forgotten.
    """
    if config is not None and not isinstance(config, Config):
        raise UsageError(
            f"epl.init takes an epl.Config or nothing, found {type(config).__name__}: epl.init(epl.Config({{…}}))"
        )
    config = config if config is not None else Config()
    surroundings = discover()
    registry.refuse_inside_scope("epl.init()")
    cluster, problem = _find_cluster(surroundings, config)
    job = _job_for(surroundings, cluster.device, config.communication.timeout)
    set_up_log(surroundings.rank)
    nodes = _agree(job, surroundings, config, problem)
    Env._current = Env(config, _describe(surroundings, config, node_of_rank=nodes), job)
    if cluster.device.type == "cuda":
        torch.cuda.set_device(cluster.device)
    if cluster.world_size > 1:
        registry.on_forward_scope = _refuse_forward_scope
        registry.devices = cluster.world_size
    _watch_for_failure()


def setup_process_groups(axes: Sequence[tuple[str, float]]) -> Topology:
    """The topology with these axes, outermost first, kept in `Env.get().topology`; every rank gives the same list.

        epl.setup_process_groups([("pipe", 2), ("tensor", 2), ("data", world_size / 4)])

    Usable alone: a process group that the script has made itself (`torch.distributed.init_process_group`) is adopted.
    A second call replaces the first topology.
    """
    if not Env.get().initialized and dist.is_initialized():
        init()
    env = Env.get()
    job = env.job("epl.setup_process_groups")
    topology = make_topology(axes, cluster=env.cluster, job=job)
    if env.topology is not None:
        env.topology.destroy()
    env.topology = topology
    return topology


def _refuse_forward_scope(annotation: Annotation) -> None:
    raise PlanError(
        f"the scope {annotation.title} was entered inside the forward of a model that epl.parallelize did not cut into stages: nothing "
        "would come of it. Give the model to epl.parallelize, and let the scope's name and count stand in the source of its "
        "forward, or set pipeline.num_stages. On one device it simply runs."
    )


def _describe(surroundings: Surroundings, config: Config, **known: Any) -> Cluster:
    return make_cluster(
        surroundings,
        host=socket.gethostname(),
        cuda_devices=count_cuda_devices(),
        run_visible_devices=config.cluster.run_visible_devices,
        devices_per_node=config.cluster.devices_per_node,
        **known,
    )


def _find_cluster(surroundings: Surroundings, config: Config) -> tuple[Cluster, str]:
    """The cluster, or what is wrong here: it is told to all ranks first, so that none waits for this one."""
    try:
        return _describe(surroundings, config), ""
    except ClusterError as error:
        return make_cluster(surroundings), str(error)


def _job_for(surroundings: Surroundings, device: torch.device, timeout: float) -> Job:
    """The job of the environment before, if it still fits (groups the user made on it stay good), else a new one."""
    before = Env._current
    job = before._job if before is not None else None
    fits = job is not None and job.fits(surroundings, device, timeout)
    if before is not None:
        before.close(keep_job=fits)
        Env._current = None
    return job if job is not None and fits else Job(surroundings, device, timeout)


def _agree(job: Job, surroundings: Surroundings, config: Config, problem: str) -> tuple[int, ...]:
    """Tell each other what is wrong and where everybody is; the node of every rank."""
    node = surroundings.node_name(socket.gethostname())
    said: list[Any] = job.gather("epl.init()", (problem, node))
    problems = list(dict.fromkeys(problem for problem, _ in said if problem))
    if problems:
        raise ClusterError("\n".join(problems))
    job.check_same(
        "epl.Config", config.to_dict(), "Give every rank the same settings (EPL_* variables differ per host?)."
    )
    return number_nodes([node for _, node in said])


_hooks_set = False
_failed = False


def _watch_for_failure() -> None:
    """When this rank raises, its peers and the launcher learn why; when it ends, the process group ends with it."""
    global _hooks_set
    if _hooks_set:
        return
    _hooks_set = True
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        job = Env._current._job if Env._current is not None else None
        if job is not None:
            job.tell_failure("".join(traceback.format_exception(kind, error, trace)).rstrip())
        record_failure(error)
        before(kind, error, trace)

    sys.excepthook = tell
    atexit.register(_end)


def _end() -> None:
    if Env._current is not None:
        if Env._current._job is not None and not _failed:
            Env._current._job.tell_end()
        with contextlib.suppress(Exception):  # at exit nobody is left to tell
            Env._current.close()
        Env._current = None
        wait_for_gloo_threads()
