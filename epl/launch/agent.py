"""One attempt on this machine, carried out by torch.distributed.elastic's agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from epl.launch.logs import JobLogs
from epl.launch.machines import listen
from epl.launch.options import Options

# What elastic reads from its environment, ours while we run an attempt, and that of ranks which start it again.
ELASTIC_SETTINGS = {
    "TORCH_ELASTIC_WORKER_IDENTICAL": "1",  # rank = machine × local size + local rank, with no store to ask
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # signals are ours (stop.py)
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a torchrun inside a rank: a store per attempt, as ours (below)
}
MONITOR_INTERVAL = 0.1


@dataclass(frozen=True)
class Attempt:
    """One try to run the job: its number, the command and variables of its ranks, where they meet, where they log."""

    number: int
    command: list[str]
    variables: Mapping[str, str]
    address: tuple[str, int]
    logs: JobLogs


def host_rank_store(host: str) -> TCPStore:
    """A store for the ranks of one attempt, at a port that the system chose and that is held from this moment on.

    Every attempt has its own: ranks that find keys of an attempt before theirs connect to processes that are gone
    (measured with a common store: 3 of 10 restarts came through at once; with one per attempt: 10 of 10).
    """
    listener = listen(host, 0)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def run_attempt(options: Options, attempt: Attempt, must_end: Callable[[], bool]) -> dict[int, int]:
    """The agent's exit codes of the ranks that failed; empty if all succeeded or were ended because of `must_end`."""
    spec = WorkerSpec(
        role="rank",
        local_world_size=options.local_size,
        entrypoint=attempt.command[0],
        args=tuple(word.replace("$", "$$") for word in attempt.command[1:]),  # elastic expands ${local_rank} and $$
        rdzv_handler=_Rendezvous(options, attempt, must_end),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL,
    )
    # No exit barrier of its own: launchers wait for each other in Machines.exchange, where Ctrl-C is heard.
    agent = LocalElasticAgent(spec, logs_specs=_RankLogs(options, attempt), exit_barrier_timeout=0.01)
    result = agent.run()
    if result is None:
        return {}
    return {rank: failure.exitcode for rank, failure in result.failures.items()}


class _Rendezvous(RendezvousHandler):
    """Gives this machine its place, in the order of --machine_list; asks the agent to end its ranks when it must.

    The agent looks at `num_nodes_waiting` between its checks of the ranks; told that somebody waits, it ends the ranks
    and comes for the next rendezvous, which is refused, and returns.
    """

    def __init__(self, options: Options, attempt: Attempt, must_end: Callable[[], bool]) -> None:
        self._options = options
        self._attempt = attempt
        self._must_end = must_end
        self._used = False

    def get_backend(self) -> str:
        return "epl-launch"

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of the launcher's store, which holds its port already and does not die with rank 0."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._used or self._must_end():
            raise RendezvousGracefulExitError("this attempt is over")
        self._used = True
        return RendezvousInfo(
            HashStore(),
            self._options.machine_rank,
            self._options.machine_count,
            RendezvousStoreInfo(*self._attempt.address),
        )

    def num_nodes_waiting(self) -> int:
        return int(self._must_end())

    def is_closed(self) -> bool:
        return self._used

    def set_closed(self) -> None:
        self._used = True

    def get_run_id(self) -> str:
        return "epl-launch"

    def shutdown(self) -> bool:
        return True


class _RankLogs(LogsSpecs):
    """Makes each rank's directory, and adds our variables to elastic's."""

    def __init__(self, options: Options, attempt: Attempt) -> None:
        super().__init__(log_dir=str(attempt.logs.root))
        self._options = options
        self._attempt = attempt

    @property
    def root_log_dir(self) -> str:
        return str(self._attempt.logs.root)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        files = {local: self._attempt.logs.of(self._attempt.number, int(env["RANK"])) for local, env in envs.items()}
        for local, env in envs.items():
            files[local].directory.mkdir(parents=True)
            env.update(self._attempt.variables)
            env["TORCHELASTIC_ERROR_FILE"] = str(files[local].error.resolve())
            # To elastic every attempt is a first one; scripts that count restarts mean ours.
            env["TORCHELASTIC_RESTART_COUNT"] = str(self._attempt.number)
            env["TORCHELASTIC_MAX_RESTARTS"] = str(self._options.max_restarts)
        return LogsDest(
            # The keeper writes the logs: the agent leaves the files of ranks that ended by themselves open.
            stdouts=dict.fromkeys(files, ""),
            stderrs=dict.fromkeys(files, ""),
            # Not error.json: the agent would stumble over one that was cut off; outcome.py reads them.
            error_files=dict.fromkeys(files, os.devnull),
        )
