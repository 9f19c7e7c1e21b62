"""A feed-forward layer of experts, written by hand as in EPL's manual: tokens travel by einsum over stacked weights.

A gate sends each token to one or two experts (Switch, GShard). Every sentence is a group of its own: its tokens share the
places of the experts among themselves, so what happens to a sentence does not depend on the others in the batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import epl


class Routing(NamedTuple):
    """Where tokens go. Dims: b sentences, s tokens of a sentence, e experts, c places of an expert for a sentence."""

    dispatch: torch.Tensor
    """(b, s, e, c): 1 where a token takes a place."""
    combine: torch.Tensor
    """(b, s, e, c): the weight with which the token takes the answer from there."""
    balance: torch.Tensor
    """A loss that is 1 when all experts are used alike, more otherwise."""
    sent: torch.Tensor
    """(e + 1): how many tokens were sent to each expert, then how many of these found no place."""


class Gate(nn.Module):
    """Chooses `top_k` experts for each token; one with no place left goes without."""

    def __init__(self, width: int, experts: int, *, top_k: int, capacity_factor: float) -> None:
        super().__init__()
        self.experts, self.top_k, self.capacity_factor = experts, top_k, capacity_factor
        self.score = nn.Linear(width, experts, bias=False)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> Routing:
        """`real` is 1 for tokens and 0 for what only fills up a sentence, which goes nowhere."""
        factor = self.capacity_factor if self.training else max(2.0, self.capacity_factor)
        capacity = max(1, math.ceil(factor * self.top_k * x.shape[1] / self.experts))
        chance = self.score(x).softmax(-1) * real.unsqueeze(-1)
        remaining = chance
        choices = []
        for _ in range(self.top_k):
            chosen = F.one_hot(remaining.argmax(-1), self.experts).to(x.dtype) * real.unsqueeze(-1)
            choices.append(chosen)
            remaining = remaining.masked_fill(chosen.bool(), -1.0)
        weight = chance
        if (
            self.top_k > 1
        ):  # the weights of the chosen add up to 1; a single one keeps its chance, from which the gate learns
            weight = chance / (chance * sum(choices)).sum(-1, keepdim=True).clamp(min=1e-9)

        queued = x.new_zeros(x.shape[0], 1, self.experts)
        dispatch = x.new_zeros(*chance.shape, capacity)
        for chosen in choices:  # first choices take their places before second ones
            place = queued + chosen.cumsum(1) - chosen
            fits = chosen * (place < capacity)
            at = F.one_hot(place.long().clamp(max=capacity - 1), capacity).to(x.dtype)
            dispatch = dispatch + fits.unsqueeze(-1) * at
            queued = queued + chosen.sum(1, keepdim=True)

        tokens = real.sum(1, keepdim=True)
        share, expected = choices[0].sum(1) / tokens, chance.sum(1) / tokens
        balance = (self.experts * share * expected).sum(-1).mean()
        sent = sum(choices).sum((0, 1))
        lost = sent.sum() - dispatch.sum()
        return Routing(dispatch, dispatch * weight.unsqueeze(-1), balance, torch.cat([sent, lost.view(1)]).detach())


class Experts(nn.Module):
    """`experts` feed-forward layers, stacked; each answers the tokens that were sent to it."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.back = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: torch.Tensor, dispatch: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        tokens = torch.einsum("bsec,bsm->ebcm", dispatch, x)
        hidden = torch.relu(torch.einsum("ebcm,emh->ebch", tokens, self.into))
        return torch.einsum("bsec,ebcm->bsm", combine, torch.einsum("ebch,ehm->ebcm", hidden, self.back))


class EinsumMoE(nn.Module):
    """The gate is replicated, as everything else; the experts are split over all devices."""

    def __init__(self, width: int, hidden: int, experts: int, *, top_k: int, capacity_factor: float) -> None:
        super().__init__()
        self.gate = Gate(width, experts, top_k=top_k, capacity_factor=capacity_factor)
        with epl.split(epl.Env.get().cluster.total_gpu_num):
            self.experts = Experts(experts, width, hidden)
        self._sent = torch.zeros(experts + 1)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the experts make of tokens x (b, s, width), and the balance loss."""
        routing = self.gate(x, real)
        if self.training:
            self._sent += routing.sent.cpu()
        return self.experts(x, routing.dispatch, routing.combine), routing.balance

    def sent(self) -> list[int]:
        """How many tokens were sent to each expert in training, then how many of these found no place; of all ranks."""
        return epl.global_sum(self._sent).long().tolist()
