"""Parameters are cut at the first call of a model, whatever that call is for: as in training, and for training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import epl
from tests.harness import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        with epl.split(2):
            self.body = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
            self.head = nn.Linear(8, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.stem(x)))
        return out


def _begin(layout: str, micro_batches: int = 1) -> Net:
    colocated = layout == "own rows"
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": colocated, "pipeline.num_micro_batch": micro_batches}))
    if layout != "alone":
        epl.set_default_strategy(epl.replicate(2 if colocated else 1))
    torch.manual_seed(3)
    return Net()


def _shapes_of_two(layout: str) -> list[list[tuple[int, ...]]]:
    student = _begin(layout)
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    epl.parallelize(student)
    epl.parallelize(teacher)
    student(torch.ones(4, 6))
    with torch.no_grad():
        teacher(torch.ones(4, 6))
    assert not any(module.training for module in teacher.modules())
    assert not any(p.requires_grad for p in teacher.parameters())
    return [[tuple(p.shape) for p in model.parameters()] for model in (student, teacher)]


@pytest.mark.parametrize("layout", ["alone", "own rows"])
def test_a_teacher_is_cut_like_its_student(layout: str) -> None:
    # Its first call has no gradients, and what gradients cost was left out of the choice: `teacher.lerp_(student)` raised.
    for student, teacher in run_ranks(_shapes_of_two, 2, layout):
        assert teacher == student


def _losses(layout: str, micro_batches: int, annotated: bool) -> list[float]:
    if annotated:
        model = _begin(layout, micro_batches)
    else:
        torch.manual_seed(3)
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if annotated:
        epl.parallelize(model, optimizer)
    x, y = torch.ones(4, 6), torch.tensor([0, 1, 2, 3])
    with torch.inference_mode():
        found = [float(functional.cross_entropy(model(x), y))]
    for _ in range(2):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("layout", ["alone", "own rows", "stages"])
def test_a_model_that_is_evaluated_first_can_be_trained(layout: str, micro_batches: int) -> None:
    # Blocks that were cut under inference_mode were inference tensors: they take part in no backward.
    expected = pytest.approx(_losses("", 1, False), rel=1e-4)
    for found in run_ranks(_losses, 3 if layout == "stages" else 2, layout, micro_batches, True):
        assert found == expected
