"""Buffers (running means, counters) are kept as the first rank's: one set of numbers to evaluate with and to save."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from epl import _torch

_SMALL = 1 << 16  # elements; running statistics are smaller than this


class BufferKeeper:
    """Notices which buffers of a module changed since the last time, and sends the first rank's to all.

    A changed version counter tells, except where torch's own kernels write without counting (the running statistics of
    batch and instance norm): so small floating-point buffers are compared with a copy as well. On an accelerator that
    would wait for the device; there buffers named like such statistics are taken as changed.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group
        self._remember()

    def changed(self) -> bool:
        """Whether this rank's buffers moved since they were last sent."""
        return any(self._moved(name, buffer) for name, buffer in self._module.named_buffers())

    def send(self) -> None:
        """Make the buffers that changed on some rank the first one's everywhere; every rank of the group calls it."""
        buffers = dict(self._module.named_buffers())
        device = next(iter(buffers.values())).device if buffers else torch.device("cpu")
        moved = [self._moved(name, buffer) for name, buffer in buffers.items()]
        chosen = torch.tensor(moved, dtype=torch.uint8, device=device)
        dist.all_reduce(
            chosen, op=dist.ReduceOp.MAX, group=self._group
        )  # moved anywhere: it may have stood still on the first
        copy_from_first([b for b, flag in zip(buffers.values(), chosen.tolist(), strict=True) if flag], self._group)
        self._remember()

    def _moved(self, name: str, buffer: torch.Tensor) -> bool:
        state, copy = self._known.get(name, (None, None))
        if state != (id(buffer), _torch.version_of(buffer)):
            return True
        if buffer.device.type != "cpu":
            return name.rpartition(".")[2] in ("running_mean", "running_var")
        return copy is not None and not torch.equal(buffer, copy)

    def _remember(self) -> None:
        self._known: dict[str, tuple[tuple[int, int] | None, torch.Tensor | None]] = {}
        for name, buffer in self._module.named_buffers():
            small = buffer.is_floating_point() and buffer.numel() <= _SMALL and buffer.device.type == "cpu"
            state = (id(buffer), _torch.version_of(buffer))
            self._known[name] = (state, buffer.detach().clone() if small else None)


def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite the tensors with those of the group's first rank, in few messages."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "meta" and not tensor.is_sparse:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for alike in kinds.values():
            for batch in _batches(alike):
                flat = _torch.flatten(batch)
                dist.broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, group=group, group_src=0)
                offset = 0
                for tensor in batch:
                    tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
                    offset += tensor.numel()


def _batches(tensors: list[torch.Tensor], limit: int = 32 << 20) -> Iterable[list[torch.Tensor]]:
    """Runs of tensors of about `limit` bytes, so that the copy on the way stays small."""
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.numel() * tensor.element_size() > limit:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if batch:
        yield batch
