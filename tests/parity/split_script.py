"""The training script of the split table, plain and under epl; the model says by scopes what is split."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import epl
from tests.parity.compare import Run

ROWS, STEPS, MAX_NORM = 12, 3, 0.5


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    model: str
    ranks: int = 2
    ways: int = 2
    optimizer: str = "adamw"
    clip: bool = False
    colocated: bool = False
    """With the backbone under replicate: ranks have rows of their own."""
    rows: int = ROWS
    config: dict[str, object] = field(default_factory=dict)
    stages: tuple[str, str] = ("", "")

    @property
    def replicas(self) -> int:
        return self.ranks // (sum(int(s[-1]) for s in self.stages) if self.stages[0] else self.ways)

    @property
    def micro_batches(self) -> int:
        return int(self.config.get("pipeline.num_micro_batch", 1))  # type: ignore[call-overload]


def _scope(what: str, name: str):
    """From `split2` or `replicate1`."""
    if not what:
        return contextlib.nullcontext()
    return getattr(epl, what[:-1])(int(what[-1]), name=name)


class Scopes:
    """`split()` and `replicate()` scopes, or nothing in the plain script."""

    def __init__(self, ways: int, colocated: bool, stages: tuple[str, str] = ("", "")) -> None:
        self._ways, self._colocated, self._stages = ways, colocated, stages

    def split(self):
        return epl.split(self._ways) if self._ways else contextlib.nullcontext()

    def first(self, again: str = ""):
        return _scope(self._stages[0], f"first{again}")

    def second(self, again: str = ""):
        return _scope(self._stages[1], f"second{again}")

    def backbone(self):
        return epl.replicate(self._ways) if self._ways and self._colocated else contextlib.nullcontext()


class Classifier(nn.Module):
    """A backbone, and a head with many classes."""

    def __init__(self, scopes: Scopes, classes: int = 23) -> None:
        super().__init__()
        with scopes.backbone():
            self.body = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10))
        with scopes.split():
            self.head = nn.Linear(10, classes)

    def forward(self, x):
        return self.head(self.body(x))


class Margin(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features))

    def forward(self, x, y):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        hot = F.one_hot(y, self.weight.shape[0]).to(cosine.dtype)
        return 8.0 * (cosine - 0.3 * hot)


class LookingMargin(Margin):
    """The margin at places that it looks up in the labels: planned on labels that were no classes, it raised."""

    def forward(self, x, y):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        index = torch.where(y != -1)[0]
        hot = torch.zeros_like(cosine)
        hot[index, y[index]] = 0.3
        return 8.0 * (cosine - hot)


class ArcFace(nn.Module):
    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        with scopes.backbone():
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 10))
        with scopes.split():
            self.head = Margin(10, 23)

    def forward(self, x, y):
        return self.head(self.body(x), y)


class LookingFace(ArcFace):
    def __init__(self, scopes: Scopes) -> None:
        super().__init__(scopes)
        with scopes.split():
            self.head = LookingMargin(10, 23)


class Encoder(nn.Module):
    """Transformer layers and a vocabulary under split."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        with scopes.split():
            self.words = nn.Embedding(23, 24)
            layers = [nn.TransformerEncoderLayer(24, 12, 36, 0.0, batch_first=True) for _ in range(2)]
            self.layers = nn.ModuleList(layers)
            self.head = nn.Linear(24, 23)
        self.norm = nn.LayerNorm(24)

    def forward(self, ids):
        h = self.words(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class Conv(nn.Module):
    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        with scopes.split():
            self.a = nn.Conv2d(1, 9, 3, padding=1)
            self.b = nn.Conv2d(9, 5, 3)
        self.head = nn.Linear(5 * 4, 23)

    def forward(self, x):
        return self.head(F.relu(self.b(F.relu(self.a(x)))).flatten(1))


class Alternating(nn.Module):
    """Replicated and split parts take turns, as attention and experts do."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        with scopes.backbone():
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        with scopes.split():
            self.wide = nn.Sequential(nn.Linear(8, 15), nn.GELU(), nn.Linear(15, 8))
            self.other = nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 23))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = h + self.wide(h)
        h = torch.tanh(self.second(h)) + 0.5 * self.wide(h)
        return self.other(h)


class Stages(nn.Module):
    """Two stages, of which one or both are split."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        with scopes.first():
            self.words = nn.Embedding(23, 24)
            self.one = nn.TransformerEncoderLayer(24, 12, 36, 0.0, batch_first=True)
        with scopes.second():
            self.two = nn.TransformerEncoderLayer(24, 12, 36, 0.0, batch_first=True)
            self.head = nn.Linear(24, 23)

    def forward(self, ids):
        return self.head(self.two(self.one(self.words(ids))))


class Chunked(nn.Module):
    """Four TaskGraphs, of which the first and third are on the same devices, and the second and fourth."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        with scopes.first():
            self.words = nn.Embedding(23, 24)
            self.one = nn.TransformerEncoderLayer(24, 12, 36, 0.0, batch_first=True)
        with scopes.second():
            self.two = nn.Sequential(nn.Linear(24, 14), nn.GELU(), nn.Linear(14, 24))
        with scopes.first(" again"):
            self.three = nn.TransformerEncoderLayer(24, 12, 36, 0.0, batch_first=True)
        with scopes.second(" again"):
            self.head = nn.Linear(24, 23)

    def forward(self, ids):
        return self.head(self.three(self.two(self.one(self.words(ids)))))


class Listed(nn.Module):
    """The stages are in one list, to which neither belongs."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        with scopes.first():
            self.parts.append(nn.Sequential(nn.Linear(6, 12), nn.Tanh()))
        with scopes.second():
            self.parts.append(nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 23)))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class InForward(nn.Module):
    """Scopes around the code of the forward, as EPL's users write them."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.wide = nn.Sequential(nn.Linear(16, 21), nn.GELU(), nn.Linear(21, 10))
        self.weight = nn.Parameter(torch.randn(23, 10))

    def forward(self, x):
        with epl.replicate(2):
            h = self.body(x)
        with epl.split(2):
            return 8 * F.linear(F.normalize(self.wide(h)), F.normalize(self.weight))


OF_WORDS = ("encoder", "stages", "chunked")
MODELS = {
    "stages": Stages,
    "chunked": Chunked,
    "listed": Listed,
    "in forward": InForward,
    "classifier": Classifier,
    "arcface": ArcFace,
    "looking arcface": LookingFace,
    "encoder": Encoder,
    "conv": Conv,
    "alternating": Alternating,
}


def data(case: Case) -> TensorDataset:
    g = torch.Generator().manual_seed(7)
    n = case.rows * case.micro_batches * case.replicas * STEPS - (1 if case.rows % 2 else 0)
    y = torch.randint(0, 23, (n,), generator=g)
    if case.model in OF_WORDS:
        ids = torch.randint(0, 23, (n, 5), generator=g)
        return TensorDataset(ids, (ids * 3 + 1) % 23)
    if case.model == "conv":
        return TensorDataset(torch.randn(n, 1, 4, 4, dtype=torch.float64, generator=g), y)
    return TensorDataset(torch.randn(n, 6, dtype=torch.float64, generator=g), y)


def loss_of(case: Case, model: nn.Module, x, y):
    logits = model(x, y) if "arcface" in case.model else model(x)
    if case.model in OF_WORDS:
        logits, y = logits.flatten(0, 1), y.flatten()
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if case.optimizer == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader, mean) -> list[float]:
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(case, model, x, y)
        loss.backward()
        if case.clip:
            losses.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        losses.append(mean(loss).item())
    return losses


def under_epl(case: Case) -> Run:
    own: dict[str, object] = {"communication.timeout": 60}
    if case.colocated:
        own["cluster.colocate_split_and_replicate"] = True
    epl.init(epl.Config(own | case.config))
    torch.manual_seed(5 + epl.Env.get().cluster.rank)
    model = MODELS[case.model](Scopes(case.ways, case.colocated, case.stages)).double()
    optimizer = optimizer_of(case, model)
    loader = DataLoader(data(case), batch_size=case.rows, shuffle=True)
    epl.parallelize(model, optimizer, loader)
    losses = train(case, model, optimizer, loader, epl.global_mean)
    return Run(losses, {name: t.clone() for name, t in epl.full_state_dict(model).items()})


def on_one_device(case: Case) -> Run:
    torch.manual_seed(5)
    model = MODELS[case.model](Scopes(0, False)).double()
    optimizer = optimizer_of(case, model)
    loader = DataLoader(data(case), batch_size=case.rows * case.replicas * case.micro_batches, shuffle=True)
    return Run(train(case, model, optimizer, loader, lambda loss: loss), model.state_dict())
