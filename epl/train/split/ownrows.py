"""Ranks with rows of their own: which rows the call under way has, and how they go into the split parts and come out.

A call may be cut into micro batches. Every rank cuts its own rows, so that micro batch m of a replica is what its ranks have as
their m-th. What a rank's loss counts for is a matter of the whole call: the weights are the same for all its micro batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from epl import _torch
from epl.cluster.communication import Job
from epl.data import active_share
from epl.errors import PlanError, UsageError
from epl.graph.crossings import module_crossings
from epl.graph.record import ROWS_OF_RANKS, RecordedCall, Recordings, steps
from epl.graph.record.chance import torch_streams_kept
from epl.graph.record.leaf import STAND_INS
from epl.graph.record.modules import TaskGraphOf
from epl.graph.record.tree import skeleton
from epl.graph.spec import Spec
from epl.parallel.split.expressions import OwnLosses
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.rows import PLAIN, PartCall, RowBridge, RowShare
from epl.plan.batch import cut_evenly
from epl.plan.bridges import Crossing
from epl.train.cut.call import Around
from epl.train.split.cutting import Arguments
from epl.train.split.leftout import LeftOut, Questions, questions_of
from epl.train.split.loose import Glue
from epl.train.split.rowmap import GlueCall, RowMap, fitting, glue_calls, row_map
from epl.train.split.unlike import BITS, Given, digest, given, refusal, refusals, shapes_of

_MAPS = 256  # signatures that are kept


class Part(NamedTuple):
    """A module that is going to be split, and how the forward calls it."""

    path: str
    module: nn.Module
    examples: Sequence[Arguments]
    """Like those it will be called with: the first that its code takes are to be used."""
    own: Collection[str]
    """Its parameters that may be cut."""


class _Now(NamedTuple):
    """What is being computed: one call, or one micro batch of it."""

    calls: RowMap
    glue: Sequence[GlueCall]
    bridge: RowBridge
    left_out: LeftOut
    numbers: dict[nn.Module, int] | None
    """How often each part was called so far; None while a checkpoint computes again, in another order."""
    refused: Mapping[nn.Module | None, str] = {}
    """Parts that cannot put values together (unlike.py)."""


class OwnRows:
    """The rows of a model's calls on the ranks of one replica."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        owners: TaskGraphOf,
        ranks: SplitRanks,
        replicas: Sequence[Sequence[int]],
        names: Collection[str],
        *,
        micro_batches: int,
    ) -> None:
        """`replicas`: the ranks of each, in the order of `ranks`; `names`: the split TaskGraphs."""
        self._job, self._title, self._ranks, self._replicas = job, type(model).__name__, ranks, replicas
        self._replica = next(replica for replica in replicas if job.rank in replica)
        self._names, self._asked = names, micro_batches
        self._recordings = Recordings(model, owners, device=job.device, apart=ROWS_OF_RANKS)
        self._maps: dict[RecordedCall, tuple[RowMap, list[GlueCall], Questions, Given]] = {}
        self._latest: _Now | None = None
        self._loose: frozenset[int] = frozenset()
        self._expressions: OwnLosses | None = None
        self._counts: tuple[int, ...] = ()

    @property
    def _now(self) -> _Now | None:
        """The call that runs (or the micro batch), or else the latest one."""
        running: _Now | None = self._ranks.call
        return running or self._latest

    @property
    def micro_batches(self) -> int:
        """Into how many micro batches the call under way is cut: no more than the rank with the fewest rows can."""
        return min(self._asked, *self._counts)

    def weight(self) -> float:
        """What this rank's loss counts for in the replica's, as of the latest call."""
        return 1 / self._ranks.ways if self._now is None else self._now.bridge.weight

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins: ranks tell each other how many rows they have."""
        recorded = self._recordings.of(args, kwargs, 1)
        tensors = recorded.input_tensors(args, kwargs)
        found = self._maps.get(recorded)
        if found is None:
            calls = row_map(recorded, self._names)
            arguments = [argument for several in calls.values() for part in several for argument in part.carries]
            glue = glue_calls(recorded, self._loose) if self._loose else []
            found = calls, glue, questions_of(recorded, arguments, tensors), given(calls, glue)
            self._maps[recorded] = found
            if len(self._maps) > _MAPS:
                del self._maps[next(iter(self._maps))]
        calls, glue, questions, own = found
        share, alike = self._meet(f"calling {self._title}, which is split", recorded.rows, own)
        refused: Mapping[nn.Module | None, str] = {}
        if not alike:
            everyones = self._job.gather("what split parts are given", own)
            others = [cast("Given", everyones[rank]) for rank in self._replica]
            refused = refusals(calls, own, others, self._title)
        left_out = LeftOut(questions, tensors)
        self._ranks.call = self._latest = _Now(calls, glue, self._bridge(share, glue, refused), left_out, {}, refused)

    def _meet(self, kind: str, rows: int, told: object) -> tuple[RowShare, bool]:
        """The rows of all ranks of the replica, and whether the ranks of every replica are told alike of what they call."""
        share = active_share()
        padded = share is not None and share.padded
        said = self._job.meet(kind, (rows << 1 | padded) << BITS | digest(told)).wait()
        here = [said.bits[rank] >> BITS for rank in self._replica]
        self._counts = tuple(bits >> 1 for bits in here)
        told_by = [[said.bits[rank] % (1 << BITS) for rank in replica] for replica in self._replicas]
        rows_of_all = RowShare.of(self._counts, [not bits & 1 for bits in here], by_rows=share is not None)
        return rows_of_all, all(len(set(each)) == 1 for each in told_by)

    def around(self) -> Around:
        """What surrounds the micro batches of the call that has just begun, whenever they are computed."""
        assert self._now is not None
        calls, glue, whole, left_out = self._now.calls, self._now.glue, self._now.bridge.share, self._now.left_out
        refused = self._now.refused
        cuts = [cut_evenly(0, rows, self.micro_batches) for rows in self._counts]
        bridges = [
            self._bridge(whole.of_micro_batch([stop - start for start, stop in those]), glue, refused)
            for those in zip(*cuts, strict=True)
        ]
        omitted = [left_out.of_micro_batch(start, stop) for start, stop in cuts[self._ranks.rank]]

        @contextlib.contextmanager
        def micro_batch(number: int, again: bool) -> Iterator[None]:
            before = self._ranks.call
            numbers: dict[nn.Module, int] | None = None if again else {}
            self._ranks.call = _Now(calls, glue, bridges[number], omitted[number], numbers, refused)
            try:
                yield
            finally:
                self._ranks.call = before

        return micro_batch

    def loose(self, args: tuple[Any, ...], kwargs: dict[str, Any], own: set[str]) -> list[str]:
        """Of the parameters `own` those that no module of a split TaskGraph holds: code between modules computes with them."""
        return loose_parameters(self._recordings.of(args, kwargs, 1), self._names, own)

    def watch(self, loose: Collection[nn.Parameter], expressions: OwnLosses) -> None:
        """From now on code between modules computes with these parameters."""
        self._loose, self._expressions = frozenset(map(id, loose)), expressions
        expressions.glue = self._glue
        self._maps.clear()

    def is_running(self) -> bool:
        """Whether the forward of the model runs, outside of its split modules."""
        return self._ranks.call is not None and not region.depth

    def end(self) -> None:
        """The call has returned."""
        self._ranks.call = None

    def _glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        return NotImplemented if self._now is None else self._now.bridge.glue(func, args, kwargs)

    def _bridge(self, share: RowShare, glue: Sequence[GlueCall], refused: Mapping[nn.Module | None, str]) -> RowBridge:
        bridge = RowBridge(self._ranks, share)
        if glue:
            assert self._expressions is not None
            bridge.glue = Glue(glue, bridge, self._expressions, self.is_running, refused.get(None, ""))
        return bridge

    def parts(self, args: tuple[Any, ...], kwargs: dict[str, Any], own: set[str]) -> list[Part]:
        """Every module of a split TaskGraph that the forward calls; `own`: the parameters of split TaskGraphs."""
        return split_modules(self._recordings.of(args, kwargs, 1), self._names, own)

    def border(self, module: nn.Module) -> Border:
        """What surrounds the calls of a part."""
        return Border(self, module)

    def crossings(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Crossing]:
        """What goes from TaskGraph to TaskGraph in such a call, on all ranks of the replica."""
        return module_crossings(self._recordings.of(args, kwargs, 1), self._asked, self._ranks.ways)

    def call_of(self, module: nn.Module, given: Any) -> tuple[PartCall, RowBridge, Any, str]:
        """Which recorded call of a part this is, the rows it is made with, its arguments as recorded (leftout.py), and why it cannot
        put them together."""
        now = self._now
        alone = self._ranks.call is None and _torch.backward_id() == -1
        found = None
        if now is not None:
            calls = now.calls.get(module, ())
            number = len(calls)
            if now.numbers is not None and not alone:
                number = now.numbers.get(module, 0)
                now.numbers[module] = number + 1
            found = fitting(calls, number, given, None if alone else now.left_out)
        if found is None or now is None:
            shapes = [tuple(leaf.shape) for leaf in skeleton(given)[0] if isinstance(leaf, torch.Tensor)]
            raise PlanError(
                f"{type(module).__name__}, which is under split, was called with tensors of shape {shapes}, not as in the "
                "forward of the model: ranks have rows of their own, and which dim has them is known for calls inside model(...) only"
            )
        call, whole = found
        if alone:
            return self._alone(module, call, whole)
        return call, now.bridge, whole, now.refused.get(module, "")

    def _alone(self, module: nn.Module, call: PartCall, given: Any) -> tuple[PartCall, RowBridge, Any, str]:
        """The loop calls a part, as a model of its own: ranks tell each other how many rows they have, as at a call of the model."""
        title = type(module).__name__
        tensors = [leaf for leaf in skeleton(given)[0] if isinstance(leaf, torch.Tensor)]
        rows = {
            t.shape[how.dim] // sum(how.inners)
            for t, how in zip(tensors, call.inputs, strict=True)
            if how.dim is not None
        }
        if len(rows) > 1:
            raise UsageError(
                f"{title}, which is under split, was called with tensors of {sorted(rows)} rows: expected is one number of rows in all of them"
            )
        shapes = shapes_of(call._replace(shapes=tuple(t.shape for t in tensors)))
        share, alike = self._meet(
            f"calling {title}, which is split, outside of its model", min(rows, default=1), shapes
        )
        return call, self._bridge(share, (), {}), given, "" if alike else refusal(title, [shapes])


class Border:
    """The border of one part: `Boundary` of epl/parallel/split/boundary.py."""

    def __init__(self, rows: OwnRows, module: nn.Module) -> None:
        self._rows, self._module = rows, module
        self._stack: list[tuple[PartCall, RowBridge]] = []

    def enter(self, tree: Any, ranks: SplitRanks) -> Any:
        call, bridge, tree, ranks.refused = self._rows.call_of(self._module, tree)
        leaves, fill = skeleton(tree)
        self._stack.append((call, bridge))
        how = iter(call.inputs)
        return fill([bridge.enter(leaf, next(how)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])

    def leave(self, tree: Any, ranks: SplitRanks) -> Any:
        call, bridge = self._stack.pop()
        leaves, fill = skeleton(tree)
        how = iter(call.outputs)
        left = [bridge.leave(leaf, next(how, PLAIN)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ranks.refused = ""
        return fill(left)


def loose_parameters(recorded: RecordedCall, taskgraphs: Collection[str], own: set[str]) -> list[str]:
    """Of the parameters `own` those that no module of these TaskGraphs holds."""
    paths = {module: path for path, module in recorded.whole.modules.items()}
    calls = row_map(recorded, taskgraphs)
    return sorted(own - {name for module in calls for name, _ in module.named_parameters(prefix=paths[module])})


def split_modules(recorded: RecordedCall, taskgraphs: Collection[str], own: Collection[str]) -> list[Part]:
    """Every module of these TaskGraphs that the forward calls."""
    first_call: dict[nn.Module, fx.Node] = {}
    for node in recorded.whole.nodes:
        if node.op == "call_module" and node.meta.get("taskgraph") in taskgraphs:
            first_call.setdefault(recorded.whole.modules[str(node.target)], node)
    paths = {module: path for path, module in recorded.whole.modules.items()}
    found = []
    for module in row_map(recorded, taskgraphs):
        path = paths[module]
        names = [name for name, _ in module.named_parameters(prefix=path) if name in own]
        cut = {name.removeprefix(f"{path}.") for name in names}
        examples = [_example(first_call[module], stand_in) for stand_in in STAND_INS]
        found.append(Part(path, module, examples, cut))
    return found


def _example(node: fx.Node, stand_in: Callable[[Spec], torch.Tensor]) -> Arguments:
    """Arguments like those of a recorded call, with numbers that code may look at (labels: first classes)."""

    def one(tree: Any) -> Any:
        if isinstance(tree, fx.Node):
            if "spec" in tree.meta:
                return stand_in(tree.meta["spec"])
            if tree.target is steps.changed:  # an object that another module has filled: as it was before that
                return one(tree.args[0])
            assert callable(tree.target)  # a container or an object, put together from its parts
            return tree.target(*one(tree.args))
        if isinstance(tree, (tuple, list)):
            return type(tree)([one(each) for each in tree])
        if isinstance(tree, dict):
            return {key: one(each) for key, each in tree.items()}
        return tree

    with torch_streams_kept():
        return one(node.args), one(dict(node.kwargs))
