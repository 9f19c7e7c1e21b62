"""How ranks talk: the process group with its deadline, and words that keep ranks from waiting at different places.

    Job        the default process group and the store under it; started by epl.init, adopted if the user has one
    Job.meet   "I am at KIND, in the user's file.py:12, with these bits": every rank says it before it waits on others;
               where the words differ all ranks raise the same error instead of hanging in unlike collectives
    speaking   turns what c10d raises (timed out, connection closed) into epl's errors, quoting who failed first

Words travel on a group of their own (Gloo, on the host), so they never mix with data in flight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from epl.cluster.bits import NUMBERS, pack_bits, unpack_bits
from epl.cluster.place import user_place
from epl.cluster.standstill import Standstill
from epl.cluster.surroundings import Surroundings
from epl.errors import CommunicationError, DeadlineError, PeerLostError, RanksDisagreeError

_WORD = 40  # int64 each: kind, sequence number, 6 × 63 bits of payload, then 256 bytes of text
_TEXT = (_WORD - 2 - NUMBERS) * 8
_stores: dict[tuple[str, int], TCPStore] = {}  # kept for the life of the process: rank 0's holds the server
_generation = 0  # the number of process groups this process has started; keeps their keys in the store apart


@dataclasses.dataclass(frozen=True)
class Said:
    """What every rank said when they met: a number of bits each, in rank order."""

    bits: tuple[int, ...]
    words: torch.Tensor = dataclasses.field(repr=False, compare=False)

    def place(self, rank: int) -> str:
        """Where a rank is in the user's code."""
        return _text_of(self.words[rank])[1]

    @property
    def union(self) -> int:
        result = 0
        for bits in self.bits:
            result |= bits
        return result


