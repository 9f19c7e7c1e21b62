"""The whole state of a model with cut parameters: gathered from the ranks of the split, and loaded into them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from epl.cluster.communication import Job, speaking
from epl.parallel.split.ranks import SplitRanks
from epl.plan.split.layout import ParameterLayout, layout_of

_CHUNK = 16 << 20
"""Elements of a parameter that are under way at once while it is loaded: no rank needs room for the whole of it."""


class SplitState:
    """Every rank of a replica has the whole of what is not cut."""

    def __init__(self, model: nn.Module, job: Job, ranks: SplitRanks) -> None:
        self._model, self._job, self._ranks = model, job, ranks

    def gather(self) -> dict[str, torch.Tensor]:
        """A copy of every entry, whole, on every rank; all ranks call it together."""
        self._job.meet("epl.full_state_dict").wait()
        found: dict[str, torch.Tensor] = {}
        known: dict[int, torch.Tensor] = {}  # by id: a tied one travels once
        for name, entry in self._model.state_dict(keep_vars=True).items():
            if not isinstance(entry, torch.Tensor):
                found[name] = entry
                continue
            if id(entry) not in known:
                with speaking(self._job, f"gathering {name} for epl.full_state_dict"):
                    known[id(entry)] = whole_of(entry.detach(), layout_of(entry), self._ranks)
            found[name] = known[id(entry)]
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Rank 0's state into the blocks; all ranks call it together."""
        for name, entry in self._model.state_dict(keep_vars=True).items():
            if isinstance(entry, torch.Tensor):
                given = state[name].detach() if self._job.rank == 0 and state is not None else None
                with speaking(self._job, f"loading {name}"):
                    load_block(entry.data, layout_of(entry), given, self._ranks.rank, self._job.rank)


def whole_of(block: torch.Tensor, layout: ParameterLayout | None, ranks: SplitRanks) -> torch.Tensor:
    """The whole of something that lies like a parameter, as memory of its own; all ranks of the split call it together."""
    if layout is None:
        return block.clone()
    return layout.cut.join(ranks.all_gather(block, layout.cut.lengths, layout.dim), layout.dim)


def load_block(
    block: torch.Tensor, layout: ParameterLayout | None, whole: torch.Tensor | None, rank: int, own: int, first: int = 0
) -> None:
    """Fill `block` from the whole that global rank `first` has, piece by piece; all ranks call it together."""
    shape = block.shape if layout is None else layout.shape
    rows = shape[0] if shape else 1
    step = max(1, _CHUNK // max(1, shape.numel() // max(rows, 1)))
    for start in range(0, max(rows, 1), step):
        stop = min(start + step, rows)
        size = (stop - start, *shape[1:]) if shape else ()
        if own == first:
            assert whole is not None
            part = (whole[start:stop] if shape else whole).to(block.device, block.dtype).contiguous()
        else:
            part = torch.empty(size, dtype=block.dtype, device=block.device)
        dist.broadcast(part, src=first)
        if layout is None:
            (block[start:stop] if shape else block).copy_(part)
        elif layout.dim != 0:
            block[start:stop].copy_(layout.cut.take(part, layout.dim, rank))
        else:
            for at_whole, at_block, length in layout.pieces(rank):
                low, high = max(start, at_whole), min(stop, at_whole + length)
                if low < high:
                    to = at_block + low - at_whole
                    block[to : to + high - low].copy_(part[low - start : high - start])
