"""The training script of mixtures of experts, plain and under epl."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import epl
from tests.parity.compare import Run

WIDTH, CLASSES, LENGTH, STEPS = 8, 11, 3, 3


@dataclass(frozen=True)
class ExpertCase:
    """One line of the table."""

    model: str = "moe"
    """epl.nn.MoE ("moe"), its pieces with a gate under replicate ("pieces"), or experts of the user's own."""
    options: dict[str, Any] = field(default_factory=dict)
    mode: str = "same"
    """"same": everything under split; "rows": attention under replicate, by default; "stages": two of them, both split."""
    ranks: int = 2
    optimizer: str = "adamw"
    rows: int = 4
    micro_batches: int = 1

    @property
    def replicas(self) -> int:
        return self.ranks // (4 if self.mode == "stages" else 2)


class Stacked(nn.Module):
    """The user's own: stacked parameters, every expert on every row, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(5, WIDTH, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(5, 12, WIDTH) * 0.3)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bld,edh->eblh", x, self.up).relu()
        made = torch.einsum("eblh,ehd->ebld", hidden, self.down)
        return torch.einsum("ebld,ble->bld", made, weights)


class Dispatched(nn.Module):
    """GShard's three einsums: rows to places of experts, the experts, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 12, WIDTH) * 0.3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = torch.einsum("blec,bld->ebcd", (mask > 0).to(x.dtype), x)
        hidden = torch.einsum("ebcd,edh->ebch", places, self.up).relu()
        made = torch.einsum("ebch,ehd->ebcd", hidden, self.down)
        return torch.einsum("blec,ebcd->bld", mask, made)


class Listed(nn.Module):
    """A list of experts, each on the rows that have chosen it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, best = x.reshape(-1, WIDTH), weights.reshape(-1, weights.shape[-1])
        made = torch.zeros_like(rows)
        value, choice = best.max(-1)
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero().squeeze(-1)
            made = made.index_add(0, chosen, expert(rows[chosen]) * value[chosen, None])
        return made.view(x.shape)


class Sorted(Listed):
    """DeepSeek's way: rows are counted and sorted by expert, cut into pieces of these lengths, and put back."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows, chosen = x.reshape(-1, WIDTH), chosen.reshape(-1, chosen.shape[-1])
        counts = chosen.new_zeros(len(chosen), len(self.experts)).scatter(1, chosen, 1).sum(0)
        order = chosen.flatten().argsort(stable=True)
        pieces = rows[order // chosen.shape[1]].split(counts.tolist())
        made = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        home = torch.empty_like(made)
        home[order] = made
        return (home.view(*chosen.shape, WIDTH) * weights.reshape(*chosen.shape, 1)).sum(1).view(x.shape)


class User(nn.Module):
    """A gate, and one of the above."""

    def __init__(self, kind: str, split: Any) -> None:
        super().__init__()
        self.kind = kind
        self.gate = nn.Linear(WIDTH, 5 if kind == "stacked" else 4, bias=False)
        with split():
            kinds = {"stacked": Stacked, "dispatched": Dispatched, "listed": Listed, "sorted": Sorted}
            self.experts = kinds[kind]()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.gate(x).softmax(-1)
        if self.kind == "sorted":
            return self.experts(x, *weights.topk(2)), weights.new_zeros(())
        if self.kind == "dispatched":
            best, choice = weights.max(-1)
            chosen = F.one_hot(choice, 4)
            place = (chosen.cumsum(1) - 1) * chosen
            mask = F.one_hot(place, LENGTH) * chosen[..., None]
            return self.experts(x, mask * best[..., None, None]), weights.new_zeros(())
        return self.experts(x, weights), weights.new_zeros(())


class Pieces(nn.Module):
    """epl's gate as usual, epl's experts under split."""

    def __init__(self, split: Any, **options: Any) -> None:
        super().__init__()
        self.gate = epl.nn.TopKGate(WIDTH, 4, top_k=options.pop("top_k", 2))
        with split():
            self.experts = epl.nn.Experts(WIDTH, 12, 4, **options)

    def forward(self, x: torch.Tensor) -> Any:
        return self.experts(x, *self.gate(x))


def _expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))


