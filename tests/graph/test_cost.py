"""What modules cost, estimated without numbers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from epl.graph.cost import OPERATIONS_PER_BYTE, Cost, leaf_costs
from epl.graph.record import Recordings

CPU = torch.device("cpu")


def costs_of(model: nn.Module, *args: torch.Tensor, micro_batches: int = 1) -> dict[str, Cost]:
    recorded = Recordings(model, lambda module: None).of(args, {}, 1)
    return {str(node.target): cost for node, cost in leaf_costs(recorded, model, micro_batches, CPU).items()}


class Net(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.relu(part(x))
        return x


def test_operations_bytes_and_activations() -> None:
    found = costs_of(Net(nn.Linear(16, 64), nn.Linear(64, 8), nn.Identity()), torch.zeros(10, 16))
    moved = [4 * 10 * (16 + 64), 4 * 10 * (64 + 8), 4 * 10 * 16]
    operations = [2 * 10 * 16 * 64, 2 * 10 * 64 * 8, 0]
    kept = [
        4 * 10 * 16,
        4 * 10 * 64,
        0,
    ]  # the inputs, for the gradients of the weights; the first needs none of its own
    assert list(found) == ["parts.0", "parts.1", "parts.2"]
    for cost, flops, bytes_, activations in zip(found.values(), operations, moved, kept, strict=True):
        assert cost == Cost(flops + OPERATIONS_PER_BYTE * bytes_, activations)


def test_of_a_micro_batch() -> None:
    model, x = Net(nn.Linear(16, 64)), torch.zeros(12, 16)
    whole, part = costs_of(model, x)["parts.0"], costs_of(model, x, micro_batches=4)["parts.0"]
    assert part == Cost(whole.time / 4, whole.activations // 4)


def test_frozen_and_checkpointed_modules_keep_less() -> None:
    class Again(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    def parts() -> list[nn.Module]:
        return [nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)]

    x = torch.zeros(10, 8)
    plain = costs_of(Net(nn.Sequential(*parts())), x)["parts.0"]
    again = costs_of(Net(Again(*parts())), x)["parts.0"]
    frozen = costs_of(Net(nn.Sequential(*parts()).requires_grad_(False)), x)["parts.0"]
    assert again.time == plain.time
    assert 0 == frozen.activations <= again.activations < plain.activations


def test_a_module_that_needs_numbers_leaves_all_to_their_parameters() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() == 0 else super().forward(-x)

    found = costs_of(Net(nn.Linear(4, 6), Reads(6, 2)), torch.zeros(3, 4))
    assert found == {"parts.0": Cost(30.0), "parts.1": Cost(14.0)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_left_behind(device: str) -> None:
    with torch.device(device):
        model = Net(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    called: list[object] = []
    model.parts[0].register_forward_hook(lambda *_: called.append(1))
    before = {name: (tensor, tensor._version) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    torch.manual_seed(3)
    random.seed(3)
    recorded = Recordings(model, lambda module: None).of((torch.zeros(5, 4),), {}, 1)
    states = torch.get_rng_state(), random.getstate()
    called.clear()
    leaf_costs(recorded, model, 1, CPU)
    assert not called
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    after = {name: (tensor, tensor._version) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert {name: (id(t), v) for name, (t, v) in before.items()} == {name: (id(t), v) for name, (t, v) in after.items()}