class Circle:
    """Ranks that say words to each other, on a group for words alone."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group, self.ranks = group, ranks
        self.met = 0
        """How often."""


class Meeting:
    """A word on its way; `wait()` returns what all ranks said, or raises if they are not at the same place."""

    def __init__(self, job: Job, circle: Circle, kind: str, place: str, own: torch.Tensor) -> None:
        self._job, self._circle, self._kind, self._place = job, circle, kind, place
        self._all = torch.empty(len(circle.ranks) * _WORD, dtype=torch.int64)
        self._own = own  # gloo reads it while the word travels
        self._number = job.standstill.call(circle.group)
        self._work = dist.all_gather_single(self._all, own, group=circle.group, async_op=True)

    def wait(self) -> Said:
        job, group = self._job, self._circle.group
        with speaking(job, f"{self._kind} ({self._place})"):
            job.standstill.wait(self._work, group, self._number, lambda: f"{self._kind}, at {self._place}")
        words = self._all.view(-1, _WORD)
        if not bool((words[:, :2] == words[0, :2]).all()):
            raise RanksDisagreeError(_disagreement(words, self._circle.ranks))
        return Said(tuple(unpack_bits(row) for row in words[:, 2 : 2 + NUMBERS].tolist()), words)


class Job:
    """The process group of this run, and the words over it."""

    def __init__(self, surroundings: Surroundings, device: torch.device, timeout: float) -> None:
        self.rank, self.world_size = surroundings.rank, surroundings.world_size
        self.device, self.timeout = device, datetime.timedelta(seconds=timeout)
        self.store: Store | None = None
        self.owns_group = not dist.is_initialized()
        self._groups: dict[object, dist.ProcessGroup] = {}
        if self.owns_group:
            self._start(surroundings)
        else:
            self._adopt(surroundings)
        self.standstill = Standstill(self.store, self.rank, self.world_size)  # on all ranks when the next line ends
        self.control = dist.new_group(backend="gloo", timeout=self.timeout)
        self._everyone = Circle(self.control, range(self.world_size))

    def _start(self, surroundings: Surroundings) -> None:
        global _generation
        _generation += 1
        self.store = PrefixStore(f"epl/{_restart_count()}/{_generation}", _store(surroundings, self.timeout))
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        with speaking(self, "epl.init()"):
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=self.world_size, timeout=self.timeout
            )

    def _adopt(self, surroundings: Surroundings) -> None:
        found = (dist.get_rank(), dist.get_world_size())
        expected = (surroundings.rank, surroundings.world_size)
        if found != expected:
            raise CommunicationError(
                "torch.distributed is initialized already and does not fit what epl found: expected rank "
                f"{expected[0]} of {expected[1]} ({surroundings.kind}), found rank {found[0]} of {found[1]}. "
                "Call epl.init() before torch.distributed.init_process_group, or leave the latter out."
            )

    def fits(self, surroundings: Surroundings, device: torch.device, timeout: float) -> bool:
        """Whether this is still the process group that these facts ask for."""
        alive = dist.is_initialized() and dist.get_world_size() == self.world_size
        return alive and (self.rank, self.world_size, self.device, self.timeout) == (
            surroundings.rank,
            surroundings.world_size,
            device,
            datetime.timedelta(seconds=timeout),
        )

    def meet(self, kind: str, bits: int = 0, *, place: str | None = None, circle: Circle | None = None) -> Meeting:
        """Say where this rank is; wait for the meeting before waiting on other ranks for anything else. `circle`: to whom, if not to all."""
        circle = circle or self._everyone
        circle.met += 1
        place = place if place is not None else user_place()
        word = torch.zeros(_WORD, dtype=torch.int64)
        word[0], word[1] = _kind_number(kind), circle.met
        word[2 : 2 + NUMBERS] = torch.tensor(pack_bits(bits), dtype=torch.int64)
        text = f"{kind}\n{place}".encode()[:_TEXT].ljust(_TEXT, b"\0")
        word[2 + NUMBERS :] = torch.frombuffer(bytearray(text), dtype=torch.int64)
        return Meeting(self, circle, kind, place, word)

    def circle(self, groups: Sequence[Sequence[int]]) -> Circle:
        """The one of these groups that this rank is in, for words among its ranks; all ranks ask together."""
        if len(groups) == 1:
            return self._everyone
        own = next(ranks for ranks in groups if self.rank in ranks)
        return Circle(self.group_among(groups, "gloo"), own)

    def gather(self, kind: str, value: object) -> list[object]:
        """`value` of every rank, in rank order; small Python values only."""
        self.meet(kind).wait()
        values: list[object] = [None] * self.world_size
        with speaking(self, kind):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, kind: str, value: object) -> object:
        """Rank 0's `value`, on every rank; small Python values only."""
        self.meet(kind).wait()
        box = [value]
        with speaking(self, kind):
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def check_same(self, kind: str, value: object, remedy: str) -> None:
        """Raise on every rank if ranks hold different values where they must hold the same."""
        values = self.gather(kind, value)
        if any(v != values[0] for v in values):
            found = "\n".join(f"  rank {rank}: {v}" for rank, v in enumerate(values))
            raise RanksDisagreeError(f"ranks differ in {kind}: expected the same everywhere, found\n{found}\n{remedy}")

    def group_among(self, groups: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
        """The one of these groups that this rank is in; made once for the same list, kept, and used by whoever asks for it.

        All ranks ask together, and use it in the same order.
        """
        key = (tuple(map(tuple, groups)), backend)
        if key not in self._groups:
            with speaking(self, "making process groups"):
                made = [dist.new_group(list(ranks), backend=backend, timeout=self.timeout) for ranks in groups]
            self._groups[key] = next(group for ranks, group in zip(groups, made, strict=True) if self.rank in ranks)
        return self._groups[key]

    def tell_failure(self, text: str) -> None:
        """Leave this rank's error where its peers will look when they lose it; never raises."""
        if self.store is not None:
            with contextlib.suppress(Exception):
                self.store.set(f"failure/{self.rank}", f"{time.time()}\n{text}")

    def tell_end(self) -> None:
        """Leave word that this rank's script has come to its end; never raises."""
        if self.store is not None:
            with contextlib.suppress(Exception):
                self.store.set(f"ended/{self.rank}", "")

    def ended_ranks(self) -> list[int]:
        """Ranks whose script has come to its end."""
        with contextlib.suppress(Exception):
            if self.store is not None:
                return [rank for rank in range(self.world_size) if self.store.check([f"ended/{rank}"])]
        return []

    def peer_failure(self, patience: float = 2.0) -> str:
        """The error of the rank that failed first, as it told it; empty if nobody did."""
        return _first_told(self.store, "failure", self.world_size, self.rank, patience)

    def close(self) -> None:
        """Give back what `Job` made; a process group of the user's own is left alone."""
        with contextlib.suppress(Exception):  # a peer that is gone already must not spoil a clean exit
            if self.owns_group and dist.is_initialized():
                dist.destroy_process_group()
            elif dist.is_initialized():
                dist.destroy_process_group(self.control)


@contextlib.contextmanager
def speaking(job: Job, what: str) -> Iterator[None]:
    """Inside, c10d's errors become epl's: who waited, where, for how long, and which rank failed first."""
    start = time.monotonic()
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, CommunicationError):
            raise
        raise _translate(job, what, time.monotonic() - start, error) from None  # c10d's own text says less


