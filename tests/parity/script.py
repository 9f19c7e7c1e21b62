"""The training script of the parity table, plain and under epl, and the references it is compared with."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import epl
from epl.plan.batch import cut_evenly
from tests.parity.compare import Run
from tests.parity.models import TASKS

MICRO_BATCH, EPOCHS, MAX_NORM = 4, 2, 0.05


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    model: str
    optimizer: str = "sgd"
    ranks: int = 2
    device_count: int = 1
    clip: str = "no"  # "no", "after" or "before" the reduction
    drop_tail: bool = False
    config: dict[str, object] = field(default_factory=dict)
    micro_batch: int = MICRO_BATCH

    @property
    def replicas(self) -> int:
        return self.ranks // self.device_count

    @property
    def method(self) -> str:
        return str(self.config.get("communication.gradients_reduce_method", "mean"))

    @property
    def sync_batch_norm(self) -> bool:
        return bool(self.config.get("communication.sync_batch_norm", False))

    def settings(self) -> dict[str, object]:
        own: dict[str, object] = {"communication.timeout": 60}
        if self.clip == "before":
            own["communication.clip_after_allreduce"] = False
        if self.drop_tail:
            own["io.uneven_tail"] = "drop"
        return own | self.config


def make_optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    sparse = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.sparse]
    dense = [p for p in model.parameters() if all(p is not s for s in sparse)]
    if kind == "sgd":
        # Momentum of sparse gradients is not defined in torch; the table has plain SGD for them.
        return [torch.optim.SGD([{"params": dense, "momentum": 0.9}, {"params": sparse}], lr=0.1)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=0.01, weight_decay=0.05)]
    return optimizers + ([torch.optim.SparseAdam(sparse, lr=0.01)] if sparse else [])


def under_epl(case: Case) -> Run:
    """The user's script with epl's lines; runs on every rank."""
    epl.init(epl.Config(case.settings()))
    epl.set_default_strategy(epl.replicate(case.device_count))
    torch.manual_seed(5 + epl.Env.get().cluster.rank)  # ranks begin apart: weights and order must become rank 0's
    task = TASKS[case.model]
    model = task.make().double()
    optimizers = make_optimizers(case.optimizer, model)
    loader = DataLoader(task.data(), batch_size=case.micro_batch, shuffle=True)
    epl.parallelize(model, *optimizers, loader)
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            if case.clip != "no":
                clip_grad_norm_(model.parameters(), MAX_NORM)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(epl.global_mean(loss).item())
    return Run(losses, {name: t.clone() for name, t in epl.full_state_dict(model).items()})


def on_one_device(case: Case) -> Run:
    """The plain script on the global batch. Where replicas see their rows apart (sum, clipping before the reduction, local
    batch norm) it takes the batch in the replicas' blocks and joins their gradients by the rule that is being tested."""
    torch.manual_seed(5)
    task = TASKS[case.model]
    model = task.make().double()
    optimizers = make_optimizers(case.optimizer, model)
    loader = DataLoader(
        task.data(), batch_size=case.replicas * case.micro_batch, shuffle=True, drop_last=case.drop_tail
    )
    local_norm = any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) and not case.sync_batch_norm
    apart = case.method == "sum" or case.clip == "before" or local_norm
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            rows = len(batch[0])
            blocks = [b for b in cut_evenly(0, rows, case.replicas) if b[0] < b[1]] if apart else [(0, rows)]
            buffers, after = copy.deepcopy(dict(model.named_buffers())), None
            total: dict[str, torch.Tensor] = {}
            loss_of_batch = 0.0
            for start, stop in blocks:
                model.load_state_dict(buffers, strict=False)
                model.zero_grad()
                loss = task.loss(model, tuple(t[start:stop] for t in batch))
                loss.backward()
                if case.clip == "before":
                    _clip(model)
                weight = (stop - start) / rows
                loss_of_batch += weight * loss.item()
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        part = p.grad * (1.0 if case.method == "sum" else weight)
                        total[name] = total[name] + part if name in total else part
                after = after if after is not None else copy.deepcopy(dict(model.named_buffers()))
            model.load_state_dict(after, strict=False)
            for name, p in model.named_parameters():
                p.grad = total.get(name)
            if case.clip == "after":
                _clip(model)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss_of_batch)
    return Run(losses, model.state_dict())


def _clip(model: nn.Module) -> None:
    """By hand, so that the reference leans on nothing of what it checks, and for sparse gradients too."""
    gradients = [
        p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None
    ]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    factor = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * factor
