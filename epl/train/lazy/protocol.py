"""What lazy values ask of whoever runs a cut model: `Call` is one `model(x)`, `Carrier` runs calls over a replica's stages.

Every rank of a replica runs the same loop; one of them, *home*, computes the recorded code. Every method of a `Carrier` below
is called on every rank of the replica, in the same order, with the same plain arguments; tensors are given at home only,
unless said otherwise. Which methods, and when:

    forward only    agree · forward_all(call, keep=False)                                   no_grad, or an output that needs none
    scheduled       agree · begin_backward · train(loss) · [exchange, share …] · end_backward · push
    whole batch     agree · forward_all(call, keep=True) for each call, earliest first
                    agree · begin_backward · backward_all(call, …) for each call, latest first · [exchange, share …] · end_backward · push
    a read          agree · share(…)

Who sets what: the maker of a call sets everything once; afterwards only this package writes `state` and replaces lazy `inputs`,
and only the carrier writes `input_gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn

from epl.graph.context import Context
from epl.graph.spec import Spec
from epl.plan.batch import RowDim
from epl.train.lazy.node import Node

Kind = RowDim | Literal["coupled", "constant"]
"""Of a frontier value: the dim with its rows; or without one, but made from the batch (averaged by rows); or the same for any batch."""

State = Literal["new", "forward", "done"]
"""Of a call: nothing has run; all forwards have run and their graphs are kept; it has run, and no graph is left."""


class Call(Protocol):
    """One `model(x)`."""

    carrier: Carrier
    context: Context
    """Grad mode and autocast that the model was called under; bodies run under it."""
    rows: int
    sizes: tuple[int, ...]
    """Rows of each micro batch; they sum to `rows`."""
    inputs: list[torch.Tensor | Node]
    """Every tensor among the arguments, in the order of the recording's placeholders; a Node for one that is lazy. Before
    `forward_all` or `train` each Node has been replaced by a real tensor, the same on every rank, a leaf that requires grad
    if its gradient is wanted."""
    nodes: list[Node]
    """One per frontier value, made by `epl.train.lazy.outputs_of(call, specs)`."""
    kinds: tuple[Kind, ...]
    """One per frontier value."""
    state: State
    input_gradients: list[torch.Tensor | None]
    """One per input, set by the carrier, on every rank: the gradient of this pass (not a running total) with respect to each
    input that requires grad, the whole batch's rows joined; None for the others and if nothing reached it. Empty before."""

    def check(self) -> None:
        """Raise if a parameter of this rank or an input was changed in place since `model(x)`."""


