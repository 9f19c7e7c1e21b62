"""Makes what is known of one signature: records the forward at every size that is needed, and finds out what is cut."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from epl.errors import RecordingError
from epl.graph.record import steps
from epl.graph.record.call import RecordedCall
from epl.graph.record.constants import homes_of
from epl.graph.record.draws import Draws
from epl.graph.record.inputs import Inputs
from epl.graph.record.modules import Modules
from epl.graph.record.outlook import Outlook, Sizes
from epl.graph.record.recorder import HooksInside, NotALeaf
from epl.graph.record.recording import Recording
from epl.graph.record.run import Surroundings, record
from epl.plan.batch import cut_evenly


@dataclass(frozen=True)
class Maker:
    """Records the forward of one model; kept from call to call."""

    modules: Modules
    surroundings: Surroundings
    trusted: set[Hashable]
    """Signatures (without sizes) in which it does not matter what leaves do to the objects they are given."""
    outlook: Outlook
    bound: Container[str] = frozenset()
    """Parameters that code can compute with in stages only (see `parts_of`)."""

    def make(
        self,
        inputs: Inputs,
        tensors: Sequence[torch.Tensor],
        trust: Hashable,
        seed: int,
        micro_batches: int,
        widths: Collection[int],
        known: Sequence[bool | None],
    ) -> tuple[RecordedCall, Draws]:
        """The call with these inputs in micro batches, and what it drew and read. `tensors`: its real inputs, where their numbers may be
        read. `trust`: its signature without sizes. `known`: of each
        tensor whether earlier calls have shown that it carries the batch (epl.graph.record.roles)."""
        making = _Making(self, inputs, tensors, trust, seed, known)
        ahead = making.look_ahead()
        call = making.call(micro_batches, widths)
        for module in _losses(call):
            # A module without parameters that makes one number of a batch is a loss: it belongs to the tail.
            self.modules.look_into(module)
            try:
                making = _Making(self, inputs, tensors, trust, seed, known)
                call = making.call(micro_batches, widths)
            except (RecordingError, HooksInside):
                self.modules.leave_whole(module)
        call.homes = homes_of(call.whole, self.modules)
        if ahead is not None:
            making.look_ahead_in_micro_batches(ahead, call)
        return call, making.draws


class _Making:
    def __init__(
        self,
        maker: Maker,
        inputs: Inputs,
        tensors: Sequence[torch.Tensor],
        trust: Hashable,
        seed: int,
        known: Sequence[bool | None],
    ) -> None:
        self._maker, self._inputs, self._trust, self._known = maker, inputs, trust, known
        self.draws = Draws(seed, tensors)

    def call(self, micro_batches: int, widths: Collection[int]) -> RecordedCall:
        inputs = self._inputs
        rows = inputs.rows
        if rows is None:
            if micro_batches > 1:
                raise RecordingError(
                    f"the model is to run in {micro_batches} micro batches and is given no tensor that could be cut: the first "
                    "tensor with dims among its arguments says how many rows there are"
                )
            rows = 1
        whole = self._whole()
        candidates = inputs.candidates(rows) if inputs.rows is not None else (False,) * len(inputs.specs)
        sizes = tuple(stop - start for start, stop in cut_evenly(0, rows, micro_batches) if stop > start)
        needed = {max(stop - start, 1) for n in set(sizes) for k in widths for start, stop in cut_evenly(0, n, k)}
        others = sorted({*sizes, *needed} - {rows}, reverse=True)
        if not others:
            is_cut = next(_choices(candidates, self._known))
            return RecordedCall(
                inputs,
                {rows: whole},
                rows,
                sizes,
                is_cut,
                lambda: self._probe(whole, rows, candidates),
                self._maker.bound,
            )
        return self._cut(whole, rows, sizes, others, candidates)

    # ---- recordings --------------------------------------------------------------------------------------------------

    def _whole(self) -> Recording:
        """The forward as it is called. Leaves that are given objects are run at least once, all of them, before what is
        remembered of them is believed."""
        leaves, trusted = self._maker.surroundings.leaves, self._maker.trusted
        shapes = [spec.shape for spec in self._inputs.specs]
        leaves.trusted, leaves.saw_objects = self._trust in trusted, False
        recording = self._record(shapes, self.draws)
        if leaves.saw_objects and not leaves.trusted:
            leaves.trusted = leaves.verifying = True
            again: Recording | None = None
            with contextlib.suppress(Exception, HooksInside):
                again = self._record(shapes, self.draws.at_another_size())
            leaves.verifying = False
            leaves.trusted = again is not None and _difference(recording, again, specs=True) is None
        if leaves.trusted:
            trusted.add(self._trust)
        return recording

    def _record(self, shapes: Sequence[torch.Size], draws: Draws) -> Recording:
        modules = self._maker.modules
        return record(self._maker.surroundings, self._inputs, shapes, draws, paths=modules.paths, glue=modules.glue)

    def _at(self, rows: int, is_cut: Sequence[bool], whole: Recording) -> Recording:
        """The forward at another size; RecordingError if it does other things there."""
        recording = self._record(self._inputs.shapes(is_cut, rows), self.draws.at_another_size())
        difference = _difference(whole, recording)
        if difference is not None:
            raise RecordingError(
                f"the forward does something else for {rows} rows than for the whole batch: {difference}"
            )
        return recording

    def look_ahead(self) -> Sizes | None:
        """Run the forward where calls may soon come, for what follows from it at the sizes between, of which this call is one: so
        it comes first. Nothing is kept of it. The sizes at which it was run, if it was."""
        surroundings = self._maker.surroundings
        leaves = surroundings.leaves
        leaves.trusted = self._trust in self._maker.trusted
        if leaves.need_numbers or surroundings.scopes.opened or (leaves.saw_objects and not leaves.trusted):
            return None  # it would be dear, leave TaskGraphs behind, or be of no use
        sizes = self._maker.outlook.beyond(self._trust, tuple(n for spec in self._inputs.specs for n in spec.shape))
        if sizes is None or not self._run_ahead([self._shapes(sizes)], self.draws.afresh):
            return None
        return sizes

    def look_ahead_in_micro_batches(self, sizes: Sizes, call: RecordedCall) -> None:
        """The same at the other numbers of rows: a single row may take another way."""
        shapes = self._shapes(sizes)
        others = [
            [
                torch.Size([rows, *shape[1:]]) if is_cut else shape
                for shape, is_cut in zip(shapes, call.is_cut, strict=True)
            ]
            for rows in call.by_size
            if rows != call.rows
        ]
        if self._run_ahead(others, self.draws.at_another_size):
            self._maker.outlook.seen(self._trust, sizes)

    def _shapes(self, sizes: Sizes) -> list[torch.Size]:
        rest = iter(sizes)
        return [torch.Size([next(rest) for _ in spec.shape]) for spec in self._inputs.specs]

    def _run_ahead(self, several: Sequence[Sequence[torch.Size]], draws: Callable[[], Draws]) -> bool:
        """Whether the forward works there; that it is too long for the model is nothing to tell the user."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for shapes in several:
                    self._record(shapes, draws())
        except (Exception, HooksInside, NotALeaf):
            self._maker.outlook.failed(self._trust)
            return False
        return True

    # ---- which inputs carry the batch --------------------------------------------------------------------------------

    def _cut(
        self, whole: Recording, rows: int, sizes: tuple[int, ...], others: Sequence[int], candidates: tuple[bool, ...]
    ) -> RecordedCall:
        """The call at all sizes, with those inputs cut that can be."""
        # One row fits everywhere by broadcasting, and shows nothing about inputs that only happen to be as long.
        ambiguous = max(others) == 1 and sum(candidates) > 1
        first: RecordedCall | None = None
        errors: list[Exception] = []
        for probes in ([rows + 1], []) if ambiguous else ([],):
            for is_cut in _choices(candidates, self._known):
                try:
                    call = self._try(whole, rows, sizes, [*others, *probes], is_cut)
                except Exception as error:
                    errors.append(error)
                    continue
                if _is_clear(call) or _leaves_out(is_cut, candidates, self._known):
                    return call
                first = first or call
        if first is not None:
            return first  # the values in question say so when they are asked for
        raise RecordingError(
            f"the forward works for the whole batch of {rows} rows and not in micro batches of {others[0]}: {errors[0]}. Its "
            "inputs are cut along dim 0 where that is as long as the batch; mark a tensor that is not to be cut: "
            "epl.unbatched(tensor)"
        ) from errors[0]

    def _try(
        self, whole: Recording, rows: int, sizes: tuple[int, ...], others: Sequence[int], is_cut: tuple[bool, ...]
    ) -> RecordedCall:
        by_size = {rows: whole, **{n: self._at(n, is_cut, whole) for n in others}}
        return RecordedCall(self._inputs, by_size, rows, sizes, is_cut, lambda: None, self._maker.bound)

    def _probe(self, whole: Recording, rows: int, candidates: tuple[bool, ...]) -> tuple[int, Recording] | None:
        """The forward at a size that nobody asked for, to see what carries the batch."""
        for other in (rows + 1, 2 * rows):
            for is_cut in _choices(candidates, self._known):
                try:
                    return other, self._at(other, is_cut, whole)
                except Exception:
                    continue
        return None


