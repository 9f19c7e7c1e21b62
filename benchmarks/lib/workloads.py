"""Models and data to measure with: the same for every variant, on every run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A causal language model on random tokens, trained with AdamW."""

    layers: int = 6
    width: int = 512
    heads: int = 8
    vocabulary: int = 1024
    sequence: int = 128
    rows: int = 8
    """Sequences per rank and step."""

    def model(self) -> nn.Module:
        """The model, with the same weights at every call."""
        torch.manual_seed(0)
        return _LanguageModel(self)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def batch(self, seed: int, rows: int | None = None) -> Batch:
        """Tokens, and the tokens that follow them."""
        generator = torch.Generator().manual_seed(seed)
        size = (rows or self.rows, self.sequence + 1)
        tokens = torch.randint(self.vocabulary, size, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@dataclass(frozen=True, kw_only=True)
class ConvNet:
    """A residual net of basic blocks with batch norm on small random images, trained with SGD and momentum."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 64
    side: int = 32
    classes: int = 10
    rows: int = 8

    def model(self) -> nn.Module:
        """The model, with the same weights at every call."""
        torch.manual_seed(0)
        layers: list[nn.Module] = [
            nn.Conv2d(3, self.width, 3, padding=1, bias=False),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
        ]
        inside = self.width
        for stage, count in enumerate(self.blocks):
            for index in range(count):
                stride = 2 if stage and not index else 1
                layers.append(_Block(inside, self.width << stage, stride))
                inside = self.width << stage
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, self.classes))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def batch(self, seed: int, rows: int | None = None) -> Batch:
        """Images and their classes."""
        generator = torch.Generator().manual_seed(seed)
        count = rows or self.rows
        images = torch.randn(count, 3, self.side, self.side, generator=generator)
        return images, torch.randint(self.classes, (count,), generator=generator)

    def loss(self, model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


Workload = Transformer | ConvNet


class _LanguageModel(nn.Module):
    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Parameter(torch.randn(shape.sequence, shape.width) * 0.02)
        self.layers = nn.Sequential(*(_Layer(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        return self.head(self.norm(self.layers(x)))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.inward(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outward(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm_2(x))


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.short(x))
