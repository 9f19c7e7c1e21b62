"""Staged models of the pipeline parity table: each a list of stages, cut as evenly as can be over any number of devices.

A model is a row of *pieces*; a stage is a run of pieces. `forward(received, *micro_batch)` of a stage follows the convention of
`epl.forward_backward`; the whole model on one device is the same pieces called one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from epl.parallel.pipeline.ties import tie
from epl.plan.batch import cut_evenly


class Piece(nn.Module):
    """A part that cannot be cut: from (what came, *batch) to what goes on."""


@dataclass(frozen=True)
class Staged:
    """Pieces, and the batch they are trained on."""

    pieces: Callable[[], list[Piece]]
    batch: Callable[[int], tuple[Any, ...]]

    def stages(self, number: int) -> list[nn.Sequential]:
        """The pieces in `number` runs; every call gives the same weights."""
        torch.manual_seed(11)
        pieces = self.pieces()
        assert len(pieces) >= number
        return [nn.ModuleList(pieces[start:stop]) for start, stop in cut_evenly(0, len(pieces), number)]  # type: ignore[misc]


def run_stage(stage: Sequence[Piece], received: Any, batch: Sequence[Any]) -> Any:
    for piece in stage:
        received = piece(received, *batch)
    return received


class Start(Piece):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, width)

    def forward(self, received, x, y):
        return torch.tanh(self.layer(x))


class Middle(Piece):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, h, x, y):
        return h + F.gelu(self.layer(self.norm(h)))


class Classify(Piece):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)

    def forward(self, h, x, y):
        return F.cross_entropy(self.layer(h), y)


def _mlp() -> list[Piece]:
    return [Start(8), *[Middle(8) for _ in range(6)], Classify(8)]


class Convolve(Piece):
    """Carries a dict with the early features along, untouched by the pieces between: a long skip."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2 if first else 4, 4, 3, padding=1)
        self.first = first

    def forward(self, carried, x, y):
        if self.first:
            h = F.relu(self.layer(x.view(-1, 2, 3, 1)))
            return {"h": h, "early": h * 0.5, "name": "early", "count": 1, "nothing": None}
        h = F.relu(self.layer(carried["h"]))
        return {**carried, "h": h, "count": carried["count"] + 1}


class Join(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, carried, x, y):
        assert (carried["name"], carried["nothing"], carried["count"]) == ("early", None, 7)
        h = (carried["h"] + carried["early"]).mean(dim=(2, 3))
        return F.cross_entropy(self.head(h), y)


def _cnn() -> list[Piece]:
    return [Convolve(True), *[Convolve(False) for _ in range(6)], Join()]


class Encode(Piece):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6 if first else 8, 8)
        self.first = first

    def forward(self, memory, x, y):
        return torch.tanh(self.layer(x if self.first else memory))


class Decode(Piece):
    """Several tensors, an integer tensor and a mask that needs no gradient between stages."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.words = nn.Embedding(3, 8) if first else None
        self.attend = nn.Linear(8, 8)

    def forward(self, received, x, y):
        if self.first:
            memory, ids = received, (y + 1) % 3
            state = (memory, self.words(ids), ids, ids > 0)
        else:
            state = received
        memory, h, ids, mask = state
        assert not ids.is_floating_point()
        return memory, h + torch.tanh(self.attend(memory)) * mask.unsqueeze(-1), ids, mask


class Predict(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, received, x, y):
        return F.cross_entropy(self.out(received[1]), y)


def _encoder_decoder() -> list[Piece]:
    return [
        Encode(True),
        *[Encode(False) for _ in range(2)],
        Decode(True),
        *[Decode(False) for _ in range(3)],
        Predict(),
    ]


class Embed(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)
        tie("words", self.table.weight)

    def forward(self, received, x, y):
        return self.table((x.abs() * 4).long().clamp(max=8)).mean(dim=1)


class TiedHead(Piece):
    """The same weight as `Embed`'s, in another stage or in the same."""

    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.weight = embed.table.weight

    def forward(self, h, x, y):
        return F.cross_entropy(F.linear(h, self.weight), y)


def _language_model() -> list[Piece]:
    embed = Embed()
    return [embed, *[Middle(8) for _ in range(6)], TiedHead(embed)]


class ImageTower(Piece):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3 if first else 8, 8)
        self.first = first

    def forward(self, received, x, y):
        return torch.tanh(self.layer(x[:, :3] if self.first else received))


class TextTowerAndLoss(Piece):
    """The second tower needs nothing of the first; rows do not mix, so that micro batches mean the same as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 8), nn.Parameter(torch.ones(1))

    def forward(self, image, x, y):
        text = torch.tanh(self.layer(x[:, 3:]))
        return ((image * text).sum(-1) * self.scale - y).square().mean()


def _two_towers() -> list[Piece]:
    return [ImageTower(True), *[ImageTower(False) for _ in range(6)], TextTowerAndLoss()]


def _batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return torch.randn(rows, 6, dtype=torch.float64, generator=g), torch.randint(0, 3, (rows,), generator=g)


MODELS = {
    "mlp": Staged(_mlp, _batch),
    "cnn with a skip": Staged(_cnn, _batch),
    "encoder-decoder": Staged(_encoder_decoder, _batch),
    "tied language model": Staged(_language_model, _batch),
    "two towers": Staged(_two_towers, _batch),
}
