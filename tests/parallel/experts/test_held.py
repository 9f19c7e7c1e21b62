"""Experts whose parameters are not cut by experts: left whole, or each over all ranks; and what ranks draw by themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from epl.errors import SplitError
from epl.nn import Experts, TopKGate
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, shard
from epl.plan.split.cut import Axis, Cut
from tests.nn.reference import Small, close
from tests.parallel.experts.cutting import by_expert, cut_module, left, rows_cut, running
from tests.parallel.experts.test_run import ROWS, batch, check_parameters, make, on_one_device
from tests.parallel.split.threads import ThreadRanks, run_threads


def over_all_ranks(ways: int) -> Any:
    """The experts of a list, each by its features."""
    axes: dict[str, Axis] = {}

    def choose(name: str, parameter: torch.Tensor) -> tuple[int, Cut] | None:
        if "members" not in name or "norm" in name:
            return None
        axis = axes.setdefault(name.split(".inner")[0].split(".outer")[0], Axis("features", 5, ways))
        return (1 if "outer" in name else 0), Cut(axis)

    return choose


def whole(name: str, parameter: torch.Tensor) -> None:
    return None


@pytest.mark.parametrize("own_rows", [False, True], ids=["same rows", "own rows"])
@pytest.mark.parametrize(
    ("options", "kind"),
    [({"expert": Small}, over_all_ranks), ({"expert": Small}, whole), ({}, whole)],
    ids=["each over all ranks", "modules whole", "stack whole"],
)
def test_other_ways_to_hold_experts(options: dict[str, Any], kind: Any, own_rows: bool) -> None:
    one = make(capacity_factor=0.8, **options)
    x, direction = batch()
    start = copy.deepcopy(one)
    y, aux, gradient = on_one_device(one, x, direction)

    def rank(ranks: ThreadRanks) -> None:
        choose = kind if kind is whole else kind(2)
        moe, cut = copy.deepcopy(start), rows_cut(ROWS, 2, [5, 2] if own_rows else None)
        cut_module(moe, ranks, choose)
        own, towards, expected, of_x = (
            cut.take(value, 0, ranks.rank) if own_rows else value for value in (x, direction, y, gradient)
        )
        own = own.clone().requires_grad_()
        with running():
            made, told = moe(shard(own, 0, cut, ranks) if own_rows else own)
            made = left(made)
        local = made.local if isinstance(made, SplitTensor) else made
        close(local, expected)
        close(told.counts, aux.counts)
        close(told.balance_loss, aux.balance_loss)
        ((local * towards).sum() + 0.3 * told.balance_loss + 0.2 * told.z_loss).backward()
        close(own.grad, of_x)
        check_parameters(ranks, moe, one, choose)

    run_threads(rank, 2)


def test_more_ranks_than_experts() -> None:
    one = make(top_k=1)
    x, direction = batch()
    start = copy.deepcopy(one)
    y, _, _ = on_one_device(one, x, direction)

    def rank(ranks: ThreadRanks) -> None:
        moe, cut, choose = copy.deepcopy(start), rows_cut(ROWS, 6), by_expert(5, 6)
        cut_module(moe, ranks, choose)
        with running():
            made, told = moe(
                shard(cut.take(x, 0, ranks.rank), 0, cut, ranks)
            )  # the input has no gradient: experts have
        close(made.local, cut.take(y, 0, ranks.rank))
        mine = (made.local * cut.take(direction, 0, ranks.rank)).sum()
        (mine + 0.3 * told.balance_loss + 0.2 * told.z_loss).backward()
        check_parameters(ranks, moe, one, choose)

    run_threads(rank, 6)


@pytest.mark.parametrize("frozen", [False, True])
def test_backward_meets_on_ranks_without_experts(frozen: bool) -> None:
    """A list leaves a rank without experts with nothing that has a gradient, where the others wait for it."""
    start = make(expert=Small, capacity_factor=None)
    if frozen:
        for parameter in start.experts.members[:3].parameters():
            parameter.requires_grad_(False)
    x, direction = batch()
    one = copy.deepcopy(start)
    (one(x)[0] * direction).sum().backward()
    counts = [3, 2] if frozen else [5, 0]

    def rank(ranks: ThreadRanks) -> None:
        moe, cut, choose = copy.deepcopy(start), rows_cut(ROWS, 2), by_expert(5, 2, counts)
        cut_module(moe, ranks, choose)
        with running():
            made, _ = moe(shard(cut.take(x, 0, ranks.rank), 0, cut, ranks))
        (made.local * cut.take(direction, 0, ranks.rank)).sum().backward()
        for (name, parameter), (_, same) in zip(moe.named_parameters(), one.named_parameters(), strict=True):
            found = choose(name, same)
            if same.grad is not None and (found is None or found[1].length(ranks.rank)):
                close(parameter.grad, same.grad)

    run_threads(rank, 2)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"router_jitter": 0.2}])
def test_what_ranks_draw_is_their_own(options: dict[str, Any]) -> None:
    start = make(capacity_factor=None, **options)
    x, _ = batch()

    def rank(ranks: ThreadRanks) -> list[torch.Tensor]:
        moe, cut = copy.deepcopy(start), rows_cut(ROWS, 2)
        cut_module(moe, ranks, by_expert(5, 2))
        before = ranks.generator.get_state()
        found = []
        for _ in range(2):
            ranks.generator.set_state(before)  # what recompute does
            with running():
                made, _ = moe(shard(cut.take(x, 0, ranks.rank), 0, cut, ranks))
            found.append(made.local)
        if not torch.equal(before, ranks.generator.get_state()):
            found.append(torch.ones(()))
        return found

    common = torch.get_rng_state()
    for found in run_threads(rank, 2):
        assert len(found) == 3
        close(found[0], found[1])
    assert torch.equal(torch.get_rng_state(), common)


def test_modules_of_one_rank_draw_from_its_stream() -> None:
    """On one rank only: modules draw from the process' stream, which threads share."""
    start = make(capacity_factor=None, expert=lambda: Small(p=0.5))
    x, _ = batch()

    def rank(ranks: ThreadRanks) -> list[torch.Tensor]:
        moe = copy.deepcopy(start)
        cut_module(moe, ranks, by_expert(5, 1))
        torch.manual_seed(3)
        common, own = torch.get_rng_state(), ranks.generator.get_state()
        with running():
            first = left(moe(x)[0])
        assert torch.equal(torch.get_rng_state(), common)
        assert not torch.equal(ranks.generator.get_state(), own)
        ranks.generator.set_state(own)
        torch.manual_seed(4)
        with running():
            return [first, left(moe(x)[0])]

    first, second = run_threads(rank, 1)[0]
    close(first, second)


