"""Modules whose parameters show as split values inside a split forward: what a split part does, in a few lines, for ranks as threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, settle, shard
from epl.plan.split.cut import Axis, Cut


class Views(dict[str, Any]):
    """Parameters by name: inside a split forward the split values."""

    views: dict[str, SplitTensor]

    def __getitem__(self, key: str) -> Any:
        if region.depth and key in self.views:
            return self.views[key]
        return dict.__getitem__(self, key)


Choice = Callable[[str, torch.Tensor], "tuple[int, Cut] | None"]


def cut_module(module: nn.Module, ranks: SplitRanks, choose: Choice) -> None:
    """Cut the parameters of `module` in place as `choose` says by name."""
    for prefix, child in module.named_modules():
        views = {}
        for key, parameter in list(child.named_parameters(recurse=False)):
            found = choose(f"{prefix}.{key}" if prefix else key, parameter)
            if found is not None:
                dim, cut = found
                parameter.data = cut.take(parameter.data, dim, ranks.rank).clone()
                views[key] = shard(parameter, dim, cut, ranks)
        if views:
            table = Views(child._parameters)
            table.views = views
            child.__dict__["_parameters"] = table


@contextlib.contextmanager
def running() -> Iterator[None]:
    """A split part runs."""
    region.depth += 1
    kept, region.entered = region.entered, {}
    try:
        yield
    finally:
        region.depth -= 1
        region.entered = kept


def rows_cut(size: int, ways: int, counts: list[int] | None = None) -> Cut:
    """How ranks with rows of their own have them."""
    return Cut(Axis("rows", size, ways, counts))


def by_expert(num_experts: int, ways: int, counts: list[int] | None = None) -> Choice:
    """Stacked experts: dim 0 of every parameter of them. Listed ones: each wholly on the rank that has it."""
    axis = Axis("experts", num_experts, ways, counts)

    def choose(name: str, parameter: torch.Tensor) -> tuple[int, Cut] | None:
        parts = name.split(".")
        if "members" in parts:
            expert = int(parts[parts.index("members") + 1])
            owner = max(rank for rank in range(ways) if axis.starts[rank] <= expert and axis.counts[rank])
            size = parameter.shape[0]
            return 0, Cut(Axis(f"expert {expert}", size, ways, [size if rank == owner else 0 for rank in range(ways)]))
        if parts[-1] in ("w1", "w2", "b1", "b2"):
            return 0, Cut(axis)
        return None

    return choose


def left(value: Any) -> Any:
    """A value as it leaves a split part: no partial sums."""
    return settle(value)
