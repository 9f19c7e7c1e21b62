"""Models for pipelines by annotation: each is a list of pieces in the order of execution, cut into any number of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

ROWS, WIDTH, TOKENS, LENGTH = 44, 8, 13, 5


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def pieces(self) -> list[nn.Module]:
        return [*self.layers, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class SkipCnn(nn.Module):
    """Skip connections across one and across several pieces; the input is used once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.third, self.fourth = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 4)

    def pieces(self) -> list[nn.Module]:
        return [self.first, self.second, self.third, self.fourth, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.first(x))
        b = torch.relu(self.second(a))
        c = torch.relu(self.third(b) + a)
        d = self.fourth(c) + a * x.mean(1, keepdim=True)
        return self.head(d.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, cross: bool = False) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cross = nn.Linear(WIDTH, 2 * WIDTH) if cross else None
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = self.inward(self.norm(x)).chunk(3, -1)
        x = x + self.outward(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        if self.cross is not None and memory is not None:
            k, v = self.cross(memory).chunk(2, -1)
            x = x + F.scaled_dot_product_attention(q, k, v)
        return x + torch.tanh(self.mlp(x))


class EncoderDecoder(nn.Module):
    """The encoder's output goes to every decoder block, whatever stage it is in; tuples and keywords between pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block(cross=True) for _ in range(2))
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.head = nn.Linear(WIDTH, TOKENS)

    def pieces(self) -> list[nn.Module]:
        return [self.source, *self.encoder, self.target, *self.decoder, self.head]

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.source(source) + self.places
        for block in self.encoder:
            memory = block(memory)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        x = self.target(target) + self.places
        for block in self.decoder:
            x = block(x, memory=memory, mask=mask)
        return self.head(x)


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.words.weight

    def pieces(self) -> list[nn.Module]:
        return [self.words, *self.blocks, self.head]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FlatLanguageModel(nn.Module):
    """Rows and positions are one dim from the second piece on."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def pieces(self) -> list[nn.Module]:
        return [self.words, self.first, self.second, self.head]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens).flatten(0, 1)
        y = torch.tanh(self.first(x))
        h = self.second(y) + x
        return self.head(h)


class TwoTower(nn.Module):
    """Two branches that meet only in the loss; a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.text = nn.ModuleList([nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.scale = nn.Parameter(torch.tensor(0.5))

    def pieces(self) -> list[nn.Module]:
        return [*self.image, *self.text]

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        image = self.image[1](torch.tanh(self.image[0](image)))
        text = self.text[1](self.text[0](text).mean(1))
        return {"image": F.normalize(image, dim=-1), "text": F.normalize(text, dim=-1), "scale": self.scale.exp()}


def _labels(count: int) -> torch.Tensor:
    return torch.arange(ROWS) * 7 % count


def _vectors() -> Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, _labels(4))


def _images() -> Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(ROWS, 2, 4, 4, generator=generator, dtype=torch.float64), _labels(4))


def _tokens() -> Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(TOKENS, (ROWS, LENGTH), generator=generator)
    target = torch.randint(TOKENS, (ROWS, LENGTH), generator=generator)
    labels = target.roll(-1, 1)
    labels[torch.arange(ROWS) % 3 == 0, 2:] = -100  # unequal numbers of ignored labels per micro batch
    return TensorDataset(source, target, labels)


def _pairs() -> Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(image, torch.randint(TOKENS, (ROWS, LENGTH), generator=generator))


def _contrastive(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    out = model(*batch)
    logits = out["scale"] * out["image"] @ out["text"].T
    target = torch.arange(len(batch[0]))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _matching(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    out = model(*batch)
    return (1 - out["scale"] * (out["image"] * out["text"]).sum(-1)).pow(2).mean()


def _language(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    logits = model(batch[0], batch[1]) if isinstance(model, EncoderDecoder) else model(batch[0])
    return F.cross_entropy(logits.flatten(0, 1), batch[2].flatten())


def _flat_language(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[2].flatten())


def _classes(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Task:
    make: Callable[[], nn.Module]
    data: Callable[[], Dataset[tuple[torch.Tensor, ...]]]
    loss: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]


STAGED = {
    "mlp": Task(Mlp, _vectors, _classes),
    "skip_cnn": Task(SkipCnn, _images, _classes),
    "encoder_decoder": Task(EncoderDecoder, _tokens, _language),
    "tied_lm": Task(TiedLanguageModel, _tokens, _language),
    "flat_lm": Task(FlatLanguageModel, _tokens, _flat_language),
    "two_tower": Task(TwoTower, _pairs, _matching),
    "two_tower_contrastive": Task(TwoTower, _pairs, _contrastive),
}


def groups(pieces: list[nn.Module], stages: int) -> Iterator[list[nn.Module]]:
    """The pieces in contiguous groups of nearly equal size."""
    for stage in range(stages):
        yield pieces[len(pieces) * stage // stages : len(pieces) * (stage + 1) // stages]
