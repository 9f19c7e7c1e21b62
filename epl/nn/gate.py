"""The gate of experts: which of them each row goes to, with which weight."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from epl.errors import UsageError
from epl.parallel.experts.held import decided
from epl.parallel.experts.rows import Rows, local_rows, rows_of, split_rows
from epl.parallel.split.value import enter, whole


class Routes(NamedTuple):
    """For each row its experts; every tensor has the leading dims of the input, so it is cut along with it."""

    weights: torch.Tensor
    """[..., choices]: what each chosen expert's result counts."""
    experts: torch.Tensor
    """[..., choices]: the chosen experts, best first."""
    logits: torch.Tensor
    """[..., experts]: the gate's answer, for the losses."""


class TopKGate(nn.Module):
    """Routes of rows: the `top_k` experts with the largest logits.

    `normalize`: the weights of a row's choices sum to 1; with one choice it has no effect, since a constant weight would leave the
    gate without gradient. `jitter`: while training, the gate sees inputs times uniform numbers in [1 - jitter, 1 + jitter].
    `gate`: a module that makes logits [..., num_experts] of inputs, instead of a linear layer without bias.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        top_k: int = 2,
        normalize: bool = True,
        jitter: float = 0.0,
        gate: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise UsageError(f"top_k: expected 1 to {num_experts} (the number of experts), found {top_k}")
        self.d_model, self.num_experts, self.top_k = d_model, num_experts, top_k
        self.normalize, self.jitter = normalize, jitter
        self.gate = gate
        self.weight: nn.Parameter | None
        self.register_parameter("weight", nn.Parameter(torch.empty(num_experts, d_model)) if gate is None else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New random weights."""
        if self.weight is not None:
            nn.init.uniform_(self.weight, -1 / sqrt(self.d_model), 1 / sqrt(self.d_model))

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, {self.num_experts}, top_k={self.top_k}, normalize={self.normalize}, jitter={self.jitter}"
        )

    def forward(self, x: torch.Tensor) -> Routes:
        """The routes of rows [..., d_model]."""
        rows = rows_of(x)
        logits = self._logits(x, rows)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()  # a softmax in half precision moves rows to other experts
        best, experts = logits.topk(self.top_k)
        if self.top_k > 1 and self.normalize:
            weights = best.softmax(-1)
        else:
            weights = (best - logits.logsumexp(-1, keepdim=True)).exp()
        return Routes(*(split_rows(value, rows) for value in (weights, experts, logits)))

    def _logits(self, x: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        if self.jitter and self.training:
            x = self._shaken(x, rows)
        if self.gate is not None:
            return local_rows(self.gate(x), rows)
        weight = cast("torch.Tensor", whole(decided(self.weight, [None], "whole: the gate")))
        if rows is not None:  # each rank's rows add to the gradient
            weight = enter(weight, rows.ranks)
        return functional.linear(local_rows(x, rows), weight)

    def _shaken(self, x: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        local = local_rows(x, rows)
        drawn = torch.rand_like(local) if rows is None else rows.uniform(local)
        shaken: torch.Tensor = split_rows(local * (drawn * (2 * self.jitter) + (1 - self.jitter)), rows)
        return shaken
