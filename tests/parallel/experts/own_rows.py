"""A border of a split part at which every rank has rows of its own along dim 0, without the weights of `epl.parallel.split.rows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from epl import _torch
from epl.parallel.split.functions import ReduceScatter
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.value import SplitTensor, shard, take
from epl.plan.split.cut import Axis, Cut


@dataclass(frozen=True)
class OwnRows:
    """Tensors that are as long as this rank has rows are blocks of longer ones."""

    counts: tuple[int, ...]

    def cut(self) -> Cut:
        return Cut(Axis("rows", sum(self.counts), len(self.counts), self.counts))

    def enter(self, tree: Any, ranks: SplitRanks) -> Any:
        cut, own = self.cut(), self.counts[ranks.rank]

        def one(leaf: Any) -> Any:
            plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, SplitTensor)
            return shard(leaf, 0, cut, ranks) if plain and leaf.ndim and leaf.shape[0] == own else leaf

        return _torch.tree_map(one, tree)

    def leave(self, tree: Any, ranks: SplitRanks) -> Any:
        cut = self.cut()

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, SplitTensor):
                return leaf
            if leaf.is_partial and leaf.total is None and leaf.ndim and leaf.shape[0] == cut.size:
                out = cast("torch.Tensor", ReduceScatter.apply(leaf.local, ranks, 0, cut))
                return out if leaf.extra is None else out + take(leaf.extra, 0, cut, ranks)
            if not leaf.is_partial and leaf.place == 0 and leaf.cut.axis.name == "rows":
                return leaf.local
            return leaf

        return _torch.tree_map(one, tree)
