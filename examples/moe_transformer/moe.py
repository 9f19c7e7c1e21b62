"""A feed-forward layer of experts: a gate sends each token to one or two of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import epl.nn


class MoE(nn.Module):
    """The gate is replicated, as everything else; the experts are split over all devices."""

    def __init__(self, width: int, hidden: int, experts: int, *, top_k: int, capacity_factor: float) -> None:
        super().__init__()
        self.gate = epl.nn.TopKGate(width, experts, top_k=top_k)
        with epl.split(epl.Env.get().cluster.total_gpu_num):
            self.experts = epl.nn.Experts(
                width, hidden, experts, capacity_factor=capacity_factor, activation=F.relu, bias=False
            )
        self._sent = torch.zeros(experts + 1)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the experts make of tokens x (sentences, length, width), and the balance loss.

        Where `real` is 0 there is no token, only something that fills up a sentence. It is dealt out to the experts in turn,
        so that none gets more of it, has no weight, and is neutral in the balance loss.
        """
        weights, chosen, logits = self.gate(x)
        real = real.unsqueeze(-1)
        turns = torch.arange(chosen[0].numel(), device=x.device).view_as(chosen[0]) % logits.shape[-1]
        y, aux = self.experts(x, weights * real, torch.where(real > 0, chosen, turns), logits * real)
        if self.training:
            self._sent += torch.cat([aux.counts, aux.dropped.view(1)]).detach().cpu()
        return y, aux.balance_loss

    def sent(self) -> list[int]:
        """How much was sent to each expert in training, fillings included, then how much of it found no place.

        `aux` counts over all ranks of the replica, and there is one replica: nothing is left to add up.
        """
        return self._sent.long().tolist()
