"""Terms over `model.parameters()` in the loop's loss, where this rank has blocks of some and nothing of others.

Every layout once, with all kinds of terms in one loss. A block that counts as a parameter is right for squares only, and even then shows
another loss: norms over blocks once had other gradients than on one device, and trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epl
from epl.errors import LazyValueError
from tests.harness import RankFailure, run_ranks

ROWS = 12


class Net(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        with first:
            self.body = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9))
        with second:
            self.head = nn.Sequential(nn.Linear(9, 15), nn.GELU(), nn.Linear(15, 7), nn.LayerNorm(7))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


def penalty(parameters: Sequence[nn.Parameter], anchors: Sequence[torch.Tensor]) -> Any:
    norms = sum(p.norm() for p in parameters)
    ones = torch.cat([p.view(-1) for p in parameters]).abs().sum()
    largest = torch.stack([p.abs().max() for p in parameters]).sum()
    drift = sum(((p - a) ** 2).sum() for p, a in zip(parameters, anchors, strict=True)) if anchors else 0.0
    return 1e-2 * (sum(p.pow(2).sum() for p in parameters) + norms + ones + largest + drift)


def train(first: tuple[str, int], second: tuple[str, int], colocated: bool, micro_batches: int, anchored: bool) -> Any:
    """Losses, the value of an evaluation with the penalty in it, and the weights after three steps."""
    epl.init(
        epl.Config(
            {
                "cluster.colocate_split_and_replicate": colocated,
                "pipeline.num_micro_batch": micro_batches,
                "communication.timeout": 30,
            }
        )
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Net(*(getattr(epl, kind)(width) for kind, width in (first, second)))
    x, y = torch.randn(ROWS, 6), torch.randint(0, 7, (ROWS,))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = epl.parallelize(model, optimizer)
    if colocated and "replicate" in (first[0], second[0]):  # every rank has rows of its own
        rank, ranks = epl.Env.get().cluster.rank, epl.Env.get().cluster.world_size
        x, y = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]
    model(x)  # parameters are given to ranks
    anchors = [0.5 * p.detach().clone() for p in model.parameters()] if anchored else []
    losses: list[float] = []
    weights_read: list[float] = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + penalty(list(model.parameters()), anchors)
        loss.backward()
        # The lanes of a split stage were waited for by nobody, and waited for nobody: the gradients of this went nowhere, in silence.
        by_itself = 1e-2 * sum(p.pow(2).sum() + p.norm() for p in model.head.parameters())
        by_itself.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if second[0] == "split" and not colocated:
            weights_read.append(model.head[0].weight.norm().item())  # refused once, as if one rank had all of it
        return loss.detach()

    for step in range(3):
        if step == 1:  # the closure computes a loss in the middle of a step
            loss: Any = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        losses.append(float(epl.global_mean(loss)))
    value = losses[-1]
    if not colocated:
        with torch.no_grad():
            value = float(F.cross_entropy(model(x), y) + penalty(list(model.parameters()), ()))
    return losses + weights_read, value, epl.full_state_dict(model)


LAYOUTS: dict[str, tuple[tuple[str, int], tuple[str, int], int, bool, int]] = {
    "split": (("split", 2), ("split", 2), 2, True, 1),
    "split in micro batches": (("split", 2), ("split", 2), 2, True, 3),
    "beside replicate": (("replicate", 2), ("split", 2), 2, True, 1),
    "beside replicate in micro batches": (("split", 3), ("replicate", 3), 3, True, 2),
    "last stage split": (("replicate", 1), ("split", 2), 3, False, 2),
    "first stage split": (("split", 2), ("replicate", 1), 3, False, 2),
    "both stages split, two replicas": (("split", 2), ("split", 2), 8, False, 2),
    # Lanes of a wide stage once waited for each other for ever: the term's gradients came to one of them only.
    "wide last stage": (("replicate", 1), ("replicate", 2), 3, False, 2),
    "wide first stage": (("replicate", 2), ("replicate", 1), 3, False, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_terms_over_parameters(layout: str) -> None:
    first, second, ranks, colocated, micro_batches = LAYOUTS[layout]
    (losses, value, weights), *_ = run_ranks(train, 1, first, second, False, 1, colocated)
    steps = 6 if second[0] == "split" and not colocated else 3
    for rank, (found, read, state) in enumerate(
        run_ranks(train, ranks, first, second, colocated, micro_batches, colocated)
    ):
        assert found == pytest.approx(losses[:steps], rel=1e-9), f"rank {rank}"
        assert colocated or read == pytest.approx(value, rel=1e-9), f"rank {rank}"
        for name, expected in weights.items():
            torch.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-9)


def by_its_shape() -> str:
    """`p.shape` is that of the block."""
    epl.init(epl.Config({"communication.timeout": 30}))
    model = epl.parallelize(Net(epl.split(2), epl.replicate(1)))
    loss = model(torch.ones(ROWS, 6)).square().mean()
    loss.backward()
    weight = model.body[0].weight
    if epl.Env.get().cluster.rank == 2:
        return ""
    with pytest.raises(LazyValueError) as told:
        (weight @ weight.T - torch.eye(weight.shape[0])).square().sum()
    return str(told.value)


def test_a_term_that_takes_a_block_for_the_whole_is_told_what_the_shape_is() -> None:
    # "whose result depends on numbers, ... lives on rank 0; here is only its place" was said on rank 0, too.
    first, *_ = run_ranks(by_its_shape, 3)
    for text in ("(9, 6)", "is on ranks 0, 1", "block (5, 6)", "p.shape", "[5, 5]"):
        assert text in first


def alone() -> None:
    """One rank computes with a cut parameter, the others do not."""
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "communication.timeout": 3}))
    model = epl.parallelize(Net(epl.split(2), epl.split(2)))
    x, y = torch.randn(ROWS, 6), torch.randint(0, 7, (ROWS,))
    for _ in range(2):
        loss = F.cross_entropy(model(x), y)
        if epl.Env.get().cluster.rank == 0:
            loss = loss + model.head[0].weight.norm()
        loss.backward()


def test_a_rank_that_computes_alone_does_not_wait_for_ever() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(alone, 2)
    assert caught.value.kind == "DeadlineError"  # the other is in a backward, where ranks of a split meet without words
    assert "split" in caught.value.text
