"""One stage of a pipeline: the forward and backward of each micro batch, and what is kept in between.

received ──forward──▶ outputs ──▶ sent           kept: the leaves that were received, the graph behind what was sent
returning ◀─backward── gradients of what was sent       kept: nothing but the gradients on their way back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from epl.errors import UsageError
from epl.parallel.pipeline.parcel import Form, put_together
from epl.parallel.pipeline.weight import Halves, backward_of_inputs

Backward = Callable[[object, object], None]
Gradients = list[torch.Tensor | None]


class StageProgram(Protocol):
    """What a stage computes."""

    def forward(self, received: Mapping[int, object], micro_batch: int) -> tuple[Mapping[int, object], object]:
        """From what each earlier stage sent: what each later stage gets, and this stage's part of the loss (or None)."""


@dataclass
class Received:
    """What came along one edge: its tensors are leaves, whose gradients go back along the edge."""

    value: object
    form: Form
    tensors: list[torch.Tensor]

    def gradients(self) -> Gradients:
        """Of those tensors that need one, in the order of the form."""
        return [t.grad for t in self.tensors if t.requires_grad]


class Sent:
    """What left along one edge, until its gradients come back: only the place in the graph, not the numbers."""

    def __init__(self, form: Form, tensors: list[torch.Tensor]) -> None:
        self.form = form
        self.roots = [get_gradient_edge(t) for t in tensors if t.requires_grad] if torch.is_grad_enabled() else []
        self.gradients: Gradients = []


@dataclass
class MicroBatch:
    """What a stage keeps of one micro batch."""

    received: dict[int, Received] = field(default_factory=dict)
    outputs: dict[int, object] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    seeds: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Values of this stage whose gradients come from outside the pipeline, with these."""
    halves: Halves | None = None
    returning: dict[int, tuple[Form, Gradients]] = field(default_factory=dict)

    def roots(self, weight: float) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where backward starts: what was sent, with its gradients, and the loss, with its weight."""
        pairs: list[tuple[GradientEdge, torch.Tensor]] = []
        for sent in self.sent.values():
            pairs += [(r, g) for r, g in zip(sent.roots, sent.gradients, strict=True) if g is not None]
        if self.loss is not None and self.loss.requires_grad:
            pairs.append((get_gradient_edge(self.loss), torch.full_like(self.loss, weight)))
        pairs += [(get_gradient_edge(value), gradient) for value, gradient in self.seeds]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]

    def turn_round(self, retain: bool = False) -> None:
        """Backward has reached the inputs: only the gradients that go back are still needed, unless it will come again."""
        self.returning = {peer: (r.form, r.gradients()) for peer, r in self.received.items()}
        self.seeds = []
        if retain:
            for received in self.received.values():
                for tensor in received.tensors:
                    tensor.grad = None
        else:
            self.received, self.outputs, self.sent, self.loss = {}, {}, {}, None

    @property
    def done(self) -> bool:
        """Nothing is kept any more."""
        return (
            not (self.received or self.outputs or self.sent or self.returning) and self.loss is None and not self.halves
        )


class Stage:
    """A stage and its micro batches in flight."""

    def __init__(self, index: int, program: StageProgram, backward: Backward | None = None) -> None:
        self.index, self._program, self._backward = index, program, backward
        self.flying: dict[int, MicroBatch] = {}
        self.retain = False
        """Whether graphs are kept for another backward."""

    def micro_batch(self, number: int) -> MicroBatch:
        """What is kept of a micro batch; nothing before its first action."""
        return self.flying.setdefault(number, MicroBatch())

    def forward(self, number: int) -> torch.Tensor | None:
        """Compute a micro batch; its loss, where this stage has one."""
        kept = self.micro_batch(number)
        outputs, loss = self._program.forward({peer: r.value for peer, r in kept.received.items()}, number)
        kept.outputs = dict(outputs)
        if loss is not None:
            kept.loss = _checked_loss(loss, self.index)
        return kept.loss

    def left(self, number: int, peer: int, form: Form, tensors: list[torch.Tensor]) -> None:
        """What was computed for a later stage has gone there."""
        kept = self.flying[number]
        kept.sent[peer] = Sent(form, tensors)
        if self._backward is None:
            del kept.outputs[peer]

    def backward(self, number: int, weight: float) -> None:
        """The gradients of a micro batch, of inputs and weights together."""
        kept = self.flying[number]
        if self._backward is not None:
            self._run_users_backward(self._backward, kept, weight)
        else:
            roots, gradients = kept.roots(weight)
            if roots:
                torch.autograd.backward(roots, gradients, retain_graph=self.retain or None)
        kept.turn_round(self.retain)

    def backward_of_inputs(self, number: int, weight: float) -> None:
        """Only the gradients of what was received; those of the weights are left for `backward_of_weights`."""
        kept = self.flying[number]
        leaves = [t for received in kept.received.values() for t in received.tensors if t.requires_grad]
        kept.halves = backward_of_inputs(*kept.roots(weight), leaves)
        kept.turn_round()

    def backward_of_weights(self, number: int) -> None:
        """The other half."""
        kept = self.flying[number]
        assert kept.halves is not None
        kept.halves.backward_of_weights()
        kept.halves = None

    def let_go(self, number: int) -> None:
        """Forget a micro batch of which nothing is kept."""
        if number in self.flying and self.flying[number].done:
            del self.flying[number]

    def _run_users_backward(self, backward: Backward, kept: MicroBatch, weight: float) -> None:
        if kept.loss is not None:
            backward(kept.loss, torch.full_like(kept.loss, weight))
        for peer, sent in kept.sent.items():
            coming = iter(sent.gradients)
            gradients = [next(coming) if t.needs_gradient else None for t in sent.form.tensors]
            backward(kept.outputs[peer], put_together(sent.form, gradients))


def _checked_loss(loss: object, stage: int) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise UsageError(
        f"the last stage (stage {stage}) must return the loss of the micro batch, a tensor with one element (a mean over its "
        f"rows); found {found}"
    )
