"""Words between the ranks of one group, for a reducer that is used without the rest of epl."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from epl.cluster.bits import NUMBERS, pack_bits, unpack_bits

Meet = Callable[[str, int], Callable[[], int]]
"""(where this rank is, its bits) → a call that waits for the other ranks and gives the union of all bits."""


class GroupWords:
    """Tells the ranks of a group each other's bits.

    On a process group of its own: a rank speaks before, between or after its buckets, so words and buckets must not mix.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = dist.get_process_group_ranks(group)

    @functools.cached_property
    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)
        return group

    def __call__(self, what: str, bits: int) -> Callable[[], int]:
        own = torch.tensor(pack_bits(bits), dtype=torch.int64)
        everyone = torch.empty(len(self._ranks) * NUMBERS, dtype=torch.int64)
        work = dist.all_gather_single(everyone, own, group=self._group, async_op=True)

        @functools.cache
        def union() -> int:
            work.wait()
            result = 0
            for numbers in everyone.view(-1, NUMBERS).tolist():
                result |= unpack_bits(numbers)
            return result

        return union
