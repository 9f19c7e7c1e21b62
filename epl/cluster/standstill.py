"""Ranks that wait for each other at different places: noticed while they wait, at no cost to those who do not have to.

    rank 0   waits in call 7 of group A (the loop reads split logits)      has made 12 calls of group B
    rank 1   waits in call 13 of group B (the next step)                   has made 6 calls of group A

Where ranks say a word before they wait (communication.py), one that is elsewhere is noticed at once. Some collectives are too many
for a word before each: those inside split parts and in the loop on split values. Who waits for longer than usual writes down in the
store for what, and reads what the others have written. A rank is stuck if somebody it waits for has not made that call, and is stuck, too.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from epl.errors import RanksDisagreeError

_PATIENCE = 2.0
"""Seconds before a wait is told of, and between two looks at the others; longer where these are many."""
_MANY = 64
_NOT_YET = "Operation timed out!"
"""What c10d says of a wait that was given up, as opposed to a call that has failed: it can be waited for again."""


@dataclass(frozen=True)
class Waiting:
    """What one rank waits for: call `number` of a group."""

    wait: int
    """The number of this wait on that rank."""
    group: str
    number: int
    members: Sequence[int]
    made: Mapping[str, int]
    """How many calls of each group it has made."""
    what: str


class Standstill:
    """The calls of this rank's groups, and how it waits for them."""

    def __init__(self, store: Store | None, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._patience = _PATIENCE * (1 + world_size // _MANY)
        self._keys = [f"standstill/{each}" for each in range(world_size)]
        if store is not None:
            store.set(self._keys[rank], "")  # before anybody looks
        self._made: Counter[str] = Counter()
        self._waits = 0

    def call(self, group: dist.ProcessGroup) -> int:
        """A call of this group is about to be made: its number."""
        self._made[group.group_name] += 1
        return self._made[group.group_name]

    def wait(self, work: dist.Work, group: dist.ProcessGroup, number: int, what: Callable[[], str]) -> None:
        """Until the call has ended; RanksDisagreeError on all ranks that wait for each other in vain."""
        if self._store is None:  # the process group is the user's own
            work.wait()
            return
        told, seen = False, None
        try:
            while not _ends(work, self._patience):
                if not told:
                    told = True
                    self._tell(group, number, what())
                found = self._stuck()
                if found and found == seen:
                    time.sleep(1.5 * self._patience)  # the others look once more, too, before this one is gone
                    raise RanksDisagreeError(_describe(found))
                seen = found
        finally:
            if told:
                self._write("")

    def _tell(self, group: dist.ProcessGroup, number: int, what: str) -> None:
        self._waits += 1
        members = dist.get_process_group_ranks(group)
        own = Waiting(self._waits, group.group_name, number, members, dict(self._made), what)
        self._write(json.dumps(asdict(own)))

    def _stuck(self) -> dict[int, Waiting]:
        """The ranks that are stuck, if this one is."""
        assert self._store is not None
        try:
            written = dict(enumerate(self._store.multi_get(self._keys)))
        except (RuntimeError, dist.DistError):  # the store is gone with its rank: the wait itself will say so
            return {}
        found = stuck({rank: Waiting(**json.loads(text)) for rank, text in written.items() if text})
        return found if self._rank in found else {}

    def _write(self, text: str) -> None:
        assert self._store is not None
        with contextlib.suppress(RuntimeError, dist.DistError):  # as above; and it must not hide what is being raised
            self._store.set(self._keys[self._rank], text)


def stuck(waiting: Mapping[int, Waiting]) -> dict[int, Waiting]:
    """Those of the waiting ranks that wait, directly or not, for one that waits for them."""
    left = dict(waiting)
    while True:
        free = [
            rank
            for rank, own in left.items()
            if not any(left[other].made.get(own.group, 0) < own.number for other in own.members if other in left)
        ]
        if not free:
            return left
        for rank in free:
            del left[rank]


def _ends(work: dist.Work, seconds: float) -> bool:
    """Whether it ends in time; raises what the call has failed with."""
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError as error:
        if _NOT_YET not in str(error):
            raise
        return False
    return True


def _describe(found: Mapping[int, Waiting]) -> str:
    lines = [f"  rank {rank}: {own.what}" for rank, own in sorted(found.items())]
    return (
        "ranks wait for each other at different places of the program; expected all of them at the same call, found\n"
        + "\n".join(lines)
        + "\nDo what involves several ranks on every rank alike (not under `if rank == 0:`), the same number of times."
    )
