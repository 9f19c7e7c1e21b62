"""Lists of files, sliced so that every replica reads its own.

The manual's rule deals files to workers, where a worker is one process that reads for all its local replicas:

    k = replicas / gcd(local replica counts)     slots; a worker owns local / gcd consecutive ones
    file i goes to slot i mod k                  every worker gets files in proportion to its replicas
    fewer files than k                           nothing is sliced: every worker reads the list local / gcd times
    k does not divide the number of files        io.unbalanced_io_slicing: the first slots get one file more
                                                 else io.drop_last_files: the remaining files are dropped
                                                 else nothing is sliced, as above

Here every replica reads for itself, so a worker's files are dealt on to its local replicas by the same rule: the p-th
of them to local replica p mod local. Where gcd is 1 that is one slot for each replica. A list that is not sliced is
read once by each replica (EPL repeats and shuffles it so that a worker's replicas can share it; a replica that reads
alone has no use for repeats).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from epl.cluster.surroundings import discover
from epl.errors import DataError, NotInitializedError

_log = logging.getLogger("epl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePlace:
    """Where this replica stands among all that read files, and the `io.*` settings."""

    replicas_per_worker: tuple[int, ...] = (1,)
    worker: int = 0
    local_replica: int = 0
    slicing: bool = False
    unbalanced: bool = False
    drop_last: bool = False


def slice_plan(
    num_files: int, replicas_per_worker: Sequence[int], worker: int, unbalanced: bool, drop_last: bool
) -> list[int]:
    """The files that one worker reads, by the manual's rule: indices into the list, in its order."""
    counts = [count for count in replicas_per_worker if count]
    if min(replicas_per_worker, default=-1) < 0 or not counts or not 0 <= worker < len(replicas_per_worker):
        raise DataError(f"expected one of the workers with {list(replicas_per_worker)} replicas, found worker {worker}")
    gcd = math.gcd(*counts)
    slots, own_slots = sum(counts) // gcd, replicas_per_worker[worker] // gcd
    kept = _sliced_files(num_files, slots, unbalanced=unbalanced, drop_last=drop_last)
    if kept is None:
        return list(range(num_files)) * own_slots
    first = sum(replicas_per_worker[:worker]) // gcd
    return [file for file in range(kept) if first <= file % slots < first + own_slots]


def replica_plan(
    num_files: int,
    replicas_per_worker: Sequence[int],
    worker: int,
    local_replica: int,
    unbalanced: bool,
    drop_last: bool,
) -> list[int]:
    """The files that one replica of a worker reads: its worker's, dealt on; the whole list where nothing is sliced."""
    local = replicas_per_worker[worker]
    if not 0 <= local_replica < local:
        raise DataError(
            f"expected a replica of worker {worker}, which has {local}, found local replica {local_replica}"
        )
    slots = sum(replicas_per_worker) // math.gcd(*replicas_per_worker)
    if _sliced_files(num_files, slots, unbalanced=unbalanced, drop_last=drop_last) is None:
        return list(range(num_files))
    files = slice_plan(num_files, replicas_per_worker, worker, unbalanced, drop_last)
    inside = slice_plan(len(files), [1] * local, local_replica, unbalanced, drop_last)
    return [files[position] for position in inside]


def _sliced_files(num_files: int, slots: int, *, unbalanced: bool, drop_last: bool) -> int | None:
    """How many files are dealt to the slots; None if the list is not sliced."""
    if num_files < slots:
        return None
    remainder = num_files % slots
    if remainder and not unbalanced:
        return num_files - remainder if drop_last else None
    return num_files


_place: Callable[[], FilePlace] | None = None


def set_file_place(place: Callable[[], FilePlace] | None) -> None:
    """Say how lists of files learn where this replica stands; None forgets it. `epl.init` does this."""
    global _place
    _place = place


def slice_files(files: Sequence[str], place: Callable[[], FilePlace] | None = None) -> FileSlice:
    """The files of this replica, as a list that is settled when first read (after `epl.parallelize`).

    With `io.slicing` off it is the whole list. `place` tells where this replica stands; by default epl's plan does.
    """
    return FileSlice(files, place)


class FileSlice(Sequence[str]):
    """This replica's part of a list of files, settled when first read."""

    def __init__(self, files: Sequence[str], place: Callable[[], FilePlace] | None = None) -> None:
        if isinstance(files, (str, bytes)):
            raise DataError(f"expected a list of files, found the single name {files!r}. Write [{files!r}].")
        self._all = tuple(files)
        self._find_place = place
        self._own: tuple[str, ...] | None = None

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        own = self._read()
        return list(own[index]) if isinstance(index, slice) else own[index]

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (FileSlice, list, tuple)):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        if self._own is None:
            return f"FileSlice(of {len(self._all)} files, not read yet)"
        return f"FileSlice({list(self._own)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """A copy for a worker process is settled here: the worker does not know the plan."""
        return _settled, (list(self._read()),)

    def _read(self) -> tuple[str, ...]:
        if self._own is None:
            self._own = self._slice((self._find_place or _place or _place_before_init)())
        return self._own

    def _slice(self, place: FilePlace) -> tuple[str, ...]:
        counts = place.replicas_per_worker
        if not place.slicing or sum(counts) <= 1:
            return self._all
        plan = replica_plan(
            len(self._all), counts, place.worker, place.local_replica, place.unbalanced, place.drop_last
        )
        _tell(len(self._all), place)
        return tuple(self._all[file] for file in plan)


def _settled(files: list[str]) -> FileSlice:
    return FileSlice(files, FilePlace)


def _place_before_init() -> FilePlace:
    world_size = discover(os.environ).world_size
    if world_size == 1:
        return FilePlace()
    raise NotInitializedError(
        "expected epl.init() and epl.parallelize(...) before a list from epl.data.slice_files is read: with "
        f"{world_size} ranks it takes the plan to know which files are this replica's. Read the list later, in the "
        "dataset's __iter__ for example."
    )


def _tell(num_files: int, place: FilePlace) -> None:
    """Say what the rule did wherever it did not simply deal all files evenly: to the workers, then inside this one."""
    counts, flags = place.replicas_per_worker, (place.unbalanced, place.drop_last)
    slots = sum(counts) // math.gcd(*counts)
    _tell_uneven(num_files, slots, "slices", place)
    if _sliced_files(num_files, slots, unbalanced=place.unbalanced, drop_last=place.drop_last) is not None:
        own = slice_plan(num_files, counts, place.worker, *flags)
        _tell_uneven(len(own), counts[place.worker], f"replicas of worker {place.worker}", place)


def _tell_uneven(num_files: int, slots: int, what: str, place: FilePlace) -> None:
    kept = _sliced_files(num_files, slots, unbalanced=place.unbalanced, drop_last=place.drop_last)
    if kept is None and num_files < slots:
        _log.warning("%d files are too few for %d %s: not sliced, each reads all of them.", num_files, slots, what)
    elif kept is None:
        _log.warning(
            "%d files do not divide over %d %s: not sliced, each reads all of them. io.unbalanced_io_slicing deals them "
            "unevenly, io.drop_last_files drops the last %d.",
            num_files,
            slots,
            what,
            num_files % slots,
        )
    elif kept < num_files:
        _log.warning("io.drop_last_files drops the last %d of %d files.", num_files - kept, num_files)
    elif num_files % slots:
        _log.warning("%d files are dealt unevenly to %d %s (io.unbalanced_io_slicing).", num_files, slots, what)
