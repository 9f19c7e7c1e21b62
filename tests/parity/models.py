"""The models of the parity table: small, float64, each with data and a loss; dropout off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

ROWS = 44  # three global batches of 16 (4 ranks × 4) with an uneven tail of 12; of 12 (3 ranks) with one of 8


@dataclass(frozen=True)
class Task:
    """A model, what it learns from, and its loss on a batch (a mean over rows)."""

    make: Callable[[], nn.Module]
    data: Callable[[], Dataset]
    loss: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]


class Cnn(nn.Module):
    """Convolutions, batch norm, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.norm2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)))
        h = h + F.relu(self.norm2(self.second(h)))
        return self.head(h.mean(dim=(2, 3)))


class Transformer(nn.Module):
    """A causal language model with a tied output layer and a buffer."""

    def __init__(self, words: int = 24, width: int = 16, length: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64))

    def forward(self, ids):
        h = self.layers(self.table(ids) + self.position, mask=self.mask, is_causal=True)
        return self.out(h)


class Words(nn.Module):
    """A bag of words with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8, sparse=True)
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, ids):
        return self.out(torch.tanh(self.hidden(self.table(ids).mean(dim=1))))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def _classify(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _next_word(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _classes(most: int, *shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, most, (ROWS, *shape), generator=torch.Generator().manual_seed(seed))


TASKS = {
    "mlp": Task(_mlp, lambda: TensorDataset(_numbers(8), _classes(4)), _classify),
    "cnn": Task(Cnn, lambda: TensorDataset(_numbers(3, 5, 5), _classes(4)), _classify),
    "transformer": Task(Transformer, lambda: TensorDataset(_classes(24, 6), _classes(24, 6, seed=3)), _next_word),
    "sparse": Task(Words, lambda: TensorDataset(_classes(30, 5), _classes(4, seed=4)), _classify),
}