def _translate(job: Job, what: str, seconds: float, error: Exception) -> CommunicationError:
    text = str(error)
    me = f"rank {job.rank} of {job.world_size}"
    told = job.peer_failure()
    if told:
        return PeerLostError(f"{me} was in {what} when another rank failed:\n{told}")
    if "imed out" in text or "imeout" in text:
        silent = _silent_ranks(job, what)
        return DeadlineError(
            f"{me} waited {seconds:.0f} s in {what} and nobody answered (communication.timeout is "
            f"{job.timeout.total_seconds():g} s). {silent}Usual causes: a rank took another branch of the program, "
            "skipped a step, or is still computing; in the last case raise communication.timeout."
        )
    ended = job.ended_ranks()
    if ended:
        return PeerLostError(
            f"{me} was in {what}, but the script of rank {', '.join(map(str, ended))} has ended: it took fewer steps, or "
            "left out this call. Do what involves several ranks on every rank alike, the same number of times."
        )
    return PeerLostError(
        f"{me} was in {what} when the connection to another rank broke; that rank died without a Python error "
        f"(killed, out of memory?). Its log says more. ({text.splitlines()[0] if text else type(error).__name__})"
    )


def _silent_ranks(job: Job, what: str) -> str:
    """Who else waits, and so who does not: ranks that time out together tell each other where they are."""
    if job.store is None:
        return ""
    with contextlib.suppress(Exception):
        job.store.set(f"waiting/{job.rank}", what)
        time.sleep(min(2.0, job.timeout.total_seconds() / 4))
        waiting = {r: f"waiting/{r}" for r in range(job.world_size) if job.store.check([f"waiting/{r}"])}
        silent = [r for r in range(job.world_size) if r not in waiting]
        if silent:
            return f"Silent: rank {', '.join(map(str, silent))}. "
        places = "; ".join(f"rank {r} in {job.store.get(key).decode()}" for r, key in waiting.items())
        return f"All ranks wait, at different places: {places}. "
    return ""


def _first_told(store: Store | None, topic: str, world_size: int, own: int, patience: float) -> str:
    if store is None:
        return ""
    deadline = time.monotonic() + patience
    with contextlib.suppress(Exception):  # the store may have died with rank 0
        while True:
            told = [
                (store.get(f"{topic}/{rank}").decode(), rank)
                for rank in range(world_size)
                if rank != own and store.check([f"{topic}/{rank}"])
            ]
            if told:
                text, rank = min(told, key=lambda item: float(item[0].partition("\n")[0]))
                return f"rank {rank}: {text.partition(chr(10))[2]}"
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.1)
    return ""


def _disagreement(words: torch.Tensor, ranks: Sequence[int]) -> str:
    lines = []
    for rank, row in zip(ranks, words, strict=True):
        kind, place = _text_of(row)
        lines.append(f"  rank {rank}: {kind}, meeting {int(row[1])}, at {place or 'an unknown place'}")
    return (
        "ranks are at different places of the program; expected all of them at the same call, found\n"
        + "\n".join(lines)
        + "\nDo what involves several ranks on every rank alike (not under `if rank == 0:`), the same number of times."
    )


def _text_of(word: torch.Tensor) -> tuple[str, str]:
    """The kind and the place in a word."""
    text = word[2 + NUMBERS :].contiguous().view(torch.uint8).numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    kind, _, place = text.partition("\n")
    return kind, place


def _kind_number(kind: str) -> int:
    """A number that is the same for the same text in every process (hash() is not)."""
    return int.from_bytes(hashlib.blake2b(kind.encode(), digest_size=7).digest(), "little")


def _restart_count() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _store(surroundings: Surroundings, timeout: datetime.timedelta) -> Store:
    if surroundings.world_size == 1:
        return HashStore()  # one process: no port is opened
    key = (surroundings.master_addr, surroundings.master_port)
    if key not in _stores:
        agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            _stores[key] = TCPStore(
                host_name=key[0],
                port=key[1],
                world_size=None,
                is_master=surroundings.rank == 0 and not agent_hosts_it,
                timeout=timeout,
                wait_for_workers=False,
            )
        except (RuntimeError, dist.DistError) as error:
            raise CommunicationError(
                f"rank {surroundings.rank} of {surroundings.world_size} could not reach the store at {key[0]}:{key[1]} "
                f"({surroundings.kind}). Expected rank 0, or the launcher, to listen there. Check MASTER_ADDR and "
                f"MASTER_PORT, or start the script with epl-launch. ({str(error).splitlines()[0]})"
            ) from error
    return _stores[key]