class ScheduledLoss(Protocol):
    """What home computes while the schedule runs; see `Carrier.train`."""

    calls: list[Call]
    """The calls whose bodies run, in the order they were made: of this carrier, state "new", as many micro batches each."""
    together: bool
    """Whether all lanes of the last stage compute it, each on its part of the frontier values; alike on every rank."""
    reached: frozenset[Node]
    """The frontier values whose gradient the loss needs, alike on every rank. The others may be handed over detached."""

    def share(self, m: int, outputs: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """Micro batch m's part of the loss, at home (or at all lanes), once for each m, in the order the schedule pleases.

        `outputs` has every frontier value of every call, for this micro batch: as the body gave it, neither scaled nor joined.
        The caller then runs `torch.autograd.backward([part], [loss.seed(m)])` (accumulating: other leaves that only the loss
        knows get their gradients by it too), unless `part.requires_grad` is False: then this micro batch adds nothing. A
        frontier value of `reached` left without a gradient has a gradient of zero.
        """

    def seed(self, m: int) -> torch.Tensor | None:
        """The gradient that backward starts with at micro batch m's part; None: one."""


class Carrier(Protocol):
    """Runs the bodies of calls over the stages of one model replica."""

    ranks: tuple[int, ...]
    """Global ranks of the replica, in an order that all of them share."""
    home: int
    """The global rank that computes recorded code: it has the last stage."""
    is_home: bool
    ends_split: bool
    """Whether the last stage is split over ranks, its *lanes*: home is one of them, and they can compute a scheduled loss together."""
    at_end: bool
    """Whether this rank is home, or splits the last stage with home."""
    parameters: Mapping[str, nn.Parameter]
    """Every parameter of the model by name, as the loop holds it: real on a rank that owns it, a `ForeignParameter` elsewhere.
    Tied ones are the same object. Same names on every rank."""

    def refuses(self, calls: Sequence[Call]) -> str:
        """Why these calls cannot be trained in one schedule, "" if they can; no communication, alike on every rank."""

    def agree(self, kind: str, bits: int, flags: int = 0) -> int:
        """The union of all ranks' flags (three bits); raises on every rank unless all make this call, of one kind, with the same 64 bits.

        Called before anybody waits for anybody. `kind` is text for people: "reading a value", "loss.backward()".
        """

    def forward_all(self, call: Call, keep: bool, at_lanes: bool = False) -> list[torch.Tensor] | None:
        """Run every micro batch's forward. At home: the frontier values of the whole batch, detached; elsewhere None.

        `at_lanes`: all lanes of the last stage have them, as that has left them, maybe cut; only if it is split, and without `keep`.

        Joined along the batch dim; "coupled": the mean of the micro batches' values, weighted by rows; "constant": the first
        one's. With `keep` the graphs are kept for `backward_all`; without, bodies run without grad mode.
        """

    def begin_backward(self, aside: bool, terms: bool = False) -> None:
        """One backward pass of the loop begins; `train` and `backward_all` calls of it follow, then `end_backward`.

        `terms`: there is an expression over parameters in the loss, so that on some rank of the replica `end_backward` may get `extra`.

        Unless `aside`, gradients of parameters may be added into `.grad` as they come, if no hook on the parameter would see a
        part of them; with `aside`, `.grad` must be left alone.
        """

    def train(self, loss: ScheduledLoss) -> None:
        """Run the schedule over `loss.calls`: forward, `loss.share` at home, and backward of every micro batch.

        `call.input_gradients` is set afterwards on every rank.
        """

    def backward_all(
        self, call: Call, gradients: list[torch.Tensor | None] | None, reached: tuple[bool, ...], retain: bool
    ) -> None:
        """Run every micro batch's backward from the gradients of the whole batch's frontier values, given at home.

        `reached` says, on every rank, which of them have one: `gradients[i]` is a tensor exactly where `reached[i]`. A value's rows
        go to their micro batches; "coupled": each gets its share by rows; "constant": the first one gets all. With `retain`
        the graphs are kept and this may be called again. `call.input_gradients` is set afterwards on every rank.
        """

    def end_backward(self, extra: Mapping[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        """The pass has ended. `extra`: gradients of parameters this rank owns that come from the loss itself (an L2 term).

        Without `aside`: each owned parameter's gradient of this pass (its parts from the schedule, `extra`, ties, and the shares
        of a wide stage, added up) is handed over once, so that hooks see the whole; returns {}. With `aside`: it is returned
        instead, for the parameters this rank owns; nothing is reduced over replicas.
        """

    def share(self, values: list[torch.Tensor] | None, specs: list[Spec]) -> list[torch.Tensor]:
        """The values, given at home, on every rank (detached); `specs` are alike on every rank. At home they may be the same objects."""

    def push(self, values: list[tuple[int, torch.Tensor]] | None) -> list[tuple[int, torch.Tensor]]:
        """Small numbered values, given at home, on every rank. Only home knows how many there are and of what shape.

        Called once at the end of each backward, with no `agree` before it: it may ride on the last message of the step.
        """

    def exchange(self, value: object) -> list[object]:
        """What every rank gave, in the order of `ranks`; pickled. For rare cases: a term over parameters of several ranks."""


@runtime_checkable
class Forgetful(Protocol):
    """A carrier that can drop what it kept."""

    def forget(self, call: Call) -> None:
        """No backward of this call will come: what `forward_all(keep=True)` kept may go. No communication; on any rank alone."""
