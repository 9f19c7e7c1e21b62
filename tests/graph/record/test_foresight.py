"""Torch calls of the glue that follow from the same calls at other sizes: they are not made, and the recording is the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from epl.graph.record import foresight
from tests.graph.record.replaying import check, recordings_of

LENGTHS = (8, 16, 12, 10, 14, 11, 9, 15)


class Glued(nn.Module):
    """Two modules, and something between them."""

    def __init__(self, between) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


def shifted(h):
    # As T5 makes its decoder's inputs.
    moved = h.new_zeros(h.shape)
    moved[:, 1:] = h[:, :-1].clone()
    moved[:, 0] = 1.0
    return moved.masked_fill_(moved == 2.0, 0.0)


def viewed(h):
    # The change goes through a view, and what was made from the value before it must not see it.
    h = h * 2
    before, part = h + 1, h[:, 1:].transpose(0, 1)
    part += 1
    return h + before


def of_itself(h):
    h = h * 2
    h[:, 1:] += h[:, :-1].clone()
    return h.add_(h)


def into(h):
    made = torch.empty(h.shape)
    torch.add(h.detach(), 1, out=made)
    return made + h


def of_some_lengths(h):
    h = h * 2
    if h.shape[1] in (9, 14):
        h += 1
    return h


@pytest.fixture
def made(monkeypatch):
    """The changes in place that were foreseen, by function."""
    found, change = [], foresight.Foresight.change

    def noted(self, call, inputs):
        result = change(self, call, inputs)
        if result is not None:
            found.append(call[0][0].__name__)
        return result

    monkeypatch.setattr(foresight.Foresight, "change", noted)
    return found


@pytest.mark.parametrize("between", [shifted, viewed, of_itself, into, of_some_lengths])
def test_changes_in_place_at_many_lengths(made, between):
    model = Glued(between)
    recordings = recordings_of(model)
    for length in LENGTHS:
        check(model, torch.randn(4, length, 4), recordings=recordings)
    fresh = recordings_of(model)
    for length in (11, 14, 15):
        pair = [each.of((torch.randn(4, length, 4),), {}, 2) for each in (recordings, fresh)]
        for size in (4, 2):
            one, other = (call.by_size[size].nodes for call in pair)
            assert [_node(n) for n in one] == [_node(n) for n in other]


def _node(node):
    return (
        node.op,
        node.target,
        str(node.args),
        node.meta.get("spec"),
        str(node.meta["views"]),
        str(node.meta.get("effect")),
    )


def test_they_are_made_at_few_of_them(made):
    recordings = recordings_of(Glued(shifted))
    for length in LENGTHS:
        recordings.of((torch.randn(4, length, 4),), {}, 2)
    assert made.count("masked_fill_") >= len(LENGTHS)  # of two sizes each
    # Not the first one in each forward: by that the value comes to require a gradient.
    assert made.count("__setitem__") == made.count("masked_fill_")
