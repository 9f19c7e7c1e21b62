"""The best of classes that are spread over ranks: everybody's best are gathered, the rest stays where it is."""

from __future__ import annotations

from typing import Any, cast

import torch

from epl.parallel.split.functions import Gather
from epl.parallel.split.rules.common import reduced
from epl.parallel.split.rules.pointwise import pointwise
from epl.parallel.split.rules.registry import rule
from epl.parallel.split.value import SplitTensor, settle
from epl.plan.split.cut import Axis, Cut

Best = tuple[torch.Tensor, torch.Tensor]


def top_of(value: SplitTensor, k: int, dim: int, largest: bool = True) -> Best:
    """The k best along the cut dim and their ids; of equals the lowest id, whichever rank has it."""
    ranks, cut = value.ranks, value.cut
    local = value.local.movedim(dim, -1)
    values, at = _best(local, min(k, local.shape[-1]), largest)
    ids = _held(cut, ranks.rank, at)[at]
    lengths = [min(k, length) for length in cut.lengths]
    place = values.ndim - 1
    pick = Cut(Axis("top", sum(lengths), ranks.ways, lengths))
    size = values.numel() * ranks.ways * (values.element_size() + ids.element_size())
    ranks.note("all-gather", size, "everybody's best classes")
    all_values = cast("torch.Tensor", Gather.apply(values, ranks, place, pick))
    each = ranks.all_gather(ids, lengths, place)
    if (
        ranks.plan
    ):  # no numbers come from the others; code that counts on a row's best being different ones must find them so
        others = [
            _held(cut, rank, at)[:length].expand_as(block)
            for rank, (length, block) in enumerate(zip(lengths, each, strict=True))
        ]
        each = [ids if rank == ranks.rank else other for rank, other in enumerate(others)]
    all_ids = pick.join(each, place)
    order = all_ids.argsort(-1)
    all_values, all_ids = all_values.gather(-1, order), all_ids.gather(-1, order)
    values, at = _best(all_values, k, largest)
    return values.movedim(-1, dim), all_ids.gather(-1, at).movedim(-1, dim)


def _held(cut: Cut, rank: int, like: torch.Tensor) -> torch.Tensor:
    """The ids that a rank holds; a 0 if none, for indices that nobody uses."""
    held = [torch.arange(start, stop, device=like.device) for start, stop in cut.ranges(rank)]
    return torch.cat(held) if held else like.new_zeros(1)


def _best(values: torch.Tensor, k: int, largest: bool) -> Best:
    if k == 1:  # unlike topk: of equals the first
        found = values.max(-1, keepdim=True) if largest else values.min(-1, keepdim=True)
        return found.values, found.indices
    found = values.topk(k, -1, largest=largest)  # type: ignore[assignment]
    return found.values, found.indices


@rule("topk")
def rule_topk(func: Any, input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, k, dim, largest, sorted)
    dim %= x.ndim
    if x.place != dim:
        found = func(x.local, k, dim, largest, sorted)
        return torch.return_types.topk([reduced(x, local, [dim], True) for local in found])  # type: ignore[arg-type]
    return NotImplemented if k > x.cut.size else torch.return_types.topk(top_of(x, k, dim, largest))


@rule("argmax", "argmin")
def rule_argmax(func: Any, input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x, dim, keepdim)
    if dim is None:
        return NotImplemented
    dim %= x.ndim
    if x.place != dim:
        return reduced(x, func(x.local, dim, keepdim), [dim], keepdim)
    ids = top_of(x, 1, dim, func.__name__ == "argmax")[1]
    return ids if keepdim else ids.squeeze(dim)


@rule("max", "min")
def rule_max(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    other = dim if isinstance(dim, torch.Tensor) else other
    if other is not None:
        return pointwise(torch.maximum if func.__name__ == "max" else torch.minimum, input, other)
    x = settle(input)
    if not isinstance(x, SplitTensor):
        return func(x) if dim is None else func(x, dim, keepdim)
    if dim is None:
        return NotImplemented
    dim %= x.ndim
    kind: Any = torch.return_types.max if func.__name__ == "max" else torch.return_types.min
    if x.place != dim:
        return kind([reduced(x, local, [dim], keepdim) for local in func(x.local, dim, keepdim)])
    found = top_of(x, 1, dim, func.__name__ == "max")
    return kind(found if keepdim else [item.squeeze(dim) for item in found])
