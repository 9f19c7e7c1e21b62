"""Transformer blocks split over ranks: by epl, by torch's parallelize_module, and by hand.

All ranks see the same rows, as in any tensor parallelism.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import epl

from .training import RANKS, Trainer, Way


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Pre-norm blocks of a causal transformer, one after the other."""

    layers: int
    width: int
    head: int = 32
    """Features of a head."""
    sequence: int = 64
    rows: int = 8

    settings = types.MappingProxyType({})
    timed = staticmethod(Trainer.gradients)  # not the optimizer: it takes DTensors one by one, much slower than others

    @property
    def name(self) -> str:
        return f"h{self.width}"

    @property
    def tiny(self) -> Blocks:
        return Blocks(layers=1, width=2 * self.head, sequence=4, rows=1)

    def model(self) -> nn.Sequential:
        """The blocks, with the same weights at every call."""
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.width, self.head) for _ in range(self.layers)))

    def ways(self) -> dict[str, Way]:
        splits = {"epl": by_epl, "by hand": by_hand, "DTensor": by_torch, "DTensor, q k v apart": by_torch_apart}
        return {name: functools.partial(self._trainer, split) for name, split in splits.items()}

    def whole(self) -> Trainer:
        return self._trainer(Blocks.model)

    def _trainer(self, split: Callable[[Blocks], nn.Module]) -> Trainer:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(2, self.rows, self.sequence, self.width, generator=generator)
        model = split(self)
        # Not Adam: it would hide gradients that are k times too large. Not foreach: of plain and of distributed tensors it is refused.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)
        if split is by_epl:
            epl.parallelize(model, optimizer)
        return Trainer(lambda: mean_square(model(x), y), [optimizer], [model])


def mean_square(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the distances of tokens."""
    return F.mse_loss(output, y, reduction="sum") / y[..., 0].numel()


class Block(nn.Module):
    """Attention and a feed-forward network, as one writes them for one device."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Attention(nn.Module):
    """Causal attention over however many heads there are."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


# ---- the ways --------------------------------------------------------------------------------------------------------


def by_epl(shape: Blocks) -> nn.Module:
    """As a user has it: a scope around the construction, and epl.parallelize."""
    with epl.split(RANKS):
        return shape.model()


EACH: Mapping[str, ParallelStyle] = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}
ONCE = EACH | {"attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())}


def by_torch(shape: Blocks, plan: Mapping[str, ParallelStyle] = ONCE) -> nn.Module:
    """DTensor. The input of q, k and v becomes one before them, so that their gradients are added up and travel once."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = shape.model()
    for block in model:
        parallelize_module(block, mesh, dict(plan))
    return model


def by_torch_apart(shape: Blocks) -> nn.Module:
    """DTensor, every layer by itself: the gradients of q, k and v travel one by one."""
    return by_torch(shape, EACH)


def by_hand(shape: Blocks) -> nn.Module:
    """As one would write it for these blocks alone, after Megatron."""
    model = shape.model()
    for block in model:
        attention = block.attention
        attention.q, attention.k, attention.v = map(own_columns, (attention.q, attention.k, attention.v))
        attention.out = RowLinear(attention.out)
        block.attention = Entered(attention)
        up, activation, down = block.mlp
        block.mlp = Entered(nn.Sequential(own_columns(up), activation, RowLinear(down)))
    return model


class Enter(torch.autograd.Function):
    """Megatron's f: what all ranks have goes into split work; gradients are summed."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)  # in place: nobody else has it
        return gradient


class Reduce(torch.autograd.Function):
    """Megatron's g: each rank's addend becomes the sum, in place."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Entered(nn.Module):
    """A module that works on this rank's features, given what all ranks have."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(Enter.apply(x))


class RowLinear(nn.Module):
    """The part of a layer that takes this rank's features; the bias is added once, to the sum."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(whole.weight, 1)), nn.Parameter(whole.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reduce.apply(F.linear(x, self.weight)) + self.bias


def own_columns(whole: nn.Linear) -> nn.Linear:
    """The part of a layer that gives this rank's features."""
    whole.weight, whole.bias = nn.Parameter(own(whole.weight, 0)), nn.Parameter(own(whole.bias, 0))
    return whole


def own(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's share."""
    return tensor.detach().chunk(RANKS, dim)[dist.get_rank()].clone()
