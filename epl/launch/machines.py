"""What the launchers of one job tell each other: one store, hosted by machine 0.

    hello/i            the options of machine i, which must agree
    beat/i             counts up while machine i lives
    ready/k/i          machine i is ready for attempt k
    store/k            where the ranks of attempt k meet, said by machine 0 when all are ready
    end/k/i            how attempt k ended on machine i: "" or a Cause
    down/k             somebody's attempt k ended badly: end yours too
    bye/i              machine i has read all it needs

torch offers two rendezvous: the dynamic one orders machines by name and process number, the static one tells nobody
when a machine fails. A job of one machine uses the same words, on a store that lives in this process only.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from epl.errors import LaunchError, list_problems
from epl.launch.options import Options
from epl.launch.outcome import Cause
from epl.launch.stop import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

MEETING_TIMEOUT = 600.0  # machines are started by hand or by a scheduler, not in the same second
SILENCE = 60.0  # a machine that has not counted up for so long is lost
INTERVAL = 0.05
LOOPBACK = "127.0.0.1"
_T = TypeVar("_T")


class StoppedError(Exception):
    """Somebody asked this launcher to stop while it waited."""


class MachineLostError(Exception):
    """Another machine's launcher does not answer any more."""

    def __init__(self, machine: int) -> None:
        super().__init__(f"the launcher of machine {machine} does not answer any more")
        self.machine = machine


class Machines:
    """The launchers of one job, as seen by the one that runs here."""

    def __init__(
        self, store: Store, rank: int, count: int, stop: StopRequest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank, self.count = rank, count
        self._store = store
        self._stop = stop
        self._clock = clock
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._beat_at = -1.0

    def agree(self, terms: dict[str, str]) -> None:
        """Wait for every machine, and refuse a job for which they were given different options."""
        if self._add(f"joined/{self.rank}") > 1:
            raise LaunchError(
                f"two launchers say --machine_rank {self.rank}; give each machine its own number, 0 to {self.count - 1}"
            )
        self._set(f"hello/{self.rank}", json.dumps(terms))
        texts = self._collect("hello", patience=MEETING_TIMEOUT)
        problems = [
            f"{name}: machine 0 has {own}, machine {machine} has {theirs[name]}; start all machines alike"
            for name, own in json.loads(texts[0]).items()
            for machine, theirs in enumerate(map(json.loads, texts))
            if theirs[name] != own
        ]
        if problems:
            self.leave()
            raise LaunchError(list_problems("the machines were started differently", problems))

    def meet(self, attempt: int, address: str | None) -> str:
        """Where the ranks of `attempt` meet; machine 0 brings the address, the others get it when all are ready."""
        self._set(f"ready/{attempt}/{self.rank}", "1")
        self._collect(f"ready/{attempt}", patience=MEETING_TIMEOUT)
        if address is not None:
            self._set(f"store/{attempt}", address)
        return self._wait_for(f"store/{attempt}", 0, patience=SILENCE).decode()

    def is_down(self, attempt: int) -> bool:
        """Whether another machine's ranks failed, or another machine is lost."""
        self._beat()
        return self._has(f"down/{attempt}")

    def exchange(self, attempt: int, cause: Cause | None) -> list[Cause]:
        """Say how `attempt` ended here, and hear how it ended everywhere."""
        self._set(f"end/{attempt}/{self.rank}", cause.dumps() if cause else "")
        if cause:
            self._set(f"down/{attempt}", "1")
        return [Cause.loads(text) for text in self._collect(f"end/{attempt}", patience=None) if text]

    def leave(self) -> None:
        """Say goodbye; machine 0, which hosts the store, lets the others go first."""
        try:
            self._set(f"bye/{self.rank}", "1")
            if self.rank == 0:
                self._collect("bye", patience=5.0)
        except (MachineLostError, LaunchError, StoppedError):
            pass  # gone already; there is nothing left to tell

    def _collect(self, key: str, patience: float | None) -> list[bytes]:
        return [self._wait_for(f"{key}/{machine}", machine, patience) for machine in range(self.count)]

    def _wait_for(self, key: str, machine: int, patience: float | None) -> bytes:
        """The value of `key`, which `machine` sets. Short looks, so that Ctrl-C is heard between them."""
        began = self._clock()
        while not self._has(key):
            if self._stop.signal is not None and not key.startswith(("end/", "bye/")):
                raise StoppedError
            if patience is not None and self._clock() - began > patience:
                raise LaunchError(
                    f"machine {machine} did not come within {patience:.0f} s; start `epl-launch … --machine_rank "
                    f"{machine}` there, with the same --machine_list"
                )
            self._beat()
            time.sleep(INTERVAL)
        return self._call(lambda: self._store.get(key))

    def _beat(self) -> None:
        """Count up, and notice who has stopped counting."""
        now = self._clock()
        if now - self._beat_at < 1.0 or self.count == 1:
            return
        self._beat_at = now
        self._add(f"beat/{self.rank}")
        for machine in range(self.count):
            key = f"beat/{machine}"
            if machine == self.rank or not self._has(key):
                continue
            beat = self._call(lambda key=key: self._store.get(key))  # type: ignore[misc]
            if machine not in self._heard or self._heard[machine][0] != beat:
                self._heard[machine] = (beat, now)
            elif now - self._heard[machine][1] > SILENCE and not self._has(f"bye/{machine}"):
                raise MachineLostError(machine)

    def _has(self, key: str) -> bool:
        return self._call(lambda: self._store.check([key]))

    def _set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def _add(self, key: str) -> int:
        return self._call(lambda: self._store.add(key, 1))

    def _call(self, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except RuntimeError as error:  # torch's network and store errors are RuntimeErrors
            raise MachineLostError(0) from error


def join(options: Options, stop: StopRequest) -> Machines:
    """Meet the other machines' launchers at the first entry of --machine_list (alone: at once)."""
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if options.machine_count == 1:
        return Machines(HashStore(), 0, 1, stop)
    meeting = options.machines[0]
    if options.machine_rank == 0:
        listener = listen(meeting.host, meeting.port)
        store = TCPStore(
            meeting.host, meeting.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    else:
        _wait_until_open(meeting.host, meeting.port, stop)
        store = TCPStore(
            meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=SILENCE)
        )
    machines = Machines(store, options.machine_rank, options.machine_count, stop)
    machines.agree(
        {
            "--num_workers": str(options.num_workers),
            "--gpu_per_worker": str(options.gpu_per_worker),
            "--max_restarts": str(options.max_restarts),
            "--machine_list": ",".join(map(str, options.machines)),
        }
    )
    return machines


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at `host` (everywhere, if only others know it by that name: NAT); port 0: any free one."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            server.bind(where)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            server.bind(("", port))
        server.listen(1024)
    except OSError as error:
        server.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise LaunchError(
            f"port {port} of {host} is taken by another program; the machines must agree on it, so it cannot be chosen "
            f"freely: name another port in the first entry of --machine_list, on every machine"
        ) from error
    return server


def _wait_until_open(host: str, port: int, stop: StopRequest) -> None:
    """torch's client blocks, deaf to Ctrl-C, and warns at every try; so knock first."""
    began = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError as error:
            if stop.signal is not None:
                raise StoppedError from error
            if time.monotonic() - began > MEETING_TIMEOUT:
                raise LaunchError(
                    f"nobody answers at {host}:{port} ({error}); start the launcher of machine 0 there, or correct the "
                    f"first entry of --machine_list"
                ) from error
            time.sleep(4 * INTERVAL)
