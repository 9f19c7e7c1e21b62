"""Buffers (running means, counters) are kept as the first rank's: one set of numbers to evaluate with and to save."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from epl import _torch
from epl.parallel.growth import growth

_SMALL = 1 << 16  # elements; running statistics are smaller than this


class BufferKeeper:
    """Notices which buffers of a module changed since the last time, and sends the first rank's to all.

    A changed version counter tells, except where torch's own kernels write without counting (the running statistics of
    batch and instance norm): so small floating-point buffers are compared with a copy as well. On an accelerator that
    would wait for the device; there buffers named like such statistics are taken as changed.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group
        self._places: list[tuple[nn.Module, str]] = []
        self._places_as_of = -1
        self._chosen: frozenset[int] = frozenset()  # positions of what was sent last
        self._remember()

    def moved(self) -> frozenset[int]:
        """Which of this rank's buffers moved since they were last sent, by position."""
        return frozenset(n for n, buffer in enumerate(self._buffers()) if self._has_moved(n, buffer))

    def knows(self, moved: frozenset[int]) -> bool:
        """Whether all of them were among those sent last: then ranks need not tell each other which."""
        return moved <= self._chosen

    def send(self, moved: frozenset[int], *, as_last_time: bool) -> None:
        """Make the buffers that moved on some rank the first one's everywhere; every rank of the group calls it.

        `as_last_time`: every rank `knows` those that moved, so the same ones are sent again.
        """
        buffers = self._buffers()
        if not as_last_time:
            device = buffers[0].device
            chosen = torch.tensor([n in moved for n in range(len(buffers))], dtype=torch.uint8, device=device)
            dist.all_reduce(chosen, op=dist.ReduceOp.MAX, group=self._group)  # it may have stood still on the first
            self._chosen = frozenset(chosen.nonzero().flatten().tolist())
        copy_from_first([buffers[n] for n in sorted(self._chosen)], self._group)
        self._remember()

    def _buffers(self) -> list[torch.Tensor]:
        if self._places_as_of != growth.count:
            self._places_as_of = growth.count
            found = {id(b): (m, name) for m in self._module.modules() for name, b in m.named_buffers(recurse=False)}
            if list(found.values()) != self._places:
                self._places, self._chosen = list(found.values()), frozenset()
        return [getattr(module, name) for module, name in self._places]

    def _has_moved(self, position: int, buffer: torch.Tensor) -> bool:
        state, copy = self._known.get(position, (None, None))
        if state != (id(buffer), _torch.version_of(buffer)):
            return True
        if buffer.device.type != "cpu":
            return self._places[position][1] in ("running_mean", "running_var")
        return copy is not None and not torch.equal(buffer, copy)

    def _remember(self) -> None:
        self._known: dict[int, tuple[tuple[int, int] | None, torch.Tensor | None]] = {}
        for position, buffer in enumerate(self._buffers()):
            small = buffer.is_floating_point() and buffer.numel() <= _SMALL and buffer.device.type == "cpu"
            state = (id(buffer), _torch.version_of(buffer))
            self._known[position] = (state, buffer.detach().clone() if small else None)


def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite the tensors with those of the group's first rank, in few messages."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "meta" and not tensor.is_sparse:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for alike in kinds.values():
            for batch in _batches(alike):
                if len(batch) == 1 and batch[0].is_contiguous():  # large: without a copy on the way
                    tensor = batch[0].detach()
                    dist.broadcast(
                        torch.view_as_real(tensor) if tensor.is_complex() else tensor, group=group, group_src=0
                    )
                    continue
                flat = _torch.flatten(batch)
                dist.broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, group=group, group_src=0)
                offset = 0
                for tensor in batch:
                    tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
                    offset += tensor.numel()


def _batches(tensors: list[torch.Tensor], limit: int = 1 << 20) -> Iterable[list[torch.Tensor]]:
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
