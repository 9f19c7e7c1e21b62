"""Ranks that wait for each other at different places: who is stuck, and that all of them are told within seconds."""

from __future__ import annotations

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import epl
from epl.cluster import standstill
from epl.cluster.standstill import Waiting, stuck
from tests.harness import rank_errors, run_ranks


def waiting(group: str, number: int, members: tuple[int, ...], **made: int) -> Waiting:
    return Waiting(1, group, number, members, {group: number, **made}, "")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({0: waiting("a", 7, (0, 1), b=12), 1: waiting("b", 13, (0, 1), a=6)}, {0, 1}),
        # Rank 1 has made the call that rank 0 waits for: it is under way.
        ({0: waiting("a", 7, (0, 1), b=12), 1: waiting("b", 13, (0, 1), a=7)}, set()),
        ({0: waiting("a", 7, (0, 1)), 1: waiting("a", 7, (0, 1))}, set()),
        # Rank 0 has gone on; rank 1 has not yet written down that it has, too.
        ({0: waiting("a", 8, (0, 1)), 1: waiting("a", 7, (0, 1))}, set()),
        # Rank 2 computes: whoever waits for it, or for those, may go on.
        ({0: waiting("a", 7, (0, 1), b=1), 1: waiting("b", 2, (1, 2), a=6)}, set()),
        ({0: waiting("a", 1, (0, 1)), 1: waiting("b", 1, (1, 2)), 2: waiting("c", 1, (2, 0))}, {0, 1, 2}),
    ],
)
def test_who_is_stuck(found: dict[int, Waiting], expected: set[int]) -> None:
    assert set(stuck(found)) == expected


class Net(nn.Module):
    def __init__(self, colocated: bool) -> None:
        super().__init__()
        if colocated:
            with epl.replicate(2):
                self.body = nn.Linear(4, 8)
        else:
            self.body = nn.Linear(4, 8)
        with epl.split(2):
            self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _part_ways(colocated: bool) -> None:
    standstill._PATIENCE = 0.3
    epl.init(epl.Config({"communication.timeout": 40, "cluster.colocate_split_and_replicate": colocated}))
    torch.manual_seed(0)
    model, rank = Net(colocated), epl.Env.get().cluster.rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epl.parallelize(model, optimizer)
    x, y = torch.randn(6, 4), torch.randint(0, 10, (6,))
    for step in range(3):
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        if step == 1 and rank == 0:
            print((logits.argmax(1) == y).sum())  # the best class of all ranks' classes
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("colocated", [True, False], ids=["own rows", "same rows"])
def test_a_rank_that_reads_split_logits_alone(colocated: bool) -> None:
    # It waited in a gather, the other one in its next call or in a backward: both for communication.timeout, ten minutes.
    for error in rank_errors(_part_ways, 2, colocated):
        assert error is not None
        kind, text = error
        assert kind == "RanksDisagreeError"
        assert "rank 0: computing with split values in test_standstill.py:" in text
        assert "rank 1: " in text


def _give_up_and_wait_again() -> tuple[list[str], float]:
    job = epl.init() or epl.Env.get().job("test")
    number = torch.ones(())
    said = []
    if job.rank == 1:
        time.sleep(0.5)
    work = dist.all_reduce(number, async_op=True)
    while True:
        try:
            work.wait(datetime.timedelta(seconds=0.1))
            return said, number.item()
        except RuntimeError as error:
            said.append(str(error))


def test_a_wait_that_was_given_up_can_be_taken_up_again() -> None:
    # What c10d says then is not documented: another text would end a job at the first slow rank.
    (said, number), (_, other) = run_ranks(_give_up_and_wait_again, 2)
    assert said
    assert all(standstill._NOT_YET in text for text in said)
    assert number == other == 2
