"""A state dict of a model with cut parameters: looked at, copied, averaged and loaded as any; saving it raises."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

import epl
from epl.errors import StateError
from epl.train.split.entries import BlockEntry
from tests.harness import run_ranks


class Model(nn.Module):
    def __init__(self, first: Any) -> None:
        super().__init__()
        with first:
            self.a = nn.Linear(3, 8)
        with epl.split(2, name="two"):
            self.b = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def _uses(kind: str) -> tuple[list[str], bool]:
    staged = kind == "staged"
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": not staged, "communication.timeout": 30}))
    torch.manual_seed(0)
    model = Model(epl.replicate(2, name="one") if kind == "colocated" else epl.split(2, name="one"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epl.parallelize(model, optimizer)
    x, y = torch.randn(4, 3), torch.arange(4)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    begin = epl.full_state_dict(model)
    # A property of torch's, `name`, has no setter: state_dict() itself raised an AttributeError.
    state = model.state_dict()
    own = {name: entry for name, entry in state.items() if isinstance(entry, BlockEntry)}
    assert own
    assert all("BlockEntry(" in str(entry) and entry.numpy().size == entry.numel() for entry in own.values())
    errors = []
    for made in (own, {name: entry.cpu().half() for name, entry in own.items()}, copy.deepcopy(own)):
        for write in (lambda found: torch.save(found, io.BytesIO()), lambda found: save(found)):
            with pytest.raises(StateError) as told:
                write(made)
            errors.append(str(told.value))

    best = {name: entry.clone() for name, entry in own.items()}
    average = copy.deepcopy(own)
    step()
    with torch.no_grad():
        for name, entry in model.state_dict().items():
            if name in average:
                average[name].mul_(0.5).add_(0.5 * entry)
    model.load_state_dict(average, strict=False)
    halfway = epl.full_state_dict(model)
    model.load_state_dict(model.state_dict(), strict=False)
    assert all(torch.equal(t, halfway[name]) for name, t in epl.full_state_dict(model).items())
    moved = any(not torch.equal(t, begin[name]) for name, t in halfway.items())
    model.load_state_dict(best, strict=False)
    assert all(torch.equal(t, begin[name]) for name, t in epl.full_state_dict(model).items() if name in own)
    model.load_state_dict(halfway)
    assert all(torch.equal(t, halfway[name]) for name, t in epl.full_state_dict(model).items())
    return errors, moved


@pytest.mark.parametrize(("kind", "ranks"), [("colocated", 2), ("split", 2), ("staged", 4)])
def test_a_state_dict_of_blocks_can_be_used_but_not_saved(kind: str, ranks: int) -> None:
    for errors, moved in run_ranks(_uses, ranks, kind):
        assert moved
        for text in errors:
            assert "is this rank's block" in text
            assert "epl.full_state_dict(model)" in text
