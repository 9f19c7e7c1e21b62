"""A flat piece of memory that holds the gradients of several parameters, so that they travel in one message.

flat:  | gradient of a | gradient of b | … | used a | used b | … |
             ^ a.grad is a view of this            ^ 1 where this rank has a gradient, so that after the reduction
                                                     every rank knows whether any rank had one (else .grad stays None)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

SMALLEST = 1 << 20  # bytes; below this a message costs more than it carries, so a bucket is not cut further


@dataclasses.dataclass(eq=False, slots=True)
class Slot:
    """One parameter's place in a bucket."""

    parameter: nn.Parameter
    name: str
    bucket: Bucket
    position: int  # in the bucket
    offset: int
    view: torch.Tensor = dataclasses.field(init=False)  # the part of the bucket that is parameter.grad
    address: int = dataclasses.field(init=False)  # of that part
    fired: bool = False  # its gradient came in the backward pass that is running, and is divided by N already
    dirty: bool = False  # .grad holds something of earlier passes that the other ranks have not seen

    def __post_init__(self) -> None:
        piece = self.bucket.flat[self.offset : self.offset + self.parameter.numel()]
        self.view = _shaped_like(piece, self.parameter)
        self.address = self.view.data_ptr()

    def load(self, scale: float) -> None:
        """Put `scale` times the parameter's gradient into the bucket; the gradient lives there from now on."""
        gradient = self.parameter.grad
        if self.view.data_ptr() != self.address:
            self.__post_init__()  # model.to(…) has moved our view, as the gradient it was, away from the bucket
        if gradient is None or gradient.is_sparse:
            self.view.zero_()
        elif gradient is self.view:
            if scale != 1.0:
                gradient.mul_(scale)
        else:
            torch.mul(gradient, scale, out=self.view)
            self.parameter.grad = self.view

    @property
    def in_use(self) -> bool:
        return self.parameter.grad is self.view


@dataclasses.dataclass(eq=False, slots=True)
class Bucket:
    """Several slots in one flat tensor, and the message that is under way with it."""

    flat: torch.Tensor
    elements: int  # of gradients; the flags follow
    slots: list[Slot]
    fired: int = 0  # of the slots
    launched: bool = False
    work: dist.Work | None = None
    wire: torch.Tensor | None = None  # what travels, where it is not `flat` itself (fp16)

    @property
    def flags(self) -> torch.Tensor:
        return self.flat[self.elements :]

    @property
    def full(self) -> bool:
        return self.fired == len(self.slots)

    @property
    def touched(self) -> bool:
        return self.launched or any(slot.fired or slot.dirty for slot in self.slots)


Kind = tuple[torch.dtype, torch.device]


def make_buckets(
    parameters: Sequence[tuple[str, nn.Parameter]], most: int, memory: dict[Kind, torch.Tensor]
) -> list[Bucket]:
    """At most `most` buckets (but one for each dtype and device at least), keeping the order of the parameters.

    `memory` holds the one piece of memory for all buckets of a kind; it is used again where it has the right size, so
    that another layout of the same parameters costs nothing.
    """
    kinds: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    total = sum(p.numel() * p.element_size() for _, p in parameters)
    for kind in [kind for kind in memory if kind not in kinds]:
        del memory[kind]
    buckets = []
    for kind, alike in kinds.items():
        size = sum(p.numel() for _, p in alike) + len(alike)
        if kind not in memory or memory[kind].numel() != size:
            memory[kind] = torch.empty(size, dtype=kind[0], device=kind[1])
        sizes = [p.numel() * p.element_size() for _, p in alike]
        start = offset = 0
        for end in divide(sizes, max(1, most * sum(sizes) // max(1, total))):
            bucket = _make_bucket(alike[start:end], memory[kind][offset:])
            buckets.append(bucket)
            start, offset = end, offset + bucket.flat.numel()
    return buckets


def _make_bucket(parameters: Sequence[tuple[str, nn.Parameter]], memory: torch.Tensor) -> Bucket:
    """A bucket for these parameters, in this order, at the beginning of this memory."""
    elements = sum(p.numel() for _, p in parameters)
    bucket = Bucket(memory[: elements + len(parameters)], elements, [])
    offset = 0
    for position, (name, parameter) in enumerate(parameters):
        bucket.slots.append(Slot(parameter, name, bucket, position, offset))
        offset += parameter.numel()
    return bucket


def divide(sizes: Sequence[int], parts: int) -> list[int]:
    """Where to cut a row of sizes into at most `parts` runs: the end of each run.

    Runs are even but for the last, which is half as long: it is the one whose message nothing is left to hide behind.
    """
    total = sum(sizes)
    parts = max(1, min(parts, len(sizes), total // SMALLEST))
    shares = [1.0] * (parts - 1) + [0.5 if parts > 1 else 1.0]
    goals, reached = [], 0.0
    for share in shares:
        reached += share / sum(shares) * total
        goals.append(reached)
    ends: list[int] = []
    seen = 0
    for index, size in enumerate(sizes):
        seen += size
        left = len(sizes) - index - 1
        if len(ends) < parts - 1 and (seen >= goals[len(ends)] or left == parts - 1 - len(ends)):
            ends.append(index + 1)
    return [*ends, len(sizes)]


def _shaped_like(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    # Gradients of dense parameters come in the parameter's own strides (channels last, say): the same here, so that
    # copying is one straight run.
    if _is_dense(parameter):
        return piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
    return piece.view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory without holes or overlaps, in whatever order of dims."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
