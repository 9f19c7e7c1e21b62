"""Tensors of a batch that the user has said do not carry it."""

from __future__ import annotations

import torch

_MARK = "_epl_unbatched"


def unbatched(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, marked: every micro batch gets it whole, although its first dim is as long as the batch.

    Recording finds most of these by itself (a T×T mask with T = batch); say it where it cannot, or for speed:

        model(x, mask=epl.unbatched(mask))
    """
    tensor.__dict__[_MARK] = True
    return tensor


def is_unbatched(tensor: torch.Tensor) -> bool:
    """Whether `unbatched` was said of this very tensor."""
    return _MARK in tensor.__dict__
