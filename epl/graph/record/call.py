"""One signature of model calls: the forward at the size of the batch and of its micro batches, and what follows from them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from epl.errors import RecordingError
from epl.graph.record.constants import Home
from epl.graph.record.describe import describe
from epl.graph.record.flat import keeps_rows_together
from epl.graph.record.inputs import Inputs
from epl.graph.record.parts import parts_of
from epl.graph.record.recording import Recording
from epl.graph.spec import Spec
from epl.plan.batch import Flat, RowDim, flat

__all__ = ["RecordedCall", "describe"]


class RecordedCall:
    """What all calls with one signature have in common; equal ones differ only in `given`.

    Nodes are those of `whole`; the other sizes have the same ones in the same order.
    """

    def __init__(
        self,
        inputs: Inputs,
        by_size: Mapping[int, Recording],
        rows: int,
        sizes: tuple[int, ...],
        is_cut: tuple[bool, ...],
        probe: Callable[[], tuple[int, Recording] | None],
        bound: Container[str] = frozenset(),
    ) -> None:
        """`probe` records the forward at one more size, if there is no other to compare the whole with. `bound`: see `parts_of`."""
        self.rows, self.sizes, self.is_cut, self.by_size = rows, sizes, is_cut, dict(by_size)
        self.given: tuple[torch.Tensor, ...] = ()
        """The numbers drawn at random for this call, for `whole.draws`; the same for all its micro batches."""
        self.homes: tuple[Home, ...] = ()
        """Where its constants were found; without them there, it does not fit any more."""
        self.whole = self.by_size[rows]
        parts = parts_of(self.whole, bound)
        self.body, self.tail, self.frontier = parts.body, parts.tail, parts.frontier
        self._inputs = inputs
        self._place = {node: index for index, node in enumerate(self.whole.nodes)}
        self._others = {n: recording for n, recording in self.by_size.items() if n != rows}
        self._probe: Callable[[], tuple[int, Recording] | None] | None = None if self._others else probe
        self._dependent = self._depending()
        self._dims: dict[fx.Node, RowDim | None] = {}
        self._in_order: dict[fx.Node, bool] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedCall) and other.by_size is self.by_size

    def __hash__(self) -> int:
        return id(self.by_size)

    def with_draws(self, given: Sequence[torch.Tensor]) -> RecordedCall:
        """The same, for a call that has drawn these numbers."""
        call = copy.copy(self)
        call.given = tuple(given)
        return call

    def spec(self, node: fx.Node) -> Spec:
        """What is known of a node's value."""
        spec: Spec | None = node.meta.get("spec")
        if spec is None:
            raise RecordingError(
                f"{describe(node)} is not a single tensor: only tensors can be handed on to another stage"
            )
        return spec

    def depends_on_batch(self, node: fx.Node) -> bool:
        """Whether a node's value follows from inputs that are cut."""
        return node in self._dependent

    def batch_dim(self, node: fx.Node) -> RowDim | None:
        """How a node's value carries the batch; None if its shape does not depend on the batch.

        RecordingError if its shape does, and no single dim has the rows, or not one after the other.
        """
        if node not in self._dims:
            self._dims[node] = self._batch_dim(node)
        found = self._dims[node]
        if isinstance(found, Flat) and not self._is_in_order(node):
            raise RecordingError(
                f"{describe(node)} of shape {tuple(self.spec(node).shape)} has {found.inner} elements for each of the {self.rows} rows in one dim, and "
                "whether they lie there row by row is not known, so its micro batches cannot be joined. Where rows are merged with what comes "
                "after them (h.flatten(0, 1), h.view(-1, d)), do so in the model's forward between its modules, from a tensor that has the batch "
                "as its first dim; or keep the batch as a dim of its own in what goes from one TaskGraph to another and into the loss"
            )
        return found

    def is_flat(self, node: fx.Node) -> bool:
        """Whether one dim of a node's value has several elements for each row, in whatever order."""
        with contextlib.suppress(RecordingError):
            return isinstance(self._batch_dim(node), Flat)
        return False

    def another_size(self) -> tuple[int, Recording] | None:
        """The same forward at another number of rows, to compare with; None if it fails for any other."""
        if self._probe is not None:
            probe, self._probe = self._probe(), None
            self._others = {} if probe is None else dict([probe])
        return next(iter(self._others.items()), None)

    def input_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call's arguments, in the order of the placeholders."""
        return Inputs(args, kwargs, Spec.of).tensors

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of a call with other tensors in the places of its own."""
        return self._inputs.fill(tensors)

    def finish(self, tensors: Sequence[torch.Tensor], frontier: Sequence[torch.Tensor]) -> Any:
        """What the model returns: the tail, carried out on the inputs and on the values of the frontier.

        Attributes that the forward sets on modules that are glue are set, too, and hooks that it has put on modules are there from
        now on: it may have noted in an attribute that they are.
        """
        env = self.whole.feed(tensors, self.given)
        env.update(zip(self.frontier, frontier, strict=True))
        self.whole.replay(self.tail, env)
        for where, before, after in self.whole.hooks:
            if where.keys() == before.keys():
                where.update(after)
        for attribute in self.whole.attributes:
            setattr(attribute.module, attribute.name, attribute.value.rebuild(env))
        return self.whole.rebuild_outputs(env)

    # ---- what carries the batch --------------------------------------------------------------------------------------

    def _depending(self) -> set[fx.Node]:
        found = {node for node, cut in zip(self.whole.placeholders, self.is_cut, strict=True) if cut}
        for node in self.whole.nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _batch_dim(self, node: fx.Node) -> RowDim | None:
        whole = self.spec(node).shape
        if self.another_size() is None and self.depends_on_batch(node):
            raise RecordingError(
                f"{describe(node)} depends on the batch of {self.rows} rows, and whether it carries it cannot be told: the "
                "forward fails for any other number of rows"
            )
        dims: set[Flat] = set()
        for rows, recording in self._others.items():
            other = recording.nodes[self._place[node]].meta["spec"].shape
            changed = [d for d in range(len(whole)) if whole[d] != other[d]] if len(whole) == len(other) else []
            fits = [d for d in changed if whole[d] % self.rows == 0 and other[d] == whole[d] // self.rows * rows]
            if whole != other and (len(changed) != 1 or fits != changed):
                raise RecordingError(
                    f"{describe(node)} has the shape {tuple(whole)} for {self.rows} rows and {tuple(other)} for {rows}: no dim "
                    "of it is the batch, so its micro batches cannot be joined. Keep the batch as a dim of its own in what "
                    "goes from one TaskGraph to another and into the loss"
                )
            dims.update(Flat(d, whole[d] // self.rows) for d in changed)
        if len(dims) > 1:
            raise RecordingError(
                f"{describe(node)} of shape {tuple(whole)} carries the batch in another dim at another size"
            )
        found = next(iter(dims), None)
        return found.dim if found is not None and found.inner == 1 else found

    def _is_in_order(self, node: fx.Node) -> bool:
        """Whether a value with several elements for each row in one dim has them row by row."""
        if node not in self._in_order:
            here = self._batch_dim(node)
            assert isinstance(here, Flat)
            self._in_order[node] = keeps_rows_together(node, here, self._rows_of)
        return self._in_order[node]

    def _rows_of(self, node: fx.Node) -> Flat | None:
        try:
            dim = self.batch_dim(node)
        except RecordingError:
            return None
        return None if dim is None else flat(dim)
