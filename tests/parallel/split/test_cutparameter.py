"""Parameters of which a rank has a block, outside of split parts: what is whole, what is the block, what is refused."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from torch import nn

import epl
from epl.errors import SplitError, StateError, UsageError
from epl.parallel.split.choose import choose
from epl.parallel.split.cutparameter import CutParameter, become_plain
from epl.parallel.split.expressions import OwnLosses
from epl.parallel.split.part import SplitPart
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, shard, whole
from epl.plan.split.layout import layout_of
from epl.train.lazy.lane import become_lane, become_single
from tests.parallel.split.compare import even
from tests.parallel.split.threads import ThreadRanks, run_threads


class Listing(nn.Module):
    """Returns a penalty over its own parameters beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), torch.stack([p.norm() for p in self.parameters()]).sum()


def on_blocks(function: Any, own_losses: bool = False) -> tuple[nn.Linear, list[Any]]:
    """What `function(parameter, ranks)` gives on every rank for the weight of a layer that is cut in two; and the whole layer."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 7).double()
    plan = choose(layer, 2, (torch.randn(3, 5, dtype=torch.float64),))

    def body(ranks: ThreadRanks) -> Any:
        mine = copy.deepcopy(layer)
        weights = (0.25, 0.75)
        more = {"expressions": OwnLosses(ranks, lambda: weights[ranks.rank])} if own_losses else {}
        part = SplitPart(mine, plan, ranks, **more)
        try:
            return function(mine.weight, ranks)
        finally:
            part.undo(gather=False)

    return layer, run_threads(body, 2)


def test_a_whole_parameter_of_a_split_stage_may_stand_before_a_split_value() -> None:
    # As in `self.weight * h` of a norm of cut heads, and the addmm of GPT-2's layers. Torch asks the first argument first: it took all of
    # them for plain tensors, and the models could be no stages.
    x, scale, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 6), (6,), (6, 4)))

    def body(ranks: ThreadRanks) -> tuple[torch.Tensor, torch.Tensor | None]:
        mine, bias = nn.Parameter(scale.clone()), nn.Parameter(weight[0].clone())
        for parameter, name in ((mine, "scale"), (bias, "bias")):
            become_lane(parameter, (0, 1), 0, name, ranks, together=True)
        region.depth, region.entered = 1, {}
        try:
            cut = even(6, 2)
            h = shard(cut.take(x, 1, ranks.rank), 1, cut, ranks)
            out = whole(torch.addmm(bias, mine * h, shard(cut.take(weight, 0, ranks.rank), 0, cut, ranks)))
            out.square().sum().backward()
            return out.detach(), mine.grad
        finally:
            region.depth, region.entered = 0, {}
            for parameter in (mine, bias):
                become_single(parameter)

    plain = scale.clone().requires_grad_()
    expected = torch.addmm(weight[0], plain * x, weight)
    expected.square().sum().backward()
    for out, gradient in run_threads(body, 2):
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(gradient, plain.grad)


def test_expressions_are_those_of_the_whole() -> None:
    def value(p: Any, ranks: ThreadRanks) -> Any:
        found = (
            p.norm() * 2
            + (p.abs() * p).sum()
            + (p.T @ p).diagonal().sum()
            + torch.cat([p.view(-1), p.flatten()]).abs().max()
        )
        (gradient,) = torch.autograd.grad(found, [p])
        return float(found.detach()), gradient, p.shape

    layer, (first, second) = on_blocks(value)
    expected = value(layer.weight, None)  # type: ignore[arg-type]
    assert first[0] == second[0] == pytest.approx(expected[0], rel=1e-12)
    assert (first[2], second[2]) == ((4, 5), (3, 5))
    torch.testing.assert_close(torch.cat([first[1], second[1]]), expected[1], rtol=1e-12, atol=1e-12)


def test_losses_of_their_own_share_the_gradient_by_weight() -> None:
    """Rank r's loss is (r + 1) times the penalty, and counts 1/4 and 3/4: the parameter gets 1/4 + 2 · 3/4 times its gradient."""

    def value(p: Any, ranks: ThreadRanks) -> Any:
        row = torch.arange(5, dtype=torch.float64) + 1  # a tensor of the rank's own: the whole parameter meets it
        found = (ranks.rank + 1) * (p.norm() + (p * 2).abs().sum() + (p @ row).sum())
        return torch.autograd.grad(found, [p])[0]

    layer, blocks = on_blocks(value, own_losses=True)
    w = layer.weight
    row = torch.arange(5, dtype=torch.float64) + 1
    (expected,) = torch.autograd.grad(1.75 * (w.norm() + (w * 2).abs().sum() + (w @ row).sum()), [w])
    torch.testing.assert_close(torch.cat(blocks), expected, rtol=1e-12, atol=1e-12)