def test_exact_dropout_shakes_the_gate_as_one_device_does() -> None:
    start = make(router_jitter=0.3, capacity_factor=None)
    x, _ = batch()
    torch.manual_seed(5)
    expected = start(x)[1].z_loss
    gate = copy.deepcopy(start.gate)

    def rank(ranks: ThreadRanks) -> torch.Tensor:
        cut = rows_cut(ROWS, 1)
        torch.manual_seed(5)
        region.exact_dropout = True
        try:
            with running():
                logits = gate(shard(x, 0, cut, ranks)).logits.local
        finally:
            region.exact_dropout = False
        return logits.logsumexp(-1).square().mean()

    close(run_threads(rank, 1)[0], expected)


def test_gate_outside_of_the_split() -> None:
    """Attention and gate replicated, experts split: routes come as plain rows of each rank, and enter with them."""
    torch.manual_seed(0)
    gate, experts = TopKGate(6, 5).double(), Experts(6, 8, 5, capacity_factor=0.7).double()
    x, direction = batch()
    one_gate, one = copy.deepcopy(gate), copy.deepcopy(experts)
    y, aux = one(x, *one_gate(x))
    ((y * direction).sum() + aux.balance_loss).backward()

    def rank(ranks: ThreadRanks) -> torch.Tensor:
        own_gate, own, cut, choose = copy.deepcopy(gate), copy.deepcopy(experts), rows_cut(ROWS, 2), by_expert(5, 2)
        cut_module(own, ranks, choose)
        mine = cut.take(x, 0, ranks.rank)
        routes = own_gate(mine)
        with running():
            made, told = own(*(shard(value, 0, cut, ranks) for value in (mine, *routes)))
        close(made.local, cut.take(y, 0, ranks.rank))
        close(told.balance_loss, aux.balance_loss)
        ((made.local * cut.take(direction, 0, ranks.rank)).sum() + told.balance_loss).backward()
        check_parameters(ranks, own, one, choose)
        assert own_gate.weight is not None
        assert own_gate.weight.grad is not None
        return own_gate.weight.grad

    assert one_gate.weight is not None
    close(sum(run_threads(rank, 2)), one_gate.weight.grad)  # type: ignore[arg-type]


def test_experts_called_outside_the_forward_are_refused() -> None:
    start = make()

    def rank(ranks: ThreadRanks) -> None:
        moe = copy.deepcopy(start)
        cut_module(moe, ranks, by_expert(5, 2))
        with pytest.raises(
            SplitError, match=r"expected all 5 experts or split values, found the [23] experts of this rank"
        ):
            moe(batch()[0])

    run_threads(rank, 2)
