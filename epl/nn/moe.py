"""A mixture of experts, as one layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from epl.errors import UsageError
from epl.nn.balance import Balance, Statistics
from epl.nn.experts import Activation, Experts
from epl.nn.gate import TopKGate


class MoE(nn.Module):
    """A mixture of experts in place of a feed-forward network: `y, aux = moe(x)`, x [..., d_model].

    y is the sum of what the `top_k` best experts of each row make of it, times their weights (the probability itself with top_k=1,
    as in Switch Transformer), plus what `shared_experts` such networks, which all rows see, make of it. There is no residual: a row
    whose choices are all over capacity comes out as the shared experts' result, or as zeros, so write `x + moe(x)[0]`.

    `aux` (see `Balance`) has the losses to be added to the user's own, `loss + 0.01 * aux.balance_loss + 0.001 * aux.z_loss`, and
    the counts. Capacity, losses and counts are over the replica's micro batch, however many devices it is on.

    `gate`, `normalize`, `router_jitter`: see `TopKGate`; the others: see `Experts`.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None,
        num_experts: int,
        *,
        top_k: int = 2,
        capacity_factor: float | None = 1.25,
        activation: Activation = functional.gelu,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        expert: Callable[[], nn.Module] | None = None,
        shared_experts: int = 0,
        gate: nn.Module | None = None,
        router_jitter: float = 0.0,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        if shared_experts < 0:
            raise UsageError(f"shared_experts: expected 0 or more, found {shared_experts}")
        self.gate = TopKGate(d_model, num_experts, top_k=top_k, normalize=normalize, jitter=router_jitter, gate=gate)
        self.experts = Experts(
            d_model,
            d_hidden,
            num_experts,
            capacity_factor=capacity_factor,
            activation=activation,
            gated=gated,
            bias=bias,
            dropout=dropout,
            expert=expert,
        )
        self.shared: nn.Module | None = None
        if shared_experts and expert is not None:
            self.shared = Together(expert() for _ in range(shared_experts))
        elif shared_experts:
            assert d_hidden is not None
            self.shared = FeedForward(d_model, shared_experts * d_hidden, activation, gated, bias, dropout)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Balance]:
        """The rows, and what is known of their balance."""
        y, aux = self.experts(x, *self.gate(x))
        return (y if self.shared is None else y + self.shared(x)), aux

    def statistics(self, *, reset: bool = False) -> Statistics:
        """Where rows went since the last reset: pairs by expert, dropped ones, imbalance."""
        return self.experts.statistics(reset=reset)


class FeedForward(nn.Module):
    """Shared experts: side by side they are one network, as wide as all of them."""

    def __init__(
        self, d_model: int, d_hidden: int, activation: Activation, gated: bool, bias: bool, dropout: float
    ) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_hidden, bias=bias)
        self.gate = nn.Linear(d_model, d_hidden, bias=bias) if gated else None
        self.down = nn.Linear(d_hidden, d_model, bias=bias)
        self.activation, self.dropout = activation, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        made: torch.Tensor = self.down(functional.dropout(hidden, self.dropout, self.training))
        return made


class Together(nn.ModuleList):
    """Shared experts of the user's own kind: the sum of what they make."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = sum(member(x) for member in self)
        return made
