"""Experts that users write by themselves: stacked ones with einsum, as in the manual, and lists with a loop, as in Mixtral."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from epl.parallel.split.value import SplitTensor, shard
from epl.plan.split.cut import Axis, Cut
from tests.nn.reference import close
from tests.parallel.experts.cutting import cut_module, left, rows_cut, running
from tests.parallel.split.threads import ThreadRanks, run_threads

GROUPS, TOKENS, EXPERTS, PLACES, WIDTH, HIDDEN = 6, 4, 5, 3, 6, 8


class Stacked(nn.Module):
    """GShard's experts: g groups, s tokens of a group, e experts, c places, m width, h hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.wo = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor, dispatch: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        sent = torch.einsum("gsec,gsm->egcm", dispatch, x)
        hidden = torch.relu(torch.einsum("egcm,emh->egch", sent, self.wi))
        made = torch.einsum("egch,ehm->egcm", hidden, self.wo)
        return torch.einsum("gsec,egcm->gsm", combine, made)


class Listed(nn.Module):
    """Mixtral's block before it was stacked: a gate, and a loop over the experts that have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(*(s[::-1] if n == "w2" else s), bias=False) for n in ("w1", "w2", "w3")})
            for s in [(WIDTH, HIDDEN)] * EXPERTS
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        flat = x.reshape(-1, width)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for n, expert in enumerate(self.experts):
            choice, token = torch.where(mask[n])
            rows = flat.index_select(0, token)
            made = expert["w2"](functional.silu(expert["w1"](rows)) * expert["w3"](rows)) * weights[token, choice, None]
            out.index_add_(0, token, made.to(x.dtype))
        return out.reshape(batch, length, width)


def routes() -> list[torch.Tensor]:
    torch.manual_seed(1)
    dispatch = (torch.rand(GROUPS, TOKENS, EXPERTS, PLACES) < 0.3).double()
    combine = dispatch * torch.rand_like(dispatch)
    return [torch.randn(GROUPS, TOKENS, WIDTH, dtype=torch.float64), dispatch, combine]


def on_one_device(module: nn.Module, given: list[torch.Tensor], direction: torch.Tensor) -> tuple[torch.Tensor, Any]:
    leaves = [value.clone().requires_grad_() for value in given]
    y = module(*leaves)
    (y * direction).sum().backward()
    return y, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("counts", [None, [3, 3], [4, 2], [6, 0], [2, 1, 3]], ids=str)
def test_stacked_experts_by_einsum(counts: list[int] | None) -> None:
    calls = run_stacked(counts)
    if counts is None:
        assert calls[0] == "all-reduce"
        assert calls.count("all-reduce") == 1  # gradients of what was cut are put together, none is summed


def test_stacked_experts_by_einsum_send_tokens_by_all_to_all() -> None:
    """Tokens go to their experts and home again, forward and backward, and nowhere else."""
    assert run_stacked([4, 2]) == ["all-to-all"] * 4


def run_stacked(counts: list[int] | None) -> list[str]:
    """The collectives of a rank, after its numbers were compared with one device's; `counts`: rows by rank, if each has its own."""
    torch.manual_seed(0)
    start = Stacked().double()
    given = routes()
    direction = torch.randn_like(given[0])
    one = copy.deepcopy(start)
    y, gradients = on_one_device(one, given, direction)
    ways = len(counts or [0, 0])

    def rank(ranks: ThreadRanks) -> list[str]:
        module, axis = copy.deepcopy(start), Axis("experts", EXPERTS, ways)
        cut_module(module, ranks, lambda name, parameter: (0, Cut(axis)))
        rows = rows_cut(GROUPS, ways, counts)

        def own(value: torch.Tensor) -> torch.Tensor:
            return value if counts is None else rows.take(value, 0, ranks.rank)

        leaves = [own(value).clone().requires_grad_() for value in given]
        with running():
            made = module(*(leaf if counts is None else shard(leaf, 0, rows, ranks) for leaf in leaves))
            made = left(made)
        local = made.local if isinstance(made, SplitTensor) else made
        close(local, own(y))
        (local * own(direction)).sum().backward()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            close(leaf.grad, own(gradient))
        for (_, parameter), (_, same) in zip(module.named_parameters(), one.named_parameters(), strict=True):
            close(parameter.grad, Cut(axis).take(same.grad, 0, ranks.rank))
        return ranks.calls

    return run_threads(rank, ways)[0]


@pytest.mark.parametrize("own_rows", [False, True], ids=["same rows", "own rows"])
@pytest.mark.parametrize("ways", [2, 3])
def test_listed_experts_in_a_loop(ways: int, own_rows: bool) -> None:
    torch.manual_seed(0)
    start = Listed().double()
    x = routes()[0]
    direction = torch.randn_like(x)
    one = copy.deepcopy(start)
    y, gradients = on_one_device(one, [x], direction)

    def rank(ranks: ThreadRanks) -> None:
        module = copy.deepcopy(start)
        axes = [Axis(f"expert {n}", HIDDEN, ways) for n in range(EXPERTS)]

        def choose(name: str, parameter: torch.Tensor) -> tuple[int, Cut] | None:
            if not name.startswith("experts"):
                return None
            return (1 if "w2" in name else 0), Cut(axes[int(name.split(".")[1])])

        cut_module(module, ranks, choose)
        rows = rows_cut(GROUPS, ways)

        def own(value: torch.Tensor) -> torch.Tensor:
            return rows.take(value, 0, ranks.rank) if own_rows else value

        mine = own(x).clone().requires_grad_()
        with running():
            made = left(module(shard(mine, 0, rows, ranks) if own_rows else mine))
        local = made.local if isinstance(made, SplitTensor) else own(made)
        close(local, own(y))
        if isinstance(made, SplitTensor) or not own_rows:
            (local * own(direction)).sum().backward()
        else:
            (made * direction).sum().backward()  # a whole value: its gradient is, too
        close(mine.grad, own(gradients[0]))
        for (name, parameter), (_, same) in zip(module.named_parameters(), one.named_parameters(), strict=True):
            found = choose(name, same)
            close(parameter.grad, same.grad if found is None else found[1].take(same.grad, found[0], ranks.rank))

    run_threads(rank, ways)