def _choices(candidates: tuple[bool, ...], known: Sequence[bool | None]) -> Iterator[tuple[bool, ...]]:
    """All candidates, then all but one each; the first says how long the batch is. What is known to carry no batch is left out
    first of all, what is known to carry it never."""
    cut = [i for i, candidate in enumerate(candidates) if candidate]
    none = tuple(i for i in cut[1:] if known[i] is False)
    for left in dict.fromkeys([none, (), *((i,) for i in cut[1:] if known[i] is not True)]):
        yield tuple(candidate and i not in left for i, candidate in enumerate(candidates))


def _leaves_out(is_cut: Sequence[bool], candidates: Sequence[bool], known: Sequence[bool | None]) -> bool:
    """Whether something is known to carry no batch, and all such is not cut: then no other choice is better."""
    none = [i for i, candidate in enumerate(candidates) if candidate and known[i] is False]
    return bool(none) and not any(is_cut[i] for i in none)


def _is_clear(call: RecordedCall) -> bool:
    """Whether it is known of every value that leaves a module or the body how it carries the batch."""
    for node in call.whole.nodes:
        if "spec" in node.meta and (node.op == "call_module" or steps.is_part(node) or node in call.frontier):
            try:
                call.batch_dim(node)
            except RecordingError:
                return False
    return True


