"""What a loop draws at random, leaves in attributes or changes in its model beside a pipeline: right, said, or refused; never silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from epl.errors import RanksDisagreeError, UsageError
from epl.report import log
from tests.harness import run_ranks


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 8), nn.Dropout(0.3)
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.dropout(torch.tanh(self.linear(x)))
        self.aux = h.square().mean()
        return h


def _model() -> Any:
    epl.init(epl.Config({"pipeline.num_micro_batch": 2, "communication.timeout": 30}))
    torch.manual_seed(0)
    with epl.replicate(1, name="first"):
        first = Encoder()
    with epl.replicate(1, name="second"):
        second = nn.Linear(8, 6)
    return epl.parallelize(nn.Sequential(first, second))


def _draw_in_the_loop() -> tuple[list[float], list[float]]:
    model, drawn, losses = _model(), [], []
    for _ in range(6):
        noise = torch.randn(8, 6)  # after dropout has drawn on the first rank
        drawn.append(float(noise.sum()))
        loss = F.mse_loss(model(noise), noise)
        loss.backward()
        losses.append(loss.item())
    return drawn, losses


def test_what_a_stage_draws_leaves_the_streams_of_the_loop_alike() -> None:
    # Dropout once moved the random stream of the rank that has it: noise of the next step differed from rank to rank.
    torch.manual_seed(0)
    nn.Sequential(Encoder(), nn.Linear(8, 6))
    expected = [float(torch.randn(8, 6).sum()) for _ in range(6)]
    (drawn, losses), (drawn_too, losses_too) = run_ranks(_draw_in_the_loop, 2)
    assert drawn == drawn_too == expected  # as a loop without dropout would draw
    assert losses == losses_too


def _masks() -> list[torch.Tensor]:
    model = _model()
    model[0].linear.weight.data.zero_() if epl.Env.get().cluster.rank == 0 else None
    found: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, out: found.append(out.detach() == 0))
    for _ in range(2):
        model(torch.ones(8, 6)).sum().backward()
    return found


def test_every_micro_batch_and_step_has_masks_of_its_own() -> None:
    masks = run_ranks(_masks, 2)[0]
    assert len(masks) == 4
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 4


def _differs_late(what: str) -> str:
    model, rank = _model(), epl.Env.get().cluster.rank
    for step in range(6):
        own = torch.Generator().manual_seed(step + (rank if step == 4 else 0))
        x, y = torch.ones(8, 6), torch.zeros(8, 6)
        if what == "input":
            x = torch.randn(8, 6, generator=own)
        elif what == "target":
            y = torch.randn(8, 6, generator=own)
        loss = F.mse_loss(model(x), y)
        try:
            loss.backward()
        except RanksDisagreeError as error:
            return f"step {step}: {error}"
    return "nothing"


@pytest.mark.parametrize("what", ["input", "target"])
def test_tensors_that_differ_between_ranks_are_noticed_in_any_step(what: str) -> None:
    # Only the inputs of the first three calls were compared, and nothing beside the outputs: noise of one rank met another's.
    for told in run_ranks(_differs_late, 2, what):
        assert told.startswith("step 4: ")
        assert "in an attribute or a hook" in told


def _left_in_an_attribute() -> list[str]:
    model = _model()
    model(torch.ones(8, 6)).sum().backward()
    return [text for text in log._said if "leaves in an attribute" in text]


def test_values_that_a_forward_leaves_in_attributes_are_warned_of() -> None:
    # A loss that read model[0].aux trained on an old value of one micro batch on the first rank, on zero on the last.
    first, second = run_ranks(_left_in_an_attribute, 2)
    assert len(first) == 1
    assert "Encoder.aux" in first[0]
    assert second == []


def _replaced() -> str:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epl.parallelize(model, optimizer)
    model(torch.ones(4, 6)).sum().backward()
    model[1] = nn.Linear(8, 6)
    optimizer.add_param_group({"params": model[1].parameters()})
    with pytest.raises(UsageError) as refused:
        model(torch.ones(4, 6))
    return str(refused.value)


def test_a_module_replaced_after_the_first_call_is_refused() -> None:
    first, second = run_ranks(_replaced, 2)
    assert first == second
    assert "2 parameters of the model are new since its first call (1.weight, 1.bias)" in first


class WithSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return h, h.abs().sum()


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with epl.replicate(1):
            self.first = WithSum()
        with epl.replicate(1):
            self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, penalty = self.first(x)
        return self.second(h), penalty


def _notices() -> list[str]:
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    out, penalty = epl.parallelize(Penalised())(torch.ones(4, 6))
    (out.mean() + penalty).backward()
    return [text for text in log._said if "averaged by rows" in text]


def test_a_value_of_a_stage_without_a_batch_dim_is_averaged_with_a_notice() -> None:
    # Design §3 promises it; a sum comes out as its average over micro batches.
    for told in run_ranks(_notices, 2):
        assert len(told) == 1
        assert "a part of what the module first returns" in told[0]


def _start_anew() -> bool:
    told = _differs_late("target")
    torch.manual_seed(0)
    model = _model()  # epl.init() again
    model(torch.ones(4, 6)).sum().backward()
    return told.startswith("step 4")


def test_after_a_disagreement_epl_init_starts_anew() -> None:
    assert run_ranks(_start_anew, 2) == [True, True]
