"""A classification layer with an angular margin (ArcFace, Deng et al., 2019), as for faces and products."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDEST = 1 - 1e-6  # the slope of acos is infinite at 1


class MarginHead(nn.Module):
    """Cosines between features and class directions, times `scale`.

    With labels (in training) the angle to the right class counts as if it were `margin` wider.
    """

    def __init__(self, features: int, num_classes: int, *, scale: float = 16.0, margin: float = 0.3) -> None:
        super().__init__()
        self.scale, self.margin = scale, margin
        self.weight = nn.Parameter(torch.empty(num_classes, features))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        cosines = F.linear(F.normalize(features), F.normalize(self.weight))
        if labels is None:
            return self.scale * cosines
        right = cosines.gather(1, labels[:, None]).clamp(-WIDEST, WIDEST)
        return self.scale * cosines.scatter(1, labels[:, None], torch.cos(torch.acos(right) + self.margin))
