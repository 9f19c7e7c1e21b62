"""A mailbox for stages of unequal width: a value of a stage's lanes is cut, sent, and joined at the lanes of another.

    send       the rows that each lane of the other stage needs, in a message of its own     (`route` says which)
    receive    joined in order, as the leaves of this lane's forward
    gradients  cut and joined in the same way, back to the lanes that made the rows

Values are flat tuples of tensors; how each carries the batch is the caller's to say. Where a lane needs only what the same lane
has made (equal widths) the value passes as it is, whatever it is. Lanes on one rank (a home) hand pieces over without a message.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from epl.errors import UsageError
from epl.parallel.pipeline.lanes import Lanes
from epl.parallel.pipeline.mailbox import Mailbox
from epl.parallel.pipeline.parcel import Form, TensorForm, enter_stage
from epl.parallel.pipeline.route import Layout, Route, Share, route
from epl.parallel.pipeline.transport import Direction, Edge, Transport
from epl.plan.batch import flat

Pieces = list[tuple[Share, torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """What went to, or came from, one lane of the other stage."""

    lane: int
    shares: tuple[Share, ...]
    needs: tuple[bool, ...]
    """For each share whether its gradient comes back."""
    form: Form | None
    """Of the message that brings the gradients back; None where there is none, since the lane is on this rank too."""


@dataclass(frozen=True)
class Crossing(Form):
    """The form of a value that crossed a bridge, and what became of it on the way."""

    micro_batch: int
    parts: tuple[Part, ...]


def make_mailbox(
    transport: Transport, lanes: Lanes, rows: Sequence[int], layouts: Mapping[Edge, Sequence[Layout]]
) -> Mailbox | Bridge:
    """A plain mailbox where every stage has one rank, else a bridge; the arguments are those of `Bridge`."""
    return Mailbox(transport, lanes.size) if lanes.is_plain else Bridge(transport, lanes, rows, layouts)


class Bridge:
    """What this rank's lanes send and receive; used like a `Mailbox`.

    `rows` are those of each micro batch, `layouts` those of the tensors of each edge. Both may change between steps (`load`), on
    all ranks alike; forms are told anew where they do.
    """

    def __init__(
        self, transport: Transport, lanes: Lanes, rows: Sequence[int], layouts: Mapping[Edge, Sequence[Layout]]
    ) -> None:
        self._lanes, self._mailbox, self._device = lanes, Mailbox(transport, lanes.size), transport.device
        self._here: dict[tuple[Direction, Edge, int], list[torch.Tensor | None]] = {}
        self._patient: Collection[Edge] = ()
        self.load(rows, layouts)

    def load(self, rows: Sequence[int], layouts: Mapping[Edge, Sequence[Layout]]) -> None:
        """What the next steps carry."""
        self._rows, self._layouts = rows, {edge: tuple(each) for edge, each in layouts.items()}

    @property
    def patient(self) -> Collection[Edge]:
        """See `Mailbox.patient`."""
        return self._patient

    @patient.setter
    def patient(self, edges: Collection[Edge]) -> None:
        if edges != self._patient:
            width = self._lanes.width
            pairs = [(e, m, u) for e in edges for m in range(width(e[0])) for u in range(width(e[1]))]
            self._mailbox.patient = frozenset(self._lanes.channel(*pair) for pair in pairs)
            self._patient = edges

    # ---- activations -----------------------------------------------------------------------------------------------

    def send(self, edge: Edge, micro_batch: int, value: object) -> tuple[Form, list[torch.Tensor]]:
        lanes, own = self._lanes, self._lanes.lane(edge[0])
        ways = self._route(edge, micro_batch)
        if ways is None:
            return self._mailbox.send(lanes.channel(edge, own, own), micro_batch, value)
        tensors = self._checked(edge, micro_batch, value)
        parts = []
        for (maker, user), shares in ways.items():
            if maker != own:
                continue
            pieces = [_take(share, tensors[share.tensor]) for share in shares]
            form = None
            if self._is_own(edge[1], user):
                self._here["forward", edge, micro_batch] = list(pieces)
            else:
                message = pieces[0] if len(pieces) == 1 else tuple(pieces)
                form, _ = self._mailbox.send(lanes.channel(edge, own, user), micro_batch, message)
            parts.append(_part(user, shares, pieces, form, tensors))
        return Crossing(b"", _forms(tensors), micro_batch, tuple(parts)), tensors

    def expect(self, edge: Edge, micro_batch: int) -> None:
        for maker, _ in self._incoming(edge, micro_batch):
            if not self._is_own(edge[0], maker):
                self._mailbox.expect(self._lanes.channel(edge, maker, self._lanes.lane(edge[1])), micro_batch)

    def receive(self, edge: Edge, micro_batch: int) -> tuple[object, Form, list[torch.Tensor]]:
        own = self._lanes.lane(edge[1])
        if self._route(edge, micro_batch) is None:
            return self._mailbox.receive(self._lanes.channel(edge, own, own), micro_batch)
        came: list[tuple[int, tuple[Share, ...], list[torch.Tensor], Form | None]] = []
        arrived = defaultdict[int, Pieces](list)
        for maker, shares in self._incoming(edge, micro_batch):
            form, pieces = None, []
            if self._is_own(edge[0], maker):
                pieces = [p for p in self._here.pop(("forward", edge, micro_batch)) if p is not None]
            else:
                _, form, pieces = self._mailbox.receive(self._lanes.channel(edge, maker, own), micro_batch)
            came.append((maker, shares, pieces, form))
            for share, piece in zip(shares, pieces, strict=True):
                arrived[share.tensor].append((share, piece))
        leaves = [_join(arrived[n], edge) for n in range(len(self._layouts[edge]))]
        parts = tuple(_part(maker, shares, pieces, form, leaves) for maker, shares, pieces, form in came)
        return tuple(enter_stage(leaves)), Crossing(b"", _forms(leaves), micro_batch, parts), leaves

    # ---- gradients -------------------------------------------------------------------------------------------------

    def send_gradients(self, edge: Edge, form: Form, gradients: list[torch.Tensor | None]) -> None:
        own = self._lanes.lane(edge[1])
        if not isinstance(form, Crossing):
            self._mailbox.send_gradients(self._lanes.channel(edge, own, own), form, gradients)
            return
        coming = iter(gradients)
        by_tensor = [next(coming) if t.needs_gradient else None for t in form.tensors]
        for part in form.parts:
            needed = [share for share, needs in zip(part.shares, part.needs, strict=True) if needs]
            pieces = [_take_back(share, by_tensor[share.tensor]) for share in needed]
            if part.form is None:
                self._here["backward", edge, form.micro_batch] = pieces
            else:
                self._mailbox.send_gradients(self._lanes.channel(edge, part.lane, own), part.form, pieces)

    def expect_gradients(self, edge: Edge, micro_batch: int, form: Form) -> None:
        for channel, sent in self._returning(edge, form):
            self._mailbox.expect_gradients(channel, micro_batch, sent)

    def receive_gradients(self, edge: Edge, micro_batch: int, form: Form) -> list[torch.Tensor | None]:
        own = self._lanes.lane(edge[0])
        if not isinstance(form, Crossing):
            return self._mailbox.receive_gradients(self._lanes.channel(edge, own, own), micro_batch, form)
        returned = defaultdict[int, list[tuple[Share, torch.Tensor | None]]](list)
        for part in form.parts:
            if part.form is None:
                gradients = self._here.pop(("backward", edge, micro_batch))
            else:
                channel = self._lanes.channel(edge, own, part.lane)
                gradients = self._mailbox.receive_gradients(channel, micro_batch, part.form)
            needed = [share for share, needs in zip(part.shares, part.needs, strict=True) if needs]
            for share, gradient in zip(needed, gradients, strict=True):
                returned[share.tensor].append((share, gradient))
        return [self._join_back(t, returned[n]) for n, t in enumerate(form.tensors) if t.needs_gradient]

    def finish(self) -> None:
        """Wait until everything sent has left; a step ends with this."""
        self._mailbox.finish()
        assert not self._here, f"pieces that nobody took: {list(self._here)}"

    # ---- where things go -------------------------------------------------------------------------------------------

    def _route(self, edge: Edge, micro_batch: int) -> Route | None:
        """None: a lane's value is all that the same lane of the other stage gets."""
        layouts = self._layouts.get(edge, ())
        if self._lanes.is_direct(edge, layouts):
            return None
        assert edge in self._layouts, f"the values of edge {edge} are cut, but their layouts are not known"
        widths = self._lanes.width(edge[0]), self._lanes.width(edge[1])
        return route(self._rows[micro_batch], *widths, layouts, self._lanes.copies(edge))

    def _incoming(self, edge: Edge, micro_batch: int) -> Iterator[tuple[int, tuple[Share, ...]]]:
        own, ways = self._lanes.lane(edge[1]), self._route(edge, micro_batch)
        if ways is None:
            yield own, ()
        else:
            yield from ((maker, shares) for (maker, user), shares in ways.items() if user == own)

    def _returning(self, edge: Edge, form: Form) -> Iterator[tuple[Edge, Form]]:
        own = self._lanes.lane(edge[0])
        if isinstance(form, Crossing):
            yield from ((self._lanes.channel(edge, own, p.lane), p.form) for p in form.parts if p.form is not None)
        else:
            yield self._lanes.channel(edge, own, own), form

    def _is_own(self, stage: int, lane: int) -> bool:
        return self._lanes.ranks[stage][lane] == self._lanes.own

    def _checked(self, edge: Edge, micro_batch: int, value: object) -> list[torch.Tensor]:
        layouts = self._layouts[edge]
        assert isinstance(value, tuple), f"a value that is cut is a flat tuple of tensors; found {type(value).__name__}"
        assert len(value) == len(layouts), f"{len(value)} tensors on edge {edge}, {len(layouts)} layouts"
        rows = self._lanes.rows(edge[0], self._rows[micro_batch])
        for number, (tensor, layout) in enumerate(zip(value, layouts, strict=True)):
            if isinstance(layout, str) or rows.padding:
                continue
            dim, inner = flat(layout)
            if tensor.shape[dim] != len(rows) * inner:
                raise UsageError(
                    f"tensor {number} that stage {edge[0]} sends to stage {edge[1]} must have the {len(rows)} rows of its lane in dim "
                    f"{dim}{f', {inner} elements each' * (inner > 1)}; found shape {tuple(tensor.shape)}"
                )
        return list(value)

    def _join_back(self, form: TensorForm, pieces: list[tuple[Share, torch.Tensor | None]]) -> torch.Tensor | None:
        """The gradient of a tensor from those of its pieces; None if it had no use anywhere."""
        if all(gradient is None for _, gradient in pieces):
            return None
        share = pieces[0][0]
        if share.dim is None:
            found = [gradient for s, gradient in pieces if gradient is not None and s.counts]
            total = functools.reduce(torch.add, found)
            return total if share.weight == 1.0 else total * share.weight
        rows = [
            self._zeros(form, s) if gradient is None else gradient for s, gradient in pieces if s.counts and s.length
        ]
        if not rows:  # this lane computes a neighbour's row at weight 0: its backward runs, for nothing
            return torch.zeros(form.shape, dtype=form.dtype, device=self._device)
        return rows[0] if len(rows) == 1 else torch.cat(rows, share.dim)

    def _zeros(self, form: TensorForm, share: Share) -> torch.Tensor:
        assert share.dim is not None
        shape = [*form.shape]
        shape[share.dim] = share.length
        return torch.zeros(shape, dtype=form.dtype, device=self._device)


