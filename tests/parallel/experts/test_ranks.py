"""Experts over real ranks: what threads cannot show, such as empty messages and uneven counts in c10d."""

from __future__ import annotations

import torch
import torch.distributed as dist

from epl.nn import MoE
from epl.parallel.split.ranks import GroupRanks
from epl.parallel.split.value import shard
from tests.harness import run_ranks
from tests.nn.reference import close
from tests.parallel.experts.cutting import by_expert, cut_module, rows_cut, running


def experts_on_real_ranks() -> bool:
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    ranks = GroupRanks(dist.group.WORLD)
    for counts in ([3, 2], [0, 5]):
        torch.manual_seed(0)
        one, moe = (MoE(6, 8, 5, capacity_factor=0.8).double() for _ in range(2))
        moe.load_state_dict(one.state_dict())
        x = torch.randn(5, 3, 6, dtype=torch.float64)
        y, aux = one(x)
        (y.square().sum() + aux.balance_loss).backward()
        cut, choose = rows_cut(5, 2, counts), by_expert(5, 2)
        cut_module(moe, ranks, choose)
        with running():
            made, told = moe(shard(cut.take(x, 0, ranks.rank), 0, cut, ranks))
        close(made.local, cut.take(y, 0, ranks.rank))
        close(told.dropped, aux.dropped)
        (made.local.square().sum() + told.balance_loss).backward()
        for (name, parameter), (_, same) in zip(moe.named_parameters(), one.named_parameters(), strict=True):
            found = choose(name, same)
            close(parameter.grad, same.grad if found is None else found[1].take(same.grad, 0, ranks.rank))
    dist.destroy_process_group()
    return True


def test_experts_on_real_ranks() -> None:
    assert all(run_ranks(experts_on_real_ranks, 2))
