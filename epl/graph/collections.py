"""Values that the user's code sets aside to be merged: over the micro batches of a replica, and over replicas.

step         what was added since the last optimizer step, or since the loader's last batch; the one before is let go
object       one `add_to_collection`; inside a forward that runs per micro batch it has a part for each of them
place        where an object stands among the others, as one device would have added them: (model calls before it, 1, count) in
             the loop, (number of the call, 0, node of its forward or else stage, count) inside a model
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from epl.errors import UsageError
from epl.report.log import warn

How = Literal["CONCAT", "MEAN", "SUM"]
Place = tuple[int, ...]
_MANY = 1000


class GraphKeys(enum.StrEnum):
    """The collections: how their values are merged, and over what.

    LOCAL: over the micro batches of this model replica; GLOBAL: over those of all replicas. MEAN is weighted by rows; CONCAT
    joins along dim 0, in the order of the batch.
    """

    GLOBAL_CONCAT_OBJECTS = "GLOBAL_CONCAT_OBJECTS"
    GLOBAL_MEAN_OBJECTS = "GLOBAL_MEAN_OBJECTS"
    GLOBAL_SUM_OBJECTS = "GLOBAL_SUM_OBJECTS"
    LOCAL_CONCAT_OBJECTS = "LOCAL_CONCAT_OBJECTS"
    LOCAL_MEAN_OBJECTS = "LOCAL_MEAN_OBJECTS"
    LOCAL_SUM_OBJECTS = "LOCAL_SUM_OBJECTS"

    @property
    def is_global(self) -> bool:
        """Whether its values are merged over replicas too."""
        return self.value.startswith("GLOBAL")

    @property
    def how(self) -> How:
        """How its values are merged."""
        how: How = self.value.split("_")[1]  # type: ignore[assignment]
        return how


def key_of(name: object) -> GraphKeys:
    """The collection of this name."""
    if isinstance(name, str) and name in set(GraphKeys):
        return GraphKeys(name)
    names = ", ".join(f"epl.GraphKeys.{key.value}" for key in GraphKeys)
    raise UsageError(f"there is no collection {name!r}: expected one of {names}")


@dataclass(frozen=True)
class Part:
    """What one micro batch has of an object: its rows are those from `start` on of the batch that the model was called with."""

    start: int
    rows: int
    value: torch.Tensor


@dataclass
class Collected:
    """One object, as far as this rank has it."""

    place: Place
    rows: int | None
    """Of the batch that it was made from, if that is known."""
    shares: tuple[int, ...] | None
    """How the rows of the global batch are divided over all shares, if the loader told."""
    on_stage: bool
    """Whether it was added by a stage of the model, per micro batch, on the ranks of that stage; else every rank of the replica has
    it, of the whole batch."""
    parts: list[Part] = field(default_factory=list)


class Moment(NamedTuple):
    """Which batch the loop is at: a number of its own, and how its rows are divided."""

    batch: int
    shares: tuple[int, ...] | None


class Step:
    """The objects of one step, by collection."""

    def __init__(self, serial: int, moment: Moment) -> None:
        self.serial, self.moment = serial, moment
        self.calls = 0
        self.rows: int | None = None
        self.callers: list[weakref.ref[object]] = []
        self._added = 0
        self._objects: dict[GraphKeys, dict[Place, Collected]] = {key: {} for key in GraphKeys}

    def objects(self, key: GraphKeys) -> list[Collected]:
        """What is in a collection, in the order in which one device would have added it."""
        return [found for _, found in sorted(self._objects[key].items())]

    def add(self, key: GraphKeys, value: torch.Tensor, node: int | None) -> None:
        """A whole value, added in the loop, or by a node of the forward that runs after all stages."""
        objects = self._objects[key]
        self._added += 1
        place = (self.calls, 1, self._added) if node is None else (self.calls, 0, node, self._added)
        objects[place] = Collected(place, self.rows, self.moment.shares, False, [Part(0, 1, value)])
        if len(objects) == _MANY:
            warn(
                f"{_MANY} values were added to {key.value} in one step, and all are kept. A step ends with optimizer.step(), or when a "
                "loader given to epl.parallelize yields its next batch: without either, nothing tells epl to begin anew."
            )

    def add_part(self, key: GraphKeys, place: Place, rows: int, part: Part) -> None:
        """What one micro batch has of a value, added inside a model that was called with so many rows."""
        objects = self._objects[key]
        if place not in objects:
            objects[place] = Collected(place, rows, self.moment.shares, True)
        objects[place].parts.append(part)


class Collections:
    """All collections of a process. The step that is shown is the last one in which something was added."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        """`moment`: which batch the loop is at now."""
        self._moment = moment
        self._serials = itertools.count()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._shown = self._latest = Step(next(self._serials), Moment(-1, None))
        self._ended = True

    def end_step(self) -> None:
        """The optimizer has stepped: what is added from now on belongs to the next step."""
        self._ended = True

    def objects(self, key: GraphKeys) -> list[Collected]:
        """What is in a collection."""
        return self._shown.objects(key)

    def add(self, key: GraphKeys, value: torch.Tensor, node: int | None = None) -> None:
        """Add a value: of the micro batch that runs now, or of the loop. `node`: the number of the node that adds it, in a forward
        that was written down."""
        running = _running.get()
        if running is None:
            step = self._current()
            step.add(key, value, node)
        else:
            step = running.add(key, value, node)
        if step.serial > self._shown.serial:
            self._shown = step

    def call(self, rows: int, caller: object = None) -> CollectingCall:
        """A model is called with so many rows, and will run in micro batches: now, or later in this step."""
        step = self._current()
        step.calls, step.rows = step.calls + 1, rows
        if caller is not None:
            step.callers.append(weakref.ref(caller))
        return CollectingCall(step, step.calls, rows)

    def callers(self) -> list[object]:
        """Who has made the calls of this step; some may not have run yet."""
        steps = [self._shown] if self._shown is self._latest else [self._shown, self._latest]
        return [caller for step in steps for found in step.callers if (caller := found()) is not None]

    def _current(self) -> Step:
        moment = self._moment()
        if self._ended or moment.batch != self._latest.moment.batch:
            self._latest, self._ended = Step(next(self._serials), moment), False
        return self._latest


class CollectingCall:
    """One call of a model that runs in micro batches: what is added inside belongs to the step in which the call was made."""

    def __init__(self, step: Step, number: int, rows: int) -> None:
        self.step, self.number, self.rows = step, number, rows

    @contextlib.contextmanager
    def micro_batch(self, stage: int, start: int, rows: int, *, padded: bool = False) -> Iterator[None]:
        """Inside, a stage computes the rows from `start` on. `padded`: they only repeat what another rank computes."""
        token = _running.set(_Running(self, stage, start, rows, padded))
        try:
            yield
        finally:
            _running.reset(token)


class _Running:
    """The micro batch that runs now, on one stage."""

    def __init__(self, call: CollectingCall, stage: int, start: int, rows: int, padded: bool) -> None:
        self._call, self._stage, self._start, self._rows, self._padded = call, stage, start, rows, padded
        self._counts: Counter[tuple[GraphKeys, int]] = Counter()

    def add(self, key: GraphKeys, value: torch.Tensor, node: int | None) -> Step:
        step, where = self._call.step, self._stage if node is None else node
        self._counts[key, where] += 1
        place = (self._call.number, 0, where, self._counts[key, where])
        if not self._padded:
            step.add_part(key, place, self._call.rows, Part(self._start, self._rows, value))
        return step


_running: ContextVar[_Running | None] = ContextVar("micro batch that runs", default=None)

Again = Callable[[torch.Tensor, GraphKeys], None]
Listener = Callable[[Again, torch.Tensor, GraphKeys], None]
_listeners: list[Listener] = []


@contextlib.contextmanager
def overheard(listener: Listener) -> Iterator[None]:
    """Inside, nothing is added: `listener` is told what is to be called, with which value and key, whenever the forward that
    runs now is carried out for real."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def listener() -> Listener | None:
    """Who listens, if a forward is being written down."""
    return _listeners[-1] if _listeners else None