class Translator(nn.Module):
    """Something like attention, experts, and a head."""

    def __init__(self, case: ExpertCase, annotated: bool) -> None:
        super().__init__()

        def split() -> Any:
            return epl.split(2) if annotated and case.mode == "rows" else contextlib.nullcontext()

        def stage(name: str) -> Any:
            if annotated and case.mode == "stages":
                return epl.split(2, name=name)
            return epl.split(2, name="all") if annotated and case.mode == "same" else contextlib.nullcontext()

        with stage("first"):
            self.words = nn.Embedding(CLASSES, WIDTH)
            self.mix = nn.Linear(WIDTH, WIDTH)
            options = dict(case.options)
            if options.pop("listed", False):
                options["expert"] = _expert
            if case.model == "moe":
                with split():
                    self.moe: nn.Module = epl.nn.MoE(WIDTH, 12, 4, **options)
            elif case.model == "pieces":
                self.moe = Pieces(split, **options)
            else:
                self.moe = User(case.model, split)
        with stage("second"):
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.words(ids)
        h = h + torch.tanh(self.mix(h.mean(1, keepdim=True)))
        made, aux = self.moe(h)
        extra = 0.05 * aux.balance_loss + 0.01 * aux.z_loss if isinstance(aux, epl.nn.Balance) else aux
        return self.head(self.norm(h + made)), extra


def _data(case: ExpertCase) -> TensorDataset:
    g = torch.Generator().manual_seed(7)
    n = case.rows * case.micro_batches * case.replicas * STEPS
    ids = torch.randint(0, CLASSES, (n, LENGTH), generator=g)
    return TensorDataset(ids, (ids * 3 + 1) % CLASSES)


def _optimizer(case: ExpertCase, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)


def _train(case: ExpertCase, model: nn.Module, optimizer: Any, loader: Any, mean: Any, chunks: int = 1) -> list[float]:
    losses = []
    for ids, wanted in loader:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(ids.chunk(chunks), wanted.chunk(chunks), strict=True):
            logits, extra = model(x)
            loss = (F.cross_entropy(logits.flatten(0, 1), y.flatten()) + extra) / chunks
            loss.backward()
            total += mean(loss).item()
        losses.append(float(clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(total)
    return losses


def under_epl(case: ExpertCase) -> Run:
    """The script with epl's lines; runs on every rank."""
    epl.init(
        epl.Config(
            {
                "communication.timeout": 60,
                "pipeline.num_micro_batch": case.micro_batches,
                "cluster.colocate_split_and_replicate": case.mode == "rows",
            }
        )
    )
    torch.manual_seed(5)
    if case.mode == "rows":
        epl.set_default_strategy(epl.replicate(2))
    model = Translator(case, annotated=True).double()
    optimizer = _optimizer(case, model)
    loader = DataLoader(_data(case), batch_size=case.rows)
    epl.parallelize(model, optimizer, loader)
    return Run(_train(case, model, optimizer, loader, epl.global_mean), epl.full_state_dict(model))


def _by_micro_batch(case: ExpertCase, rows: torch.Tensor) -> torch.Tensor:
    """Each of the 2 ranks of a replica has a block of its rows, and cuts that into micro batches: what comes together."""
    blocks = rows.view(-1, 2, case.micro_batches, case.rows // 2, *rows.shape[1:])
    return blocks.transpose(1, 2).reshape(rows.shape)


def on_one_device(case: ExpertCase) -> Run:
    """The plain script. Capacity and balance are those of a replica's micro batch: it accumulates over as many chunks."""
    torch.manual_seed(5)
    model = Translator(case, annotated=False).double()
    optimizer = _optimizer(case, model)
    chunks = case.replicas * case.micro_batches
    data = _data(case)
    if case.mode == "rows" and case.micro_batches > 1:
        data = TensorDataset(*(_by_micro_batch(case, tensor) for tensor in data.tensors))
    loader = DataLoader(data, batch_size=case.rows * chunks)
    return Run(_train(case, model, optimizer, loader, lambda loss: loss, chunks), model.state_dict())