def _take(share: Share, tensor: torch.Tensor) -> torch.Tensor:
    """The piece that is sent; whether it needs a gradient travels with it, the graph does not."""
    piece = tensor.detach()
    if not share.sends:
        piece = piece.new_empty(0)
    elif share.dim is not None:
        piece = piece.narrow(share.dim, share.start, share.length)
    return piece.requires_grad_(tensor.requires_grad)


def _take_back(share: Share, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    if not share.counts:
        return gradient.new_empty(0)
    return gradient if share.dim is None else gradient.narrow(share.dim, share.at, share.length)


def _part(
    lane: int,
    shares: tuple[Share, ...],
    pieces: Sequence[torch.Tensor],
    form: Form | None,
    tensors: Sequence[torch.Tensor],
) -> Part:
    """What went to or came from a lane, `tensors` being the whole ones on this side."""
    needs = tuple(piece.requires_grad for piece in pieces)
    if form is not None:
        shapes = [_shape_back(share, tensors[share.tensor]) for share in shares]
        found = zip(shapes, pieces, needs, strict=True)
        form = Form(b"", tuple(TensorForm(shape, piece.dtype, need) for shape, piece, need in found))
    return Part(lane, shares, needs, form)


def _shape_back(share: Share, tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the gradient of a share; the tensors at both ends differ in their rows only."""
    if not share.counts:
        return (0,)
    shape = list(tensor.shape)
    if share.dim is not None:
        shape[share.dim] = share.length
    return tuple(shape)


@torch.no_grad()
def _join(pieces: Pieces, edge: Edge) -> torch.Tensor:
    """A leaf of this lane's forward from what the lanes of the other stage have sent of it."""
    counted = [(s, piece) for s, piece in pieces if s.sends and (s.length or (s.dim is None and s.weight))]
    share, piece = counted[0]
    if len(counted) == 1:
        return piece
    needs_gradient = any(piece.requires_grad for _, piece in counted)
    if share.dim is not None:
        joined = torch.cat([piece for _, piece in counted], share.dim)
    else:
        if not (piece.is_floating_point() or piece.is_complex()):
            raise UsageError(
                f"stage {edge[0]} is replicate({len(pieces)}) and sends stage {edge[1]} a {piece.dtype} tensor that depends on the batch "
                "without having a batch dim: each of its devices has one of its own rows, and they have no average. Compute it as "
                "floating point, or in a replicate(1) TaskGraph."
            )
        joined = functools.reduce(torch.add, [piece * share.weight for share, piece in counted])
    return joined.requires_grad_(needs_gradient)


def _forms(tensors: Sequence[torch.Tensor]) -> tuple[TensorForm, ...]:
    return tuple(TensorForm(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
