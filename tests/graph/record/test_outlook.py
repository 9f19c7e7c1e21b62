"""Lengths that only ever grow: the forward is looked at further on, and follows from that in between."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from epl.graph.record.outlook import Outlook
from tests.graph.record.replaying import check, recordings_of


def beyond(*calls: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """What is to be looked at after each call; it always works."""
    outlook, found = Outlook(), []
    for sizes in calls:
        found.append(outlook.beyond("kind", sizes))
        if found[-1] is not None:
            outlook.seen("kind", found[-1])
    return found


def test_the_third_size_shows_a_stream():
    assert beyond((8, 16), (8, 17), (8, 18), (8, 19), (8, 36), (8, 37)) == [None, None, (8, 36), None, None, (8, 74)]


def test_shorter_ones():
    assert beyond((8, 16), (8, 15), (8, 14), (8, 9), (8, 6)) == [None, None, (8, 7), None, (8, 3)]


def test_steps_are_kept():
    assert beyond((16,), (24,), (40,), (8,), (120,)) == [None, None, (80,), None, (240,)]


def test_sizes_that_go_together_stay_together():
    # Tokens, a mask by one longer, and a table as large as both.
    calls = [(8, n, 8, n + 1, 2 * n) for n in (5, 6, 7)]
    assert beyond(*calls)[-1] == (8, 14, 8, 15, 28)


def test_sizes_between_others_are_not_worth_a_look():
    assert beyond((10,), (20,), (15,)) == [None, None, None]


def test_a_forward_that_fails_there_is_looked_at_less_far_then_not_at_all():
    outlook = Outlook()
    assert [outlook.beyond("kind", (n,)) for n in (10, 11, 12)] == [None, None, (24,)]
    outlook.failed("kind")
    assert outlook.beyond("kind", (16,)) == (20,)
    outlook.failed("kind")
    assert outlook.beyond("kind", (21,)) is None


class Block(nn.Module):
    def __init__(self, limit: int):
        super().__init__()
        self.a, self.b, self.limit, self.runs = nn.Linear(4, 8), nn.Linear(8, 4), limit, []

    def forward(self, x):
        self.runs.append(x.shape[1])
        if x.shape[1] > self.limit:
            warnings.warn("too long", stacklevel=2)
            raise ValueError("too long")
        return x + self.b(torch.relu(self.a(x)))


class Model(nn.Module):
    def __init__(self, limit: int = 1000):
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 4))
        self.first, self.second = Block(limit), Block(limit)

    def forward(self, x):
        return self.second(self.first(x + self.table[: x.shape[1]]).relu())


@pytest.mark.parametrize("limit", [1000, 20])
def test_growing_lengths_are_recorded_exactly_and_mostly_without_a_run(limit):
    model = Model(limit)
    recordings = recordings_of(model)
    runs = []
    model.first.runs = model.second.runs = _List(runs)
    for length in range(5, 20):
        check(model, torch.randn(4, length, 4), recordings=recordings, compare=False)
    recorded = len(runs)
    for length in range(5, 20):
        check(model, torch.randn(4, length, 4), recordings=recordings)
    assert len(set(runs[:recorded])) <= (8 if limit == 1000 else 16)  # of the 15 lengths


class _List:
    """What is appended stays, whatever is put back afterwards."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def append(self, item: int) -> None:
        self.items.append(item)


def test_values_that_share_memory_with_what_was_foreseen():
    # A view that follows from other lengths has a fake memory of its own; what is made of that view by a real call shares it. The
    # change in place below was lost on the others: an error at other sizes, or a change after the module that reads it.
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            odd = h.transpose(0, 1)[::2]
            odd += 1
            return self.b(h)

    model = Changes()
    recordings = recordings_of(model)
    for length in (8, 16, 12, 10, 14, 11):
        check(model, torch.randn(4, length, 4), recordings=recordings)


def test_calls_that_return_what_they_are_given_are_foreseen_as_such():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            same = h.contiguous().to(h.dtype)
            same += 1
            return self.b(h), same.view(-1)

    model = Returns()
    recordings = recordings_of(model)
    for length in (8, 16, 12, 10, 14, 11):
        check(model, torch.randn(4, length, 4), recordings=recordings)


class Biased(nn.Module):
    """Hands one argument through beside its result, as the layers of T5 do with their position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.runs = nn.Linear(4, 8), nn.Linear(8, 4), []

    def forward(self, x, bias, other):
        self.runs.append(x.shape[1])
        return x + self.b(torch.relu(self.a(x))) + bias.sum() * 0.1, bias


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Biased(), Biased(), Biased()

    def forward(self, x):
        bias = x[..., :1].cumsum(1)
        h, bias = self.first(x, bias, bias * 2)
        h, bias = self.second(h, bias * 3, bias)
        h, bias = self.third(h, bias, bias)  # the same twice: which of them comes back cannot be told
        return h * bias


def test_what_is_handed_through_is_the_argument_itself():
    model = Handing()
    recordings = recordings_of(model)
    runs: list[int] = []
    model.first.runs = model.second.runs = model.third.runs = _List(runs)
    for length in (5, 20, 9, *range(6, 20)):
        check(model, torch.randn(4, length, 4), recordings=recordings, compare=False)
    recorded = len(runs)
    assert runs[:recorded].count(13) < runs[:recorded].count(5)
    for length in (5, 13, 19):
        check(model, torch.randn(4, length, 4), recordings=recordings)
