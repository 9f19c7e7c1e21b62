"""What modules return when they are replayed is compared with what was foreseen of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from epl.errors import RecordingError
from tests.graph.record.replaying import check, recordings_of


class Odd(nn.Module):
    """Does something else at one length."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.packed = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), packed

    def forward(self, x):
        x = self.c(self.b(self.a(x)))
        x = torch.cat([x, x[:, :1]], 1) if x.shape[1] == 13 else x
        return (x, x.sum(1)) if self.packed else x


class Around(nn.Module):
    """An odd module as a part of a leaf that is not foreseen itself: it is given another number every time."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.odd = Odd(packed)

    def forward(self, x, number):
        found = self.odd(x)
        return found[0] if self.odd.packed else found


class Model(nn.Module):
    def __init__(self, packed: bool, part: bool) -> None:
        super().__init__()
        self.first, self.second = (Around(packed) if part else Odd(packed)), nn.Linear(4, 4)

    def forward(self, x):
        found = self.first(x, 1 / x.shape[1]) if isinstance(self.first, Around) else self.first(x)
        return self.second(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_a_module_that_does_something_else_at_one_length(packed, part):
    # It was believed, and the loss was one of values that nobody had foreseen.
    model = Model(packed, part)
    recordings = recordings_of(model)
    for length in (5, 20, 9, 12):
        check(model, torch.randn(4, length, 4), recordings=recordings)
    with pytest.raises(RecordingError, match=r"first returns .*14, 4.* 13, 4.* would follow"):
        check(model, torch.randn(4, 13, 4), recordings=recordings)


def test_one_that_was_looked_at_with_such_sizes_is_not_compared():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x)[x.sum((1, 2)) > 0]  # how many rows there are depends on numbers

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Picks(), nn.Linear(4, 4)

        def forward(self, x):
            return self.second(self.first(x)).sum((0, 1))

    model = Whole()
    recordings = recordings_of(model)
    for length in (5, 20, 9, 12):
        call = recordings.of((torch.randn(4, length, 4),), {}, 1)
        assert not any(node.meta.get("foreseen") for node in call.whole.nodes if node.target == "first")
