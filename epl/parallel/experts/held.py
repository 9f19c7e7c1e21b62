"""Which experts this rank holds, seen from their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from epl.errors import SplitError
from epl.parallel.experts.rows import Rows
from epl.parallel.experts.run import Held
from epl.parallel.experts.stream import alone
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.value import SplitTensor, enter, take, whole
from epl.plan.split.cut import Cut

Call = Callable[[torch.Tensor], torch.Tensor]
Stack = Sequence[torch.Tensor | None]
StackCompute = Callable[[Stack, torch.Tensor, Sequence[int], SplitRanks | None], torch.Tensor]
"""Experts with these parameters on rows, of which each has so many; random numbers are the rank's own if there are ranks."""


def held_stack(stack: Stack, num_experts: int, rows: Rows | None, compute: StackCompute) -> Held:
    """The experts of this rank, where their parameters are stacked along dim 0."""
    first = decided(stack[0], [0], "experts: whole ones on each rank")
    if isinstance(first, SplitTensor) and first.place == 0 and len(first.cut.inners) == 1:
        ranks, cut = first.ranks, first.cut
        local = [None if value is None else _block(value, cut, ranks) for value in stack]
        spans = tuple((start, start + count) for start, count in zip(cut.axis.starts, cut.axis.counts, strict=True))
        return Held(lambda x, sizes: compute(local, x, sizes, ranks), ranks, spans)
    rest = [
        None if value is None else decided(value, [None], "whole: as the first weights of the experts")
        for value in stack[1:]
    ]
    plain = [whole(value, "experts are computed where rows are") for value in (first, *rest)]
    if plain[0].shape[0] != num_experts:
        raise SplitError(
            f"expected all {num_experts} experts or split values, found the {plain[0].shape[0]} experts of this rank: the module was "
            "called outside the model's forward. Call it through the model that was given to epl.parallelize"
        )
    if rows is None:
        return Held(lambda x, sizes: compute(plain, x, sizes, None))
    entered = [enter(value, rows.ranks) for value in plain]
    return Held(lambda x, sizes: compute(entered, x, sizes, rows.ranks))


def _block(value: torch.Tensor, cut: Cut, ranks: SplitRanks) -> torch.Tensor:
    """This rank's experts of one more stacked parameter."""
    value = decided(value, [(0, cut)], "as the first weights of the experts")
    if isinstance(value, SplitTensor) and value.place == 0 and value.cut.lengths == cut.lengths:
        return value.local
    return take(whole(value, "stacked parameters of experts are cut differently"), 0, cut, ranks)


def decided(value: Any, options: list[Any], why: str) -> Any:
    """The value of a parameter as it is cut. While it is planned, and nobody has read it yet, one of these options is taken."""
    if not hasattr(value, "box"):  # an open parameter, see epl.parallel.split.choose.open
        return value
    if not value.box:
        value.ranks.decide(value, options, why)
    return value.derive(value.box[0])


def held_modules(members: Sequence[nn.Module], rows: Rows | None, training: bool) -> Held | None:
    """The experts of this rank, where each is a module; None if the parameters of each are cut over all ranks."""
    seen = [_parameters_seen(member) for member in members]
    split = [value for of_member in seen for value in of_member.values() if isinstance(value, SplitTensor)]
    if not split:
        if rows is None:
            return Held(lambda x, sizes: _each(members, x, sizes))
        ranks = rows.ranks
        entered = [{name: enter(value, ranks) for name, value in of_member.items()} for of_member in seen]

        def calling(member: nn.Module, values: dict[str, torch.Tensor]) -> Call:
            return lambda x: functional_call(member, values, (x,))

        called = [calling(member, values) for member, values in zip(members, entered, strict=True)]

        def with_entered(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
            with alone(ranks, training):
                return _each(called, x, sizes)

        return Held(with_entered)

    owners = [_owner(list(of_member.values())) for of_member in seen]
    if None in owners or owners != sorted(owners, key=lambda owner: owner or 0):
        return None
    ranks = split[0].ranks
    counts = {owner: len(list(run)) for owner, run in groupby(owners)}
    bounds = [sum(counts.get(earlier, 0) for earlier in range(rank)) for rank in range(ranks.ways + 1)]
    spans = tuple(pairwise(bounds))
    own = members[slice(*spans[ranks.rank])]
    learns = any(value.requires_grad for value in split)

    def alone_here(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        with alone(ranks, training):
            made = _each(own, x, sizes)
        # Backward communicates: it must come by here on every rank, also on one without experts, or with frozen ones only.
        return made.detach().requires_grad_() if learns and not made.requires_grad and torch.is_grad_enabled() else made

    return Held(alone_here, ranks, spans)


def every_module(members: Sequence[nn.Module]) -> Held:
    """All experts, each of them over all ranks: what it makes is whole."""

    def whole_of(member: nn.Module) -> Call:
        return lambda rows: whole(member(rows))

    return Held(lambda x, sizes: _each([whole_of(member) for member in members], x, sizes))


def _each(
    members: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    # Also without rows, so that its parameters have a gradient (zeros) on every step and every replica.
    made = [member(rows) for member, rows in zip(members, x.split_with_sizes(list(sizes)), strict=True)]
    return torch.cat(made) if made else x


def _parameters_seen(member: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name, as a forward sees them: split values inside a split part."""
    found = {}
    for prefix, module in member.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            found[f"{prefix}.{key}" if prefix else key] = getattr(module, key)
    return found


def _owner(values: Sequence[torch.Tensor]) -> int | None:
    """The one rank that has all of these values, if there is one."""
    owners = set()
    for value in values:
        if not isinstance(value, SplitTensor) or value.is_partial:
            return None
        holders = [rank for rank, count in enumerate(value.cut.axis.counts) if count]
        owners.add(holders[0] if len(holders) == 1 else None)
    return owners.pop() if len(owners) == 1 else None
