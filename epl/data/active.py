"""Which batch the training loop is working on, told by the loaders that yielded it.

The batch in force is the one yielded last, among iterators that still run:

    for x in train:            # train's batch is in force
        for v in valid: ...    # valid's, while this loop runs
        ...                    # train's again

An iterator that has ended is forgotten. One that was dropped before its end (`next(iter(loader))`, `break`) counts as
long as no other runs, since its batch may still be in use.
"""

from __future__ import annotations

import dataclasses
import itertools

from epl.data.share import BatchShare


@dataclasses.dataclass(eq=False)
class Running:
    """One iterator's word: when it yielded last and before that, and how the last batch is divided."""

    before: int
    last: int
    share: BatchShare | None = None


class ActiveBatches:
    """The iterators that run, in the order in which they yielded."""

    def __init__(self) -> None:
        self._clock = itertools.count()
        self._running: list[Running] = []
        self._dropped: Running | None = None

    def start(self) -> Running:
        """A new iterator begins; it counts from its first batch on."""
        now = next(self._clock)
        return Running(before=now, last=now)

    def yielded(self, running: Running, share: BatchShare) -> None:
        """This iterator hands out a batch."""
        running.before, running.last, running.share = running.last, next(self._clock), share
        if running in self._running:
            self._running.remove(running)
        self._running.append(running)
        self._dropped = None

    def ended(self, running: Running, *, exhausted: bool) -> None:
        """This iterator is at its end, or nobody holds it any more."""
        if running not in self._running:
            return
        self._running.remove(running)
        if not self._running:
            self._dropped = None if exhausted else running

    def share(self) -> BatchShare | None:
        """The division of the batch in force."""
        running = self._in_force()
        return running.share if running is not None else None

    def number(self) -> int:
        """A number that the batch in force has alone; -1 without one."""
        running = self._in_force()
        return running.last if running is not None else -1

    def _in_force(self) -> Running | None:
        return self._running[-1] if self._running else self._dropped

    def disagreeing(self) -> tuple[BatchShare, ...]:
        """The divisions of the batches of this step (loaders that are zipped), if they are not all the same."""
        if not self._running:
            return ()
        newest = self._running[-1]
        # What was yielded since the newest one's previous batch belongs to the same step; older batches do not.
        step = [r.share for r in self._running if r.last > newest.before and r.share is not None]
        return () if _proportional(step) else tuple(step)


def _proportional(shares: list[BatchShare]) -> bool:
    """Divisions into the same fractions weigh alike, whatever the batch sizes."""
    first = shares[0]
    return all([a * other.total for a in first.rows] == [b * first.total for b in other.rows] for other in shares[1:])


_batches = ActiveBatches()  # of this process: a loop and its loaders live in one


def active_batches() -> ActiveBatches:
    """The iterators of this process."""
    return _batches


def active_share() -> BatchShare | None:
    """How the batch that the loop works on is divided; None without a divided loader."""
    return _batches.share()


def disagreeing_shares() -> tuple[BatchShare, ...]:
    """The divisions of several loaders' batches in one step, if they differ: one weighting cannot fit them all."""
    return _batches.disagreeing()
