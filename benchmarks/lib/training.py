"""One way to train a model of which a part is split, and what can be asked of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

RANKS = 2
Scope = Callable[[], AbstractContextManager[object]]


class Trainer:
    """Its own copy of the model and its optimizers; the weights at the start and the data are those of all others."""

    def __init__(
        self,
        loss_of: Callable[[], torch.Tensor],
        optimizers: Sequence[Optimizer],
        parts: Sequence[nn.Module],
        *,
        within: Scope = contextlib.nullcontext,
    ) -> None:
        """`parts`: what is split where anything is. `within`: what the loss and its gradients are computed in."""
        self.loss_of, self.optimizers, self.parts, self.within = loss_of, optimizers, parts, within

    def gradients(self) -> torch.Tensor | None:
        """zero_grad, forward and backward; the loss of this rank's rows."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with self.within():
            loss = self.loss_of()
            loss.backward()
        return loss.detach()

    def step(self) -> torch.Tensor | None:
        """The gradients, and a step of the optimizers."""
        loss = self.gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def held(self) -> int:
        """Bytes that this rank holds for the parts: parameters, gradients and the optimizers' state."""
        kept: list[object] = []
        for parameter in (p for part in self.parts for p in part.parameters()):
            kept += [parameter, parameter.grad]
            for optimizer in self.optimizers:
                kept += optimizer.state.get(parameter, {}).values()
        memory = [tensor.untyped_storage() for tensor in kept if isinstance(tensor, torch.Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


class Idle(Trainer):
    """A rank that has nothing to do."""

    def __init__(self) -> None:
        super().__init__(lambda: torch.empty(()), [], [])

    def gradients(self) -> None:
        return


Way = Callable[[], Trainer]


class Case(Protocol):
    """A model and its data, trained in several ways."""

    @property
    def name(self) -> str:
        """How it is called in tables."""

    @property
    def tiny(self) -> Case:
        """The same, with hardly any work."""

    @property
    def settings(self) -> Mapping[str, object]:
        """What epl is told."""

    @property
    def timed(self) -> Callable[[Trainer], object]:
        """What the clock sees."""

    def ways(self) -> dict[str, Way]:
        """Under names; the first two are epl's, and the peer that also shows the noise."""

    def whole(self) -> Trainer:
        """The model on one device."""


def check_losses(losses: Mapping[str, torch.Tensor | None], tolerance: float) -> None:
    """Refuse to compare the speed of different computations: the means over the ranks that have a loss must be the same."""
    told = torch.tensor([(0.0, 0.0) if loss is None else (loss.item(), 1.0) for loss in losses.values()])
    dist.all_reduce(told)
    found = dict(zip(losses, (told[:, 0] / told[:, 1]).tolist(), strict=True))
    expected = next(iter(found.values()))
    if not all(abs(loss - expected) <= tolerance * abs(expected) for loss in found.values()):
        raise RuntimeError(f"the losses differ: {found}; expected the same within {tolerance:g}")
