"""Pipelines to measure: the same stages on the same batch, run in several ways.

A step is zero_grad, then forward and backward of all micro batches; there is no optimizer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import epl

from .workloads import Transformer

STAGES = 2
TOLERANCE = 1e-5  # of losses and gradients, relative to the largest
PEERS = {"PreferBackward": Schedule1F1B, "PreferForward": ScheduleGPipe}
SHORT = {"PreferBackward": "1f1b", "PreferForward": "gpipe"}


@dataclasses.dataclass(frozen=True)
class Work:
    """One pipeline to measure."""

    model: Transformer
    micro_batches: int
    schedule: str = "PreferBackward"
    stages: int = STAGES

    @property
    def name(self) -> str:
        return f"{SHORT[self.schedule]}_{self.size}"

    @property
    def size(self) -> str:
        return f"h{self.model.width}_m{self.micro_batches}"


class Stage(nn.Module):
    """An even share of the model's layers, under their names; the first also embeds the tokens, the last gives the logits."""

    def __init__(self, shape: Transformer, index: int, stages: int) -> None:
        super().__init__()
        whole, count = shape.model(), shape.layers // stages
        self.layers = whole.layers[index * count : (index + 1) * count]
        self.tokens, self.places = (whole.tokens, whole.places) if index == 0 else (None, None)
        self.norm, self.head = (whole.norm, whole.head) if index == stages - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.places
        x = self.layers(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Runner(Protocol):
    """One way to run a pipeline: its own copy of this rank's stage, the same data."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those of this rank's stage, in the order of `Stage`'s."""

    def step(self) -> torch.Tensor | None:
        """zero_grad, and the gradients of the mean loss of all micro batches; the losses (or their mean) where the last stage is."""


class ForwardBackward:
    """epl with functions for each stage."""

    def __init__(self, work: Work, stage: nn.Module) -> None:
        self.stage, self.batch = stage, work.model.batch(0)
        self.parameters = stage.parameters
        rank = dist.get_rank()
        if rank == work.stages - 1:
            self.forward = lambda received, x, y: loss_of(stage(received), y)
        else:
            self.forward = lambda received, x, y: stage(x if rank == 0 else received)

    def step(self) -> torch.Tensor:
        self.stage.zero_grad()
        return epl.forward_backward(self.forward, *self.batch, module=self.stage)


class Torch:
    """torch's own, with the shapes given beforehand."""

    def __init__(self, work: Work, stage: nn.Module) -> None:
        self.stage, rank = stage, dist.get_rank()
        self.parameters = stage.parameters
        tokens, self.targets = work.model.batch(0)
        self.inputs = (tokens,) if rank == 0 else ()
        self.last = rank == work.stages - 1
        with torch.no_grad():
            rows = work.model.rows // work.micro_batches
            taken = tokens[:rows] if rank == 0 else torch.zeros(rows, work.model.sequence, work.model.width)
            given = stage(taken)
        wrapped = PipelineStage(
            stage,
            rank,
            work.stages,
            torch.device("cpu"),
            input_args=taken.requires_grad_(rank > 0),
            output_args=given.requires_grad_(),
            group=dist.new_group(),
        )
        self.schedule = PEERS[work.schedule](wrapped, work.micro_batches, loss_fn=loss_of)

    def step(self) -> torch.Tensor | None:
        self.stage.zero_grad()
        if not self.last:
            self.schedule.step(*self.inputs)
            return None
        losses: list[torch.Tensor] = []
        self.schedule.step(*self.inputs, target=self.targets, losses=losses, return_outputs=False)
        return torch.stack(losses).detach()


def start(work: Work) -> None:
    """Join the other ranks."""
    logging.getLogger("epl").setLevel(logging.WARNING)
    epl.init(epl.Config({"pipeline.num_micro_batch": work.micro_batches, "pipeline.strategy": work.schedule}))
    epl.setup_process_groups([("pipe", work.stages)])


def check_same(runners: Mapping[str, Runner], expected: str) -> None:
    """Run a step of each, and refuse to compare the speed of different computations: all must give what `expected` gives."""
    losses = {name: runner.step() for name, runner in runners.items()}
    found = {name: [p.grad for p in runner.parameters()] for name, runner in runners.items()}
    if dist.get_rank() == dist.get_world_size() - 1:
        told = {name: loss for name, loss in losses.items() if loss is not None}
        if len({loss.shape for loss in told.values()}) > 1:  # some tell that of the whole batch only
            told = {name: loss.mean() for name, loss in told.items()}
        found = {name: [told[name], *gradients] for name, gradients in found.items()}
    for name, tensors in found.items():
        for ours, theirs in zip(tensors, found[expected], strict=True):
            furthest, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
            if not furthest <= TOLERANCE * max(largest, 1e-3):
                raise RuntimeError(f"{name} differs from {expected} by {furthest:g} in a tensor of up to {largest:g}")