def test_readers_optimizers_and_averages_see_the_block() -> None:
    def look(p: Any, ranks: ThreadRanks) -> Any:
        with torch.no_grad():
            ranks.calls.clear()
            average = 0.9 * p.detach() + 0.1 * p
            average.lerp_(p, 0.5)
            p.grad = torch.ones_like(p)
            torch.optim.AdamW([p], foreach=True).step()
        assert type(p.detach()) is type(p.data) is type(torch.zeros_like(p)) is torch.Tensor
        assert isinstance(p, nn.Parameter)
        assert not isinstance(p, SplitTensor)
        assert p.numel() == average.numel() == p.detach().numel()
        assert not ranks.calls  # nothing was sent
        return torch.equal(p, p.detach())

    assert on_blocks(look)[1] == [True, True]


def test_torch_steps_many_blocks_in_one_call() -> None:
    def kinds(p: Any, ranks: ThreadRanks) -> Any:
        from torch.optim.optimizer import _foreach_supported_types

        return type(p) in _foreach_supported_types

    assert on_blocks(kinds)[1] == [True, True]


def test_parameters_that_a_split_forward_lists_are_whole() -> None:
    torch.manual_seed(0)
    model = Listing().double()
    x = torch.randn(3, 5, dtype=torch.float64)
    plan = choose(model, 2, (x,))

    def body(ranks: ThreadRanks) -> Any:
        mine = copy.deepcopy(model)
        part = SplitPart(mine, plan, ranks)
        try:
            mine(x)[1].backward()
            return float(mine(x)[1].detach()), part.gather("linear.weight", mine.linear.weight.grad)
        finally:
            part.undo(gather=False)

    model(x)[1].backward()
    for value, gradient in run_threads(body, 2):
        assert value == pytest.approx(float(model(x)[1].detach()), rel=1e-12)
        torch.testing.assert_close(gradient, model.linear.weight.grad, rtol=1e-12, atol=1e-12)


def test_a_copy_is_a_block_too_and_neither_is_saved() -> None:
    def save(p: Any, ranks: ThreadRanks) -> Any:
        for parameter in (p, copy.deepcopy(p), copy.copy(p)):
            assert isinstance(parameter, CutParameter)
            assert layout_of(parameter) == layout_of(p)
            with pytest.raises(StateError, match=r"block \((4|3), 5\) only, of \(7, 5\).*epl.full_state_dict"):
                torch.save({"p": parameter}, io.BytesIO())
        become_plain(twin := copy.deepcopy(p))
        assert type(twin) is nn.Parameter
        assert layout_of(twin) is None
        return epl.whole(p).shape

    assert on_blocks(save)[1] == [(7, 5), (7, 5)]


def test_a_vector_of_whole_parameters_is_not_cut_up_as_one_of_blocks() -> None:
    def write(p: Any, ranks: ThreadRanks) -> Any:
        vector = nn.utils.parameters_to_vector([p])
        assert vector.numel() == 35
        with pytest.raises(SplitError, match=r"view_as.*no_grad"):
            nn.utils.vector_to_parameters(vector.detach(), [p])
        with torch.no_grad():
            blocks = nn.utils.parameters_to_vector([p])
            nn.utils.vector_to_parameters(blocks * 2, [p])
        return blocks.numel()

    assert on_blocks(write)[1] == [20, 15]


def test_random_numbers_for_a_parameter_are_those_of_one_device() -> None:
    # Both ranks had the same numbers in different places, and went on with different random states, as one had drawn more.
    def filled(p: Any, ranks: ThreadRanks) -> Any:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(3)
            p.add_(torch.randn_like(p), alpha=0.1).mul_(torch.rand_like(p))
            first = p.detach().clone()
            nn.init.trunc_normal_(p, std=0.2)
            second = p.detach().clone()
            nn.init.uniform_(p, -1, 2)
            return first, second, p.detach().clone(), torch.rand(4)

    lock = threading.Lock()  # the threads share one random state

    def body(p: Any, ranks: ThreadRanks) -> Any:
        with lock:
            return filled(p, ranks)

    layer, (first, second) = on_blocks(body)
    expected = filled(layer.weight, None)  # type: ignore[arg-type]
    for n in range(3):
        assert torch.equal(torch.cat([first[n], second[n]]), expected[n])
    assert torch.equal(first[3], expected[3])
    assert torch.equal(second[3], expected[3])


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.orthogonal_,
        nn.init.eye_,
    ],
)
def test_an_initialiser_that_looks_at_the_shape_of_a_block_is_refused(fill: Any) -> None:
    def body(p: Any, ranks: ThreadRanks) -> None:
        with pytest.raises(UsageError, match=rf"torch.nn.init.{fill.__name__} .* \(7, 5\).* before that call"):
            fill(p)

    on_blocks(body)


def test_initialisers_that_do_not_look_at_the_shape_work_on_blocks() -> None:
    def body(p: Any, ranks: ThreadRanks) -> None:
        nn.init.constant_(p, 2.0)
        assert p.detach().unique().tolist() == [2.0]
        nn.init.zeros_(p)
        assert not p.detach().any()

    on_blocks(body)
