"""Dropout: whole values draw from the stream that all ranks share, cut ones from the rank's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.rules.common import like
from epl.parallel.split.rules.registry import functions_named, rule
from epl.parallel.split.value import settle


@contextlib.contextmanager
def own_stream(ranks: SplitRanks) -> Iterator[None]:
    """The rank's own random numbers, for kernels that take no generator."""
    if ranks.plan:
        yield
        return
    device = ranks.generator.device
    common = _get_state(device)
    _set_state(device, ranks.generator.get_state())
    try:
        yield
    finally:
        ranks.generator.set_state(_get_state(device))
        _set_state(device, common)


def _get_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


PER_ELEMENT = (functional.dropout, torch.dropout)
PER_CHANNEL = set(functions_named("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout"))


@rule("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
def rule_dropout(
    func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool | None = None
) -> Any:
    training = training if train is None else train
    if not training or p == 0:
        return input
    if input.is_partial:
        return func(settle(input), p, training)
    ranks = input.ranks
    if ranks.plan:
        return like(input, func(input.local, p, training))
    if func not in PER_ELEMENT:
        # One mask for a channel: only where no channel is on two ranks. One device's mask: only from one device's call.
        if region.exact_dropout or (func in PER_CHANNEL and input.place > 1):
            return NotImplemented
        with own_stream(ranks):
            return like(input, func(input.local, p, training))
    if region.exact_dropout:  # one device's mask, cut: any number of ranks gives the same numbers
        drawn = torch.empty(input.shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p)
        mask = input.cut.take(drawn, input.place, ranks.rank)
    else:
        mask = torch.empty_like(input.local, requires_grad=False).bernoulli_(1 - p, generator=ranks.generator)
    mask = mask / (1 - p) if p < 1 else mask
    if inplace:
        input.local.mul_(mask)
        return input
    return like(input, input.local * mask)
