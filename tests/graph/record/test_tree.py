"""What is kept of a tree of arguments or results does not keep what was in it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from epl.graph.record.tree import skeleton
from tests.graph.record.replaying import recordings_of


@dataclasses.dataclass
class Pair:
    one: Any
    other: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    one: Any


class Named(NamedTuple):
    one: Any


@pytest.mark.parametrize(
    "pack",
    [
        lambda t: [t, 1],
        lambda t: {"a": (t, "b")},
        lambda t: OrderedDict(a=[t]),
        lambda t: Pair(2, Pair(t, None)),
        Frozen,
        Named,
        lambda t: BaseModelOutput(last_hidden_state=t),
    ],
)
def test_how_to_make_a_tree_keeps_nothing_of_it(pack):
    tensor = torch.randn(2)
    made, other = weakref.ref(tensor), torch.randn(2)
    leaves, fill = skeleton(pack(tensor))
    assert leaves[0] is tensor
    del tensor, leaves
    gc.collect()
    assert made() is None
    assert repr(fill([other])) == repr(pack(other))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch):
        return Pair(self.b(self.a(batch["x"]) + batch["y"]), 1)


def test_a_recording_keeps_neither_its_inputs_nor_fakes():
    # Each of 256 signatures kept a batch, and the outputs of its recording with the graph of all fakes behind them.
    recordings = recordings_of(Model())
    counts = []
    for length in (8, 6, 7):
        batch = {"x": torch.randn(4, length, 4), "y": torch.randn(4, length, 4)}
        refs = [weakref.ref(t) for t in batch.values()]
        recordings.of((batch,), {}, 2)
        del batch
        gc.collect()
        assert [ref() for ref in refs] == [None, None]
        counts.append(sum(type(each).__name__ == "FakeTensor" for each in gc.get_objects()))
    assert counts[1] == counts[2]  # those of the model are kept, and one for all that requires a gradient
