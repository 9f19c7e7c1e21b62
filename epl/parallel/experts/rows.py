"""Which rows of the replica's micro batch this rank has, if not all of them."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, shard, take, whole
from epl.plan.split.cut import Cut


class Rows(NamedTuple):
    """A rank has rows of its own (colocated `replicate(k)` and `split(k)`): dim 0 of what it is given is cut like this."""

    ranks: SplitRanks
    cut: Cut

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a value, as a plain tensor."""
        if isinstance(value, SplitTensor):
            if value.place == 0 and value.cut.lengths == self.cut.lengths and len(value.cut.inners) == 1:
                return value.local
            value = whole(value, "experts need it by rows")
        return take(value, 0, self.cut, self.ranks)

    def split(self, local: torch.Tensor) -> SplitTensor:
        """The value of which each rank has its rows."""
        return shard(local, 0, self.cut, self.ranks)

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        """Random numbers in [0, 1) beside these rows: of the rank's own stream, or this rank's part of one device's."""
        if not region.exact_dropout:
            return torch.rand(like.shape, generator=self.ranks.generator, dtype=like.dtype, device=like.device)
        drawn = torch.rand((self.cut.size, *like.shape[1:]), dtype=like.dtype, device=like.device)
        return self.cut.take(drawn, 0, self.ranks.rank)


def rows_of(value: torch.Tensor) -> Rows | None:
    """How the rows of a value are divided over ranks; None if this rank has them all, or can have them only by asking."""
    if isinstance(value, SplitTensor) and value.place == 0 and value.ndim > 1 and len(value.cut.inners) == 1:
        return Rows(value.ranks, value.cut)
    return None


def local_rows(value: torch.Tensor, rows: Rows | None) -> torch.Tensor:
    """The rows of a value that this rank works on, as a plain tensor: its own, or all of them."""
    return cast("torch.Tensor", whole(value)) if rows is None else rows.local(value)


def split_rows(local: torch.Tensor, rows: Rows | None) -> Any:
    """The inverse: the value whose rows these are."""
    return local if rows is None else rows.split(local)