def _losses(call: RecordedCall) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    for node in call.whole.nodes:
        if node.op == "call_module" and "spec" in node.meta and call.depends_on_batch(node):
            module = call.whole.modules[str(node.target)]
            if not node.meta["spec"].shape and not any(True for _ in (*module.parameters(), *module.buffers())):
                found[module] = None
    return list(found)


def _difference(one: Recording, other: Recording, specs: bool = False) -> str | None:
    """The first place where two recordings do different things."""
    places = [{node: i for i, node in enumerate(each.nodes)} for each in (one, other)]
    for a, b in zip(one.nodes, other.nodes, strict=False):
        inputs = [[places[k][value] for value in node.all_input_nodes] for k, node in enumerate((a, b))]
        same = a.op == b.op and a.target == b.target and inputs[0] == inputs[1]
        if not same or (
            specs and (a.meta.get("spec"), a.meta.get("specs")) != (b.meta.get("spec"), b.meta.get("specs"))
        ):
            return f"{_call(a)} there, {_call(b)} here"
    if len(one.nodes) != len(other.nodes):
        longer = max(one.nodes, other.nodes, key=len)
        return f"{_call(longer[min(len(one.nodes), len(other.nodes))])} happens only once"
    return None


def _call(node: fx.Node) -> str:
    return f"{getattr(node.target, '__name__', node.target)} ({node.meta.get('where') or 'unknown line'})"
