"""A mixture of experts row by row, as slow and plain as can be: what everything else is compared with."""

from __future__ import annotations

import math

import torch
from torch import nn

from epl.nn import MoE


def expert_on_row(moe: MoE, expert: int, row: torch.Tensor) -> torch.Tensor:
    """What one expert makes of one row."""
    experts = moe.experts
    if not experts.stacked:
        made: torch.Tensor = experts.members[expert](row[None])[0]
        return made
    hidden = row @ experts.w1[expert]
    if experts.b1 is not None:
        hidden = hidden + experts.b1[expert]
    if experts.gated:
        half = hidden.shape[0] // 2
        hidden = experts.activation(hidden[:half]) * hidden[half:]
    else:
        hidden = experts.activation(hidden)
    out = hidden @ experts.w2[expert]
    return out if experts.b2 is None else out + experts.b2[expert]


def reference(moe: MoE, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The result and the auxiliary values of a micro batch."""
    rows = x.reshape(-1, x.shape[-1])
    gate, experts = moe.gate, moe.experts
    logits = [gate.gate(row) if gate.gate is not None else row @ gate.weight.t() for row in rows]
    chosen = [row.argsort(descending=True)[: gate.top_k].tolist() for row in logits]
    capacity = math.inf
    if experts.capacity_factor is not None:
        capacity = max(1, math.ceil(experts.capacity_factor * gate.top_k * len(rows) / experts.num_experts))
    out = [torch.zeros_like(row) for row in rows]
    counts, dropped = [0] * experts.num_experts, 0
    for choice in range(gate.top_k):
        for n, row in enumerate(rows):
            expert = chosen[n][choice]
            counts[expert] += 1
            if counts[expert] > capacity:
                dropped += 1
                continue
            probabilities = logits[n].softmax(-1)
            weight = probabilities[expert]
            if gate.normalize and gate.top_k > 1:
                weight = weight / sum(probabilities[other] for other in chosen[n])
            out[n] = out[n] + weight * expert_on_row(moe, expert, row)
    if moe.shared is not None:
        out = [made + moe.shared(row[None])[0] for made, row in zip(out, rows, strict=True)]
    means = torch.stack([row.softmax(-1) for row in logits]).mean(0)
    share = torch.tensor(counts, dtype=x.dtype) / sum(counts)
    aux = {
        "balance_loss": len(counts) * (share * means).sum(),
        "z_loss": torch.stack([row.logsumexp(-1) ** 2 for row in logits]).mean(),
        "counts": torch.tensor(counts, dtype=x.dtype),
        "dropped": torch.tensor(float(dropped), dtype=x.dtype),
    }
    return torch.stack(out).view(x.shape), aux


class Small(nn.Module):
    """An expert of a user's own kind."""

    def __init__(self, width: int = 6, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 5)
        self.outer = nn.Linear(5, width, bias=False)
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.outer(self.dropout(torch.tanh(self.inner(self.norm(x)))))
        return made


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 1e-9 of the largest number."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if expected.numel():
        assert (found - expected).abs().max() <= 1e-9 * (1 + expected.abs().max())
