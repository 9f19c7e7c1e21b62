"""Models of which a part is split and the rest replicated, on the same ranks: a head with many classes, experts.

Every rank has rows of its own, as in data parallelism, which is what they are measured against.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import epl
import epl.nn

from .blocks import Attention, mean_square
from .training import RANKS, Idle, Scope, Trainer, Way

Batch = tuple[torch.Tensor, torch.Tensor]
PLAIN: Scope = contextlib.nullcontext


class Beside:
    """A model with split parts beside replicated ones. Subclasses say which."""

    settings = types.MappingProxyType({"cluster.colocate_split_and_replicate": True})
    timed = staticmethod(Trainer.step)

    def model(self, rest: Scope = PLAIN, part: Scope = PLAIN) -> PartedModel:
        """The model, with the same weights at every call; `part` is around what may be split, `rest` around the others."""
        raise NotImplementedError

    def batch(self, rank: int) -> Batch:
        """The rows of a rank."""
        raise NotImplementedError

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        raise NotImplementedError

    def ways(self) -> dict[str, Way]:
        return {"epl": self._split, "DDP": self._ddp, "epl DP": self._replicated}

    def whole(self) -> Trainer:
        return self._trainer(self.model())

    def _trainer(self, model: PartedModel, call: nn.Module | None = None, batch: Batch | None = None) -> Trainer:
        call = call or model
        x, y = batch or self.batch(dist.get_rank())
        return Trainer(lambda: self.loss(call(x), y), [self.optimizer(model.parameters())], model.parts())

    def _split(self) -> Trainer:
        return self._under_epl(lambda: epl.replicate(RANKS), lambda: epl.split(RANKS))

    def _replicated(self) -> Trainer:
        return self._under_epl(lambda: epl.replicate(1), lambda: epl.replicate(1))

    def _under_epl(self, rest: Scope, part: Scope) -> Trainer:
        model = self.model(rest, part)
        trainer = self._trainer(model)
        epl.parallelize(model, *trainer.optimizers)
        return trainer

    def _ddp(self) -> Trainer:
        model = self.model()
        return self._trainer(model, DistributedDataParallel(model, gradient_as_bucket_view=True))


class PartedModel(nn.Module):
    """A model that knows which of its modules are split, where any are."""

    def parts(self) -> list[nn.Module]:
        raise NotImplementedError


# ---- a head with many classes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Faces(Beside):
    """A small convolutional net and a linear layer over very many classes, trained with SGD and momentum."""

    classes: int = 100_000
    width: int = 256
    side: int = 32
    rows: int = 32
    """Images of each rank and step."""

    @property
    def name(self) -> str:
        return f"head_{self.classes // 1000}k"

    @property
    def tiny(self) -> Faces:
        return Faces(classes=64, width=16, side=8, rows=1)

    def model(self, rest: Scope = PLAIN, part: Scope = PLAIN) -> FacesModel:
        torch.manual_seed(0)
        return FacesModel(self, rest, part)

    def batch(self, rank: int) -> Batch:
        """Images and their classes."""
        generator = torch.Generator().manual_seed(rank)
        images = torch.randn(self.rows, 3, self.side, self.side, generator=generator)
        return images, torch.randint(self.classes, (self.rows,), generator=generator)

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, y)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.1, momentum=0.9)

    def ways(self) -> dict[str, Way]:
        return super().ways() | {"DTensor": self._dtensor}

    def _dtensor(self) -> Trainer:
        """The backbone under DDP; around the head by hand what epl does by itself: rows to all ranks, the scale of gradients."""
        model, mesh = self.model(), init_device_mesh("cpu", (RANKS,))
        parallelize_module(model, mesh, {"head": ColwiseParallel(input_layouts=Shard(0), use_local_output=False)})
        backbone = DistributedDataParallel(model.backbone, gradient_as_bucket_view=True)
        x, y = self.batch(dist.get_rank())

        def loss_of() -> torch.Tensor:
            features = backbone(x)
            features.register_hook(lambda gradient: gradient * RANKS)  # the loss is over all rows; DDP divides again
            everyones = y.new_empty(RANKS * len(y))
            dist.all_gather_single(everyones, y)
            return self.loss(model.head(DTensor.from_local(features, mesh, [Shard(0)])), everyones).to_local()

        optimizers = [self.optimizer(part.parameters()) for part in (model.backbone, model.head)]
        return Trainer(loss_of, optimizers, model.parts(), within=loss_parallel)


class FacesModel(PartedModel):
    def __init__(self, shape: Faces, rest: Scope, part: Scope) -> None:
        super().__init__()
        with rest():
            self.backbone = convolutions(shape.width)
        with part():
            self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))

    def parts(self) -> list[nn.Module]:
        return [self.head]


def convolutions(width: int) -> nn.Module:
    """Images to features. Without batch norm: epl computes it over the images of all ranks, DDP over a rank's own."""
    layers: list[nn.Module] = []
    inside = 3
    for outside in (width // 8, width // 4, width // 2, width):
        layers += [nn.Conv2d(inside, outside, 3, stride=2 if layers else 1, padding=1), nn.ReLU()]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width))


# ---- experts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mixture(Beside):
    """Transformer blocks with experts, of which every token sees two, trained with SGD and momentum.

    No expert is ever full, and the balance of the experts is not in the loss: both are over the rows of a replica, and data
    parallelism has two replicas where split has one.
    """

    layers: int = 2
    width: int = 256
    head: int = 32
    """Features of a head."""
    experts: int = 8
    sequence: int = 64
    rows: int = 8
    """Sequences of each rank and step."""

    @property
    def name(self) -> str:
        return "experts"

    @property
    def tiny(self) -> Mixture:
        return Mixture(layers=1, width=self.head, sequence=4, rows=1)

    def model(self, rest: Scope = PLAIN, part: Scope = PLAIN) -> MixtureModel:
        torch.manual_seed(0)
        return MixtureModel(self, rest, part)

    def batch(self, rank: int) -> Batch:
        """What goes in, and what is to come out."""
        generator = torch.Generator().manual_seed(rank)
        x, y = torch.randn(2, self.rows, self.sequence, self.width, generator=generator)
        return x, y

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_square(output, y)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.02, momentum=0.9)

    def ways(self) -> dict[str, Way]:
        return super().ways() | {"one rank": self._alone}

    def _alone(self) -> Trainer:
        """Rank 0 has the rows of all, the others have nothing to do."""
        if dist.get_rank() > 0:
            return Idle()
        x, y = (torch.cat(rows) for rows in zip(*map(self.batch, range(RANKS)), strict=True))
        return self._trainer(self.model(), batch=(x, y))


class MixtureModel(PartedModel):
    def __init__(self, shape: Mixture, rest: Scope, part: Scope) -> None:
        super().__init__()
        with rest():
            self.blocks = nn.ModuleList(MixtureBlock(shape) for _ in range(shape.layers))
        with part():
            self.experts = nn.ModuleList(
                epl.nn.Experts(shape.width, 4 * shape.width, shape.experts, capacity_factor=None)
                for _ in range(shape.layers)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x, inside, routes = block(x)
            x = x + experts(inside, *routes)[0]
        return x

    def parts(self) -> list[nn.Module]:
        return [self.experts]


class MixtureBlock(nn.Module):
    """What comes before the experts."""

    def __init__(self, shape: Mixture) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape.width, shape.head)
        self.gate = epl.nn.TopKGate(shape.width, shape.experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """The values, what goes into the experts, and into which."""
        x = x + self.attention(self.norm_1(x))
        inside = self.norm_2(x)
        return x, inside, self.gate(inside)
