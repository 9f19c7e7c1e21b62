"""An encoder and a decoder for translation, as T5's: norms first, no biases, distances instead of positions.

Every second feed-forward layer is a layer of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einsum_moe import EinsumMoE
from moe import MoE
from subwords import PAD
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a model is."""

    vocabulary: int
    width: int = 64
    heads: int = 4
    layers: int = 2
    """Of the encoder, and as many of the decoder."""
    hidden: int = 128
    """Inside a feed-forward layer, and inside each expert."""
    experts: int = 4
    top_k: int = 2
    capacity_factor: float = 1.25
    moe: str = "epl"
    """`epl` takes the layer of `moe.py`, `einsum` that of `einsum_moe.py`."""
    dropout: float = 0.0
    reach: int = 16
    """Greater distances count as this one."""


class Output(NamedTuple):
    logits: torch.Tensor
    balance: torch.Tensor
    """The mean over the layers of experts of their balance losses."""


class Distances(nn.Module):
    """A learnt number for each head and distance, which is added to the scores of attention."""

    def __init__(self, heads: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.table = nn.Embedding(2 * reach + 1, heads)

    def forward(self, length: int) -> torch.Tensor:
        at = torch.arange(length, device=self.table.weight.device)
        distance = (at[None, :] - at[:, None]).clamp(-self.reach, self.reach) + self.reach
        return self.table(distance).permute(2, 0, 1).unsqueeze(0)


class Attention(nn.Module):
    """From `x` to `memory`; `bias` is added to the scores."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value, self.out = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        parts = (self.query(x), self.key(memory), self.value(memory))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.into = nn.Linear(size.width, size.hidden, bias=False)
        self.back = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.relu(self.into(x)))


class Layer(nn.Module):
    """Attention among themselves, in the decoder also to the encoder, then feed-forward or experts."""

    def __init__(self, size: Size, *, decodes: bool, has_experts: bool) -> None:
        super().__init__()
        self.attention, self.norm = Attention(size), nn.RMSNorm(size.width)
        if decodes:
            self.across, self.across_norm = Attention(size), nn.RMSNorm(size.width)
        self.feed_norm = nn.RMSNorm(size.width)
        if has_experts:
            kind = {"epl": MoE, "einsum": EinsumMoE}[size.moe]
            self.moe = kind(
                size.width, size.hidden, size.experts, top_k=size.top_k, capacity_factor=size.capacity_factor
            )
        else:
            self.feed = FeedForward(size)
        self.decodes, self.has_experts = decodes, has_experts
        self.dropout = nn.Dropout(size.dropout)

    def forward(
        self, x: torch.Tensor, real: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`real` marks the tokens of x; `hidden` keeps attention from what only fills up the encoder's sentences."""
        normed = self.norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias))
        if self.decodes:
            x = x + self.dropout(self.across(self.across_norm(x), memory, hidden))
        if self.has_experts:
            answer, balance = self.moe(self.feed_norm(x), real)
        else:
            answer, balance = self.feed(self.feed_norm(x)), None
        return x + self.dropout(answer), balance


class Translator(nn.Module):
    """Numbered sentences (rows, length) and what the decoder has said so far, to scores of what it says next."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.near, self.near_decoder = (Distances(size.heads, size.reach) for _ in range(2))
        self.encoder, self.decoder = (
            nn.ModuleList(Layer(size, decodes=decodes, has_experts=at % 2 == 1) for at in range(size.layers))
            for decodes in (False, True)
        )
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Output:
        balances: list[torch.Tensor] = []
        real = (source != PAD).to(self.embedding.weight.dtype)
        hidden = torch.log(real)[:, None, None, :]  # 0, and minus infinity for what only fills up
        bias = self.near(source.shape[1]) + hidden
        memory: torch.Tensor = self.embedding(source)
        for layer in self.encoder:
            memory, balance = layer(memory, real, bias, None, hidden)
            balances += [] if balance is None else [balance]
        memory = self.encoder_norm(memory)

        real = (target != PAD).to(memory.dtype)
        later = memory.new_full((target.shape[1], target.shape[1]), float("-inf")).triu(1)
        bias = self.near_decoder(target.shape[1]) + later
        x: torch.Tensor = self.embedding(target)
        for layer in self.decoder:
            x, balance = layer(x, real, bias, memory, hidden)
            balances += [] if balance is None else [balance]
        logits = F.linear(self.decoder_norm(x) * self.size.width**-0.5, self.embedding.weight)
        return Output(logits, torch.stack(balances).mean() if balances else logits.new_zeros(()))

    def expert_layers(self) -> list[MoE | EinsumMoE]:
        """The layers of experts, of the encoder first."""
        return [layer.moe for layer in (*self.encoder, *self.decoder) if layer.has_experts]
