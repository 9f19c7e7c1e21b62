"""The harness itself: values, first traceback, death, hang, stacks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, rank_errors, run_ranks


def _all_reduce(start: int) -> torch.Tensor:
    dist.init_process_group("gloo")
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value


def _raise_on(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        raise ValueError("the first one")
    dist.all_reduce(torch.ones(1))


def _die() -> None:
    if os.environ["RANK"] == "1":
        os._exit(7)


def _hang_here() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


def _wrong_everywhere() -> None:
    raise KeyError(f"rank {os.environ['RANK']}")


def test_values_come_back_by_rank():
    assert run_ranks(_all_reduce, 4, 10) == [torch.tensor([46])] * 4


def test_first_real_traceback_is_named():
    with pytest.raises(RankFailure) as failure:
        run_ranks(_raise_on, 3, 2)
    assert (failure.value.rank, failure.value.kind) == (2, "ValueError")
    assert "the first one" in failure.value.text
    assert "_raise_on" in failure.value.text


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankFailure, match="exit code 7"):
        run_ranks(_die, 2)


def test_a_hang_fails_with_stacks():
    with pytest.raises(RankFailure, match="_hang_here") as failure:
        run_ranks(_hang_here, 2, timeout=2)
    assert (failure.value.rank, failure.value.kind) == (1, "hung")


def test_errors_of_every_rank():
    assert rank_errors(_wrong_everywhere, 2) == [("KeyError", "'rank 0'"), ("KeyError", "'rank 1'")]
