"""A small CLIP, in pieces that can be built one at a time: an image tower, a text tower, and the contrastive loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """How large the model is; the defaults train in seconds on a CPU."""

    width: int = 64
    heads: int = 4
    image_depth: int = 6
    """Transformer blocks of the image tower."""
    text_depth: int = 2
    """Transformer blocks of the text tower."""
    image_size: int = 32
    patch: int = 8
    words: int = 257
    """Bytes of the text, and 0 for no more text."""
    text_length: int = 24
    shared: int = 32
    """Features in which images and texts are compared."""


def make_block(size: Size) -> nn.Module:
    """One transformer block; the two towers are made of them."""
    return nn.TransformerEncoderLayer(
        size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


class Patches(nn.Module):
    """Images as sequences of patches with their positions: the beginning of the image tower."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, size.width, size.patch, stride=size.patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size.image_size // size.patch) ** 2, size.width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.cut(images).flatten(2).transpose(1, 2) + self.positions


class ImageHead(nn.Module):
    """The end of the image tower: one feature vector per image."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.project = nn.Linear(size.width, size.shared, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.norm(x).mean(dim=1))


class TextTower(nn.Module):
    """One feature vector per text."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.words, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(size.text_length, size.width))
        self.blocks = nn.ModuleList(make_block(size) for _ in range(size.text_depth))
        self.norm = nn.LayerNorm(size.width)
        self.project = nn.Linear(size.width, size.shared, bias=False)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        beyond = texts == 0
        x = self.embed(texts) + self.positions
        for block in self.blocks:
            x = block(x, src_key_padding_mask=beyond)
        kept = (~beyond).unsqueeze(-1)
        return self.project((self.norm(x) * kept).sum(dim=1) / kept.sum(dim=1))


class ContrastiveLoss(nn.Module):
    """How well each image finds its own text among those given with it, and each text its image."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        alike = self.log_scale.exp() * functional.normalize(images) @ functional.normalize(texts).T
        own = torch.arange(len(images), device=images.device)
        return (functional.cross_entropy(alike, own) + functional.cross_entropy(alike.T, own)) / 2


class Stage(nn.Module):
    """One stage of the pipeline. The first has the patches; the last what is left of the image tower, the text tower and the
    loss. No stage builds what is another's."""

    def __init__(self, stage: int, stages: int, size: Size, seed: int = 0) -> None:
        super().__init__()
        first, last = stage == 0, stage == stages - 1
        self.patches = _seeded(seed, lambda: Patches(size)) if first else None
        self.blocks = nn.ModuleList(
            _seeded(seed + 1 + number, lambda: make_block(size)) for number in image_blocks(stage, stages, size)
        )
        self.image_head = _seeded(seed + 101, lambda: ImageHead(size)) if last else None
        self.text_tower = _seeded(seed + 102, lambda: TextTower(size)) if last else None
        self.loss = ContrastiveLoss() if last else None


def image_blocks(stage: int, stages: int, size: Size) -> range:
    """Which blocks of the image tower a stage has: as many blocks on each as can be, the last one's texts counted."""
    each = -(-(size.image_depth + size.text_depth) // stages)
    end = size.image_depth if stage == stages - 1 else min((stage + 1) * each, size.image_depth)
    return range(min(stage * each, size.image_depth), end)


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights whichever rank builds it, and whatever it has built before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
