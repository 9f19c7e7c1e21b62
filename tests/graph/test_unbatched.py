"""Tensors that are not to be cut."""

from __future__ import annotations

import torch
from torch import nn

from epl.graph.unbatched import is_unbatched, unbatched
from tests.graph.record.replaying import check


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, weights):
        return self.second(self.first(x) * weights.sum())


def test_a_marked_tensor_goes_whole_into_every_micro_batch():
    """By its shape it could be cut, and no error would tell: only the user knows."""
    weights = torch.randn(4)
    assert check(Weighted(), torch.randn(4, 4), weights).is_cut == (True, True)
    assert unbatched(weights) is weights
    assert is_unbatched(weights)
    assert not is_unbatched(weights.clone())
    assert check(Weighted(), torch.randn(4, 4), weights).is_cut == (True, False)


def test_the_first_tensor_that_may_be_cut_says_how_long_the_batch_is():
    call = check(Weighted(), x=torch.randn(3, 4), weights=torch.randn(6))
    assert (call.rows, call.is_cut) == (3, (True, False))

    class Swapped(Weighted):
        def forward(self, weights, x):
            return super().forward(x, weights)

    call = check(Swapped(), unbatched(torch.randn(6)), torch.randn(3, 4))
    assert (call.rows, call.is_cut) == (3, (False, True))
