"""Random numbers of modules that only one rank runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region


@contextlib.contextmanager
def alone(ranks: SplitRanks | None, draws: bool) -> Iterator[None]:
    """Inside, modules that live wholly on this rank run: parameters show as they are, and with `draws` random numbers come from the
    rank's own stream.

    From the common stream, ranks would draw unequal amounts, and masks of whole values would differ from then on.
    """
    if ranks is None:
        yield
        return
    depth, region.depth = region.depth, 0
    own = ranks.generator if draws else None
    if own is None:
        try:
            yield
        finally:
            region.depth = depth
        return
    on_gpu = own.device.type == "cuda"
    common = torch.cuda.get_rng_state(own.device) if on_gpu else torch.get_rng_state()
    _set(own.get_state(), own.device)
    try:
        yield
    finally:
        own.set_state(torch.cuda.get_rng_state(own.device) if on_gpu else torch.get_rng_state())
        _set(common, own.device)
        region.depth = depth


def _set(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
