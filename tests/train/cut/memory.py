"""Ranks of one replica that are threads: whole cut models run in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epl.errors import RanksDisagreeError
from epl.graph.spec import Spec
from epl.parallel.pipeline.memory import MemoryNetwork


class MemoryPeers:
    """The other threads, through the network's meeting point."""

    def __init__(self, network: MemoryNetwork, index: int, home: int) -> None:
        self._network, self.index, self.home = network, index, home
        self.ranks = tuple(range(network.devices))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def agree(self, kind: str, bits: int, rows: int, ask: bool) -> tuple[tuple[int, ...], bool]:
        said = self._network.meet(self.index, (kind, bits, rows, ask))
        if len({word[:3] for word in said}) > 1:
            raise RanksDisagreeError(f"found {said}")
        return (rows,), any(word[3] for word in said)

    def share(self, values: Sequence[torch.Tensor] | None, specs: Sequence[Spec]) -> list[torch.Tensor]:
        told = self._network.meet(self.index, None if values is None else [v.detach().clone() for v in values])
        assert [(tuple(t.shape), t.dtype) for t in told[self.home]] == [(tuple(s.shape), s.dtype) for s in specs]
        return list(values) if values is not None else [t.clone() for t in told[self.home]]

    def push(self, values: Sequence[tuple[int, torch.Tensor]] | None) -> list[tuple[int, torch.Tensor]]:
        told = self._network.meet(self.index, None if values is None else [(n, v.detach()) for n, v in values])
        return list(values) if values is not None else [(n, t.clone()) for n, t in told[self.home]]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        told = self._network.meet(self.index, list(tensors))
        return [sum(parts) for parts in zip(*told, strict=True)]

    def exchange(self, value: object) -> list[object]:
        return self._network.meet(self.index, value)

    def break_off(self, error: BaseException) -> None:
        self._network.abort()
