"""The ranks of one model replica: how they agree before they wait for each other, and how values reach all of them."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist

from epl.cluster.communication import Job, speaking
from epl.errors import CommunicationError, RanksDisagreeError
from epl.graph.spec import Spec

_HASH_BITS = 38
_FLAGS = 3
_ALIGN = 16
_SHARING = "sharing values with every rank of the replica"


class Peers(Protocol):
    """What a step needs of the other ranks of its replica. Every rank calls the same methods in the same order."""

    ranks: tuple[int, ...]
    """Global ranks of the replica."""
    index: int
    """This rank among them."""
    home: int
    """The one among them where the loop's own code on lazy values runs."""

    @property
    def size(self) -> int:
        """How many they are."""

    def agree(self, kind: str, bits: int, rows: int, flags: int) -> tuple[tuple[int, ...], int]:
        """The rows of every replica, and the union of the flags in this one; an error on all ranks unless all are at this call,
        those of a replica with the same rows and bits."""

    def share(self, values: Sequence[torch.Tensor] | None, specs: Sequence[Spec]) -> list[torch.Tensor]:
        """Home's values, on every rank."""

    def push(self, values: Sequence[tuple[int, torch.Tensor]] | None) -> list[tuple[int, torch.Tensor]]:
        """Home's numbered values, on every rank; only home knows how many there are."""

    def add_up(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums over the ranks."""

    def exchange(self, value: object) -> list[object]:
        """A small Python object of every rank, by index."""

    def break_off(self, error: BaseException) -> None:
        """This rank has raised where others wait for it: they are told why, and it takes no further part."""


class RankPeers:
    """Peers that are processes."""

    def __init__(self, job: Job, replicas: Sequence[Sequence[int]], home: int) -> None:
        self._job, self._replicas = job, replicas
        self.ranks = next(tuple(ranks) for ranks in replicas if job.rank in ranks)
        self.index, self.home = self.ranks.index(job.rank), home
        self.data: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        if self.size > 1:
            self.data = job.group_among(replicas)
            self._control = self.data if job.device.type == "cpu" else job.group_among(replicas, "gloo")
        self._pushed: tuple[Spec, ...] = ()  # what was pushed last, as every rank knows
        self._broken = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def agree(self, kind: str, bits: int, rows: int, flags: int) -> tuple[tuple[int, ...], int]:
        if self._broken:
            raise CommunicationError(
                f"{kind}: an earlier step of this model raised on rank {self._job.rank} ({self._broken}) while the other ranks of the "
                "replica waited for it, so they cannot go on together. Mend the cause and start the job again."
            )
        word = bits & (1 << _HASH_BITS) - 1
        everyone = self._job.meet(kind, (rows << _HASH_BITS | word) << _FLAGS | flags).wait()
        said = everyone.bits
        for ranks in self._replicas:
            if len({said[rank] >> _FLAGS for rank in ranks}) > 1:
                raise RanksDisagreeError(
                    _disagreement(kind, {r: (said[r] >> _FLAGS, everyone.place(r)) for r in ranks})
                )
        union = 0
        for rank in self.ranks:
            union |= said[rank] & (1 << _FLAGS) - 1
        return tuple(said[ranks[0]] >> _FLAGS + _HASH_BITS for ranks in self._replicas), union

    def share(self, values: Sequence[torch.Tensor] | None, specs: Sequence[Spec]) -> list[torch.Tensor]:
        if self.data is None:
            assert values is not None
            return list(values)
        buffer, rooms = _rooms(specs, self._job.device)
        if values is not None:
            for room, value in zip(rooms, values, strict=True):
                room.copy_(value.detach())
        self._broadcast(buffer)
        return list(values) if values is not None else rooms

    def push(self, values: Sequence[tuple[int, torch.Tensor]] | None) -> list[tuple[int, torch.Tensor]]:
        """In one message, if they have the forms of the last time; else that is told first."""
        if self.data is None:
            assert values is not None
            return list(values)
        specs = self._pushed if values is None else tuple(Spec.of(value) for _, value in values)
        told = 0 if values is None or _alike(specs, self._pushed) else 1
        if not told:
            specs = self._pushed
        buffer, rooms = _rooms([_numbers(1 + len(self._pushed)), *self._pushed], self._job.device)
        if values is not None and not told:
            rooms[0].copy_(torch.tensor([0, *(number for number, _ in values)]))
            for room, (_, value) in zip(rooms[1:], values, strict=True):
                room.copy_(value.detach())
        elif values is not None:
            rooms[0][0] = 1
        self._broadcast(buffer)
        if int(rooms[0][0].item()) == 0:
            numbers = rooms[0][1:].tolist()
            return list(values) if values is not None else list(zip(numbers, rooms[1:], strict=True))
        box: list[object] = [None if values is None else [(s.shape, s.dtype) for s in specs]]
        with speaking(self._job, _SHARING):
            dist.broadcast_object_list(box, group=self._control, group_src=self.home)
        forms = cast("list[tuple[torch.Size, torch.dtype]]", box[0])
        self._pushed = tuple(Spec(shape, (), dtype, self._job.device, False) for shape, dtype in forms)
        return self.push(values)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        with speaking(self._job, _SHARING):
            dist.broadcast(buffer, group=self.data, group_src=self.home)

    def add_up(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.data is None:
            return list(tensors)
        with speaking(self._job, "adding up over the ranks of the replica"):
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.data)
        return list(tensors)

    def exchange(self, value: object) -> list[object]:
        if self._control is None:
            return [value]
        values: list[object] = [None] * self.size
        with speaking(self._job, "exchanging values with the ranks of the replica"):
            dist.all_gather_object(values, value, group=self._control)
        return values

    def break_off(self, error: BaseException) -> None:
        if self.size > 1 and not isinstance(error, CommunicationError):
            self._broken = "".join(traceback.format_exception_only(error)).strip()
            self._job.tell_failure("".join(traceback.format_exception(error)).rstrip())


def _numbers(count: int) -> Spec:
    return Spec(torch.Size([count]), (1,), torch.int64, torch.device("cpu"), False)


def _alike(a: Sequence[Spec], b: Sequence[Spec]) -> bool:
    return [(s.shape, s.dtype) for s in a] == [(s.shape, s.dtype) for s in b]


def _disagreement(kind: str, words: Mapping[int, tuple[int, str]]) -> str:
    found = "\n".join(
        f"  rank {rank}: {word >> _HASH_BITS} rows, checksum {word & (1 << _HASH_BITS) - 1:x}, at {place}"
        for rank, (word, place) in words.items()
    )
    return (
        f"{kind}: the ranks of a model replica must do the same with the same rows, since they compute one model; found\n{found}\n"
        "Where the rows are as many, other operations were recorded on the model's outputs, or inputs of the model or tensors beside its "
        "outputs (targets, noise) differ. Give every rank of a replica the same batches (a loader passed to epl.parallelize does), the "
        "same seed for what is drawn, and the same code, not under `if rank == 0:`. What a module leaves in an attribute or a hook exists "
        "only on the rank that computes it: return it from forward."
    )


def _rooms(specs: Sequence[Spec], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One buffer for all values, and the place of each in it."""
    offsets, size = [], 0
    for spec in specs:
        offsets.append(size)
        size += -(-spec.nbytes // _ALIGN) * _ALIGN
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer, [
        buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
        for offset, spec in zip(offsets, specs, strict=True)
    ]
