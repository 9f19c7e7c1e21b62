"""`torch.amp.GradScaler` where ranks have different gradients: what is not finite on one of them is not finite for all.

Else one rank would skip its step and halve its scale while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from epl import _torch

Concerns = Callable[[Optimizer], bool]
AnyRank = Callable[[bool], bool]

_agreements: list[tuple[Concerns, AnyRank]] = []


def agree_on_unscaling(concerns: Concerns, any_rank: AnyRank) -> Callable[[], None]:
    """From now on a scaler's check of an optimizer that `concerns` this says what is true for any rank; the undo.

    `any_rank` is called on every rank, with what was found there. A rank whose part of the model has none of the optimizer's
    parameters takes part too.
    """
    if not _agreements:
        _patch.undo = _torch.replace_unscaling(_agreeing)
    _agreements.append((concerns, any_rank))

    def undo() -> None:
        _agreements.remove((concerns, any_rank))
        if not _agreements:
            _patch.undo()

    return undo


class _Patch:
    undo: Callable[[], None]


_patch = _Patch()


def _agreeing(unscale: _torch.Unscale) -> _torch.Unscale:
    def unscale_and_agree(
        scaler: torch.amp.GradScaler, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *rest: Any
    ) -> dict[torch.device, torch.Tensor]:
        found = unscale(scaler, optimizer, inv_scale, found_inf, *rest)
        concerned = [any_rank for concerns, any_rank in _agreements if concerns(optimizer)]
        if concerned and not found:
            found = {found_inf.device: found_inf}
        for any_rank in concerned:
            bad = any_rank(any(flag.item() for flag in found.values()))
            for flag in found.values():
                flag.fill_(float(bad))
        return found

    return unscale_and_agree
