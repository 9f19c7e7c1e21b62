"""A change to a view, carried out piece by piece, is the change to the whole."""

from __future__ import annotations

import pytest
import torch

from epl.graph.deferred.place import Place

WHOLE = torch.arange(360.0)

VIEWS = {
    "all": lambda t: t,
    "rows": lambda t: t.view(20, 18)[3:7],
    "one element": lambda t: t.view(20, 18)[3, 4],
    "columns": lambda t: t.view(20, 18)[:, 2:5],
    "steps": lambda t: t.view(20, 18)[1::3, ::4],
    "transposed": lambda t: t.view(20, 18).t(),
    "middle": lambda t: t.view(4, 9, 10)[:, 2:4, 3:5],
    "permuted": lambda t: t.view(4, 9, 10).permute(2, 0, 1)[1:3],
    "diagonal": lambda t: t.view(20, 18).diagonal(),
    "none": lambda t: t.view(20, 18)[5:5],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("size", [1, 7, 18, 64, 360])
def test_changes_in_pieces(view, size):
    expected = WHOLE.clone()
    view(expected).mul_(-2)
    place = Place.of(view(WHOLE))
    found = WHOLE.clone()
    for start in range(0, 360, size):
        piece = found[start : start + size].clone()
        place.change(piece, start, lambda part: part.mul_(-2))
        found[start : start + size] = piece
    assert torch.equal(found, expected)


def test_elements_that_repeat_or_interleave_have_no_place():
    assert Place.of(torch.ones(3, 1).expand(3, 4)) is None
    assert Place.of(torch.arange(20.0).as_strided((3, 3), (1, 1))) is None
