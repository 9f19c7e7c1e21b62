"""Which arguments carry the batch, where the length of one call alone does not say it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from epl.graph.record.inputs import Inputs
from epl.graph.record.maker import _choices
from epl.graph.record.roles import Roles
from epl.graph.spec import Spec
from tests.graph.record.replaying import check, recordings_of

WIDTH = 6


class Attends(nn.Module):
    """Every row looks at all rows of a memory bank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, bank=None, more=None):
        bank = more["bank"][0] if bank is None else bank
        h = self.first(x)
        return self.second(h + torch.softmax(h @ bank.T, -1) @ bank)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other):
        return self.second(self.first(x) + other)


def rows(n: int) -> torch.Tensor:
    return torch.randn(n, WIDTH)


GIVEN = {
    "by place": lambda bank: ((bank,), {}),
    "by name": lambda bank: ((), {"bank": bank}),
    "inside": lambda bank: ((), {"more": {"bank": [bank], "n": 1}}),
}


@pytest.mark.parametrize("first", ["by place", "by name"])
@pytest.mark.parametrize("then", ["by place", "by name"])
@pytest.mark.parametrize("size", [7, 2])
def test_a_bank_as_long_as_the_last_batch_is_not_cut(first: str, then: str, size: int):
    # The smaller last batch had as many rows as the bank. Cut with the rows, each micro batch saw a part of it: other numbers,
    # silently.
    model, bank = Attends(), rows(size)
    recordings = recordings_of(model)
    args, kwargs = GIVEN[first](bank)
    assert check(model, rows(12), *args, recordings=recordings, micro_batches=4, **kwargs).is_cut == (True, False)
    args, kwargs = GIVEN[then](bank)
    assert recordings.of((rows(size), *args), kwargs, 4).is_cut == (True, False)


def test_a_bank_inside_other_arguments_is_not_cut():
    model, bank = Attends(), rows(7)
    recordings = recordings_of(model)
    args, kwargs = GIVEN["inside"](bank)
    recordings.of((rows(12), *args), kwargs, 4)
    assert recordings.of((rows(7), *args), kwargs, 4).is_cut == (True, False)


def test_what_a_later_call_shows_holds_for_earlier_ones_too():
    # The first call cannot tell. When the second has, what was recorded for the first is not used again.
    model, bank = Attends(), rows(7)
    recordings = recordings_of(model)
    recordings.of((rows(7), bank), {}, 4)
    assert recordings.of((rows(12), bank), {}, 4).is_cut == (True, False)
    again = recordings.of((rows(7), bank), {}, 4)
    assert again.is_cut == (True, False)
    assert recordings.of((rows(12), bank), {}, 4).is_cut == (True, False)
    assert recordings.of((rows(7), bank), {}, 4) == again


def test_without_micro_batches_it_is_not_the_batch_either():
    model, bank = Attends(), rows(7)
    recordings = recordings_of(model)
    recordings.of((rows(12), bank), {}, 1)
    assert recordings.of((rows(7), bank), {}, 1).is_cut == (True, False)


def test_what_must_be_cut_is_cut_whatever_an_earlier_call_was_given():
    model = Adds()
    recordings = recordings_of(model)
    assert check(model, rows(12), rows(1), recordings=recordings, micro_batches=4).is_cut == (True, False)
    assert check(model, rows(12), rows(12), recordings=recordings, micro_batches=4).is_cut == (True, True)


class Reshapes(Adds):
    """Given another length, the second argument is spread over the rows; as long as the batch, it must be cut with it."""

    def forward(self, x, other):
        return self.second(self.first(x) + (other.mean(0) if len(other) == 3 else other))


def test_an_earlier_call_that_misleads_does_not_make_a_call_fail():
    model = Reshapes()
    recordings = recordings_of(model)
    assert check(model, rows(12), rows(3), recordings=recordings, micro_batches=2).is_cut == (True, False)
    assert check(model, rows(8), rows(8), recordings=recordings, micro_batches=2).is_cut == (True, True)


def roles_after(*lengths: tuple[int, int, bool]) -> tuple[bool | None, ...]:
    roles = Roles(Adds())
    for batch, length, cut in lengths:
        args = (rows(batch), rows(length))
        inputs = Inputs(args, {}, Spec.of)
        roles.note(roles.positions(args, {}, inputs), inputs, (True, cut))
    return roles.known(roles.positions(args, {}, inputs))


def test_what_calls_show():
    assert roles_after((4, 4, True)) == (None, None)
    assert roles_after((4, 4, True), (5, 5, True)) == (True, True)
    assert roles_after((4, 4, True), (5, 4, False)) == (True, False)
    assert roles_after((4, 4, True), (5, 5, True), (6, 4, False)) == (True, None)  # it is now this, now that
    assert roles_after((4, 1, False), (5, 1, False)) == (True, None)
    assert roles_after((4, 4, False), (5, 5, False)) == (True, None)


def test_what_carries_the_batch_is_never_left_out():
    # What was cut at several sizes was left uncut when a forward failed with everything cut.
    three = (True, True, True)
    every = list(_choices(three, (None, None, None)))
    assert every == [three, (True, False, True), (True, True, False)]
    assert list(_choices(three, (True, True, None))) == [three, (True, True, False)]
    assert next(_choices(three, (True, False, False))) == (True, False, False)
