"""The training script of the pipelines by annotation, plain and under epl."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import epl
from epl.plan.batch import cut_evenly
from tests.parity.compare import Run
from tests.parity.staged_models import STAGED, groups

MICRO_BATCH, EPOCHS, MAX_NORM = 3, 2, 0.05


@dataclass(frozen=True)
class StagedCase:
    """One line of the table."""

    model: str
    stages: int = 2
    schedule: str = "PreferBackward"
    micro_batches: int = 2
    replicas: int = 1
    optimizer: str = "sgd"
    clip: bool = False
    widths: tuple[int, ...] = ()
    config: dict[str, object] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "Interleaved" else 1

    @property
    def ranks(self) -> int:
        devices = sum(self.widths) if self.widths else self.stages // self.chunks
        return devices * self.replicas

    def settings(self) -> dict[str, object]:
        return {
            "communication.timeout": 60,
            "pipeline.num_micro_batch": self.micro_batches,
            "pipeline.strategy": self.schedule,
            "pipeline.num_chunks": self.chunks,
        } | self.config


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)


def under_epl(case: StagedCase) -> Run:
    """The user's script with epl's lines; runs on every rank."""
    epl.init(epl.Config(case.settings()))
    torch.manual_seed(5 + epl.Env.get().cluster.rank)
    task = STAGED[case.model]
    model = task.make().double()
    widths = case.widths or (1,) * case.stages
    for number, (pieces, width) in enumerate(zip(groups(model.pieces(), case.stages), widths, strict=True)):
        epl.annotate(epl.replicate(width, name=f"stage_{number}"), *pieces)
    optimizer = _optimizer(case.optimizer, model)
    loader = DataLoader(task.data(), batch_size=MICRO_BATCH, shuffle=True)
    model, optimizer, loader = epl.parallelize(model, optimizer, loader)
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss = task.loss(model, tuple(batch))
            loss.backward()
            if case.clip:
                clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            losses.append(epl.global_mean(loss).item())
    return Run(losses, {name: t.clone() for name, t in epl.full_state_dict(model).items()})


def on_one_device(case: StagedCase) -> Run:
    """The plain script on the global batch; the loss of each replica's block is its own mean, and they count by their rows."""
    torch.manual_seed(5)
    task = STAGED[case.model]
    model = task.make().double()
    optimizer = _optimizer(case.optimizer, model)
    loader = DataLoader(task.data(), batch_size=case.replicas * case.micro_batches * MICRO_BATCH, shuffle=True)
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            rows = len(batch[0])
            blocks = [(start, stop) for start, stop in cut_evenly(0, rows, case.replicas) if start < stop]
            parts = [task.loss(model, tuple(t[a:b] for t in batch)) * ((b - a) / rows) for a, b in blocks]
            loss = torch.stack(parts).sum()
            loss.backward()
            if case.clip:
                clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            losses.append(loss.item())
    return Run(losses, model.state_dict())
