"""A module cut in place: what stays the same about it, how it is copied, looked at, called and given back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epl import _torch
from epl.errors import SplitError, StateError
from epl.parallel.split.choose import choose
from epl.parallel.split.cutparameter import CutParameter
from epl.parallel.split.part import SplitPart, as_whole
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, whole
from epl.plan.split.layout import layout_of
from epl.plan.split.splitplan import SplitPlan
from tests.parallel.split.cases import MLP
from tests.parallel.split.parity import close
from tests.parallel.split.threads import ThreadRanks, run_threads

X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mlp() -> tuple[MLP, SplitPlan]:
    torch.manual_seed(0)
    module = MLP(8, 16).double()
    return module, choose(module, 2, (X.requires_grad_(),))


def on_ranks(body: Any, module: nn.Module, plan: SplitPlan, **settings: Any) -> list[Any]:
    """body(part, ranks) on two threads, each with a copy of the module that is split."""

    def run(ranks: ThreadRanks) -> Any:
        part = SplitPart(copy.deepcopy(module), plan, ranks, **settings)
        try:
            return body(part, ranks)
        finally:
            part.undo(gather=False)

    return run_threads(run, 2)


def same_as(module: nn.Module, part: SplitPart, x: torch.Tensor = X) -> None:
    """Values and gradients of the split module are those of the module."""
    reference = copy.deepcopy(module)
    reference.zero_grad()
    part.module.zero_grad()
    ours, theirs = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    found, expected = whole(part.module(ours)), reference(theirs)
    found.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    close(found, expected, "output")
    close(ours.grad, theirs.grad, "gradient of the input")
    for (name, p), q in zip(part.module.named_parameters(), reference.parameters(), strict=True):
        close(None if p.grad is None else part.gather(name, p.grad), q.grad, name)


# ---- parameters


def test_parameters_stay_the_same_objects_and_are_plain_in_every_listing() -> None:
    module, plan = mlp()

    def body(ranks: ThreadRanks) -> None:
        own = copy.deepcopy(module)
        before = list(own.parameters())
        part = SplitPart(own, plan, ranks)
        assert all(p is q for p, q in zip(own.parameters(), before, strict=True))
        assert own.a.weight.shape == (8, 8)
        assert own.b.weight.shape == (8, 8)
        assert layout_of(own.a.weight) is part.layouts["a.weight"]
        assert layout_of(own.b.bias) is None
        listings = [*own.parameters(), *own.state_dict().values(), *own.a._parameters.values()]
        assert not any(isinstance(t, SplitTensor) for t in listings)
        assert type(own.a.weight) is CutParameter
        part.undo(gather=False)

    run_threads(body, 2)


def test_a_graph_that_is_alive_while_cutting_does_no_harm() -> None:
    # `p.data = block` leaves the gradient accumulator of a living graph with the old shape: backward then fails.
    module, plan = mlp()

    def body(ranks: ThreadRanks) -> None:
        own = copy.deepcopy(module)
        alive = own(X).sum()
        part = SplitPart(own, plan, ranks)
        same_as(module, part)
        assert alive.requires_grad
        part.undo(gather=False)

    run_threads(body, 2)


def test_gradients_that_are_there_are_cut_along() -> None:
    module, plan = mlp()
    module(X).sum().backward()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        for name, p in part.module.named_parameters():
            assert p.grad is not None
            assert p.grad.shape == p.shape
            close(part.gather(name, p.grad), module.get_parameter(name).grad, name)

    on_ranks(body, _with_gradients(module), plan)


def _with_gradients(module: nn.Module) -> nn.Module:
    class Copied(nn.Module):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            new = copy.deepcopy(module)
            for p, q in zip(new.parameters(), module.parameters(), strict=True):
                p.grad = None if q.grad is None else q.grad.clone()
            return new

    return Copied()


def test_a_replaced_parameter_is_followed() -> None:
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        own: Any = part.module
        own.a.weight = nn.Parameter(own.a.weight.detach() * 2)
        reference = copy.deepcopy(module)
        with torch.no_grad():
            reference.a.weight.mul_(2)
        close(whole(own(X)), reference(X), "after replacing")
        own.a.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
        with pytest.raises(SplitError, match=r"shape \(3, 3\); it must have the shape of this rank's block, \(8, 8\)"):
            own(X)

    on_ranks(body, module, plan)


def test_functional_call_with_blocks_and_with_wholes() -> None:
    module, plan = mlp()
    # Not in the threads: functional_call puts the tensors into the one module that they share.
    wholes = {name: (p.detach() * 2).requires_grad_() for name, p in module.named_parameters()}
    expected = torch.func.functional_call(module, wholes, (X,))
    expected.sum().backward()
    gradients = {name: p.grad for name, p in wholes.items()}

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        blocks = {name: (p.detach() * 2).requires_grad_() for name, p in part.module.named_parameters()}
        found = whole(torch.func.functional_call(part.module, blocks, (X,)))
        found.sum().backward()
        close(found, expected, "with blocks")
        for name, block in blocks.items():
            assert block.grad is not None
            close(part.gather(name, block.grad), gradients[name], name)
        again = {name: (p.detach() * 2).requires_grad_() for name, p in module.named_parameters()}
        whole(torch.func.functional_call(part.module, again, (X,))).sum().backward()
        for name, p in again.items():
            close(p.grad, gradients[name], f"{name}, given whole")

    on_ranks(body, module, plan)


# ---- calling


def test_an_exception_leaves_no_region_behind() -> None:
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        with pytest.raises(RuntimeError):
            part.module(torch.randn(4, 3, dtype=torch.float64))
        assert region.depth == 0
        assert not region.entered
        assert region.ranks is None
        assert isinstance(part.module.a.weight, nn.Parameter)
        same_as(module, part)

    on_ranks(body, module, plan)


def test_modules_inside_can_be_called_alone() -> None:
    # Outside of a split forward a block would be used as if it were the whole.
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        own: Any = part.module
        hidden = own.a(X)
        close(whole(hidden), module.a(X), "first")
        close(whole(own.b(own.act(hidden))), module(X), "second")

    on_ranks(body, module, plan)


def test_the_users_hooks_see_what_they_would_see_on_one_device() -> None:
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        seen: list[Any] = []
        part.module.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        part.module.register_forward_hook(lambda m, args, out: seen.append(out))
        part.module.register_forward_hook(lambda m, args, out: seen.append(out), prepend=True)
        part.module(X)
        assert all(type(value) is torch.Tensor for value in seen)
        assert len(seen) == 3
        assert isinstance(part.module.a.weight, nn.Parameter)

    on_ranks(body, module, plan)


def test_logits_leave_cut_and_sums_leave_whole() -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 10).double()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        logits = part.module(X)
        assert isinstance(logits, SplitTensor)
        assert logits.shape == (4, 10)
        assert logits.local.shape == (4, 5)

    on_ranks(body, head, choose(head, 2, (X,)))
    module, plan = mlp()
    on_ranks(
        lambda part, ranks: type(part.module(X)) is torch.Tensor or pytest.fail("a partial sum left"), module, plan
    )


def test_evaluated_again_and_again() -> None:
    # As LBFGS does: several closures per step.
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        for _ in range(3):
            same_as(module, part)

    on_ranks(body, module, plan)


# ---- copies


def test_a_copy_is_a_split_part_of_its_own() -> None:
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        other: Any = copy.deepcopy(part.module)
        with torch.no_grad():
            part.module.a.weight.zero_()
        close(whole(other(X)), module(X), "the copy")
        assert other.a.weight is not part.module.a.weight
        assert isinstance(other.a(X), SplitTensor)

    on_ranks(body, module, plan)


def test_a_copy_of_something_around_or_inside() -> None:
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        around, inside = copy.deepcopy(nn.Sequential(part.module)), copy.deepcopy(part.module.a)
        close(whole(around(X)), module(X), "around")
        close(whole(inside(X)), module.a(X), "inside")

    on_ranks(body, module, plan)


def test_saved_states_are_plain_and_modules_of_blocks_are_not_saved() -> None:
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        file = io.BytesIO()
        torch.save(part.module.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file)
        assert {name: type(value) for name, value in loaded.items()} == dict.fromkeys(loaded, torch.Tensor)
        with pytest.raises(StateError, match=r"epl\.full_state_dict"):
            pickle.dumps(part.module)

    on_ranks(body, module, plan)


# ---- looking at it whole


def test_shown_whole() -> None:
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        with as_whole(part):
            shapes = {name: tuple(p.shape) for name, p in part.module.named_parameters()}
            assert part.module.a.weight.is_meta
            assert isinstance(part.module.a.weight, nn.Parameter)
        assert shapes == {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert part.module.a.weight.shape == (8, 8)
        assert not part.module.a.weight.is_meta
        assert not ranks.calls
        same_as(module, part)

    on_ranks(body, module, plan)


def test_under_a_fake_mode_nothing_is_sent() -> None:
    module, plan = mlp()

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        with _torch.fake_mode():
            out = part.module(torch.empty(3, 8, dtype=torch.float64))
        assert _torch.is_fake(out)
        assert out.shape == (3, 8)
        assert not ranks.calls

    on_ranks(body, module, plan)


# ---- giving it back


def test_undone_it_is_what_it_was() -> None:
    module, plan = mlp()

    def body(ranks: ThreadRanks) -> None:
        own = copy.deepcopy(module)
        before = list(own.parameters())
        part = SplitPart(own, plan, ranks)
        whole(own(X)).sum().backward()
        part.undo()
        assert "forward" not in own.__dict__
        assert type(own.a._parameters) is dict
        assert all(p is q for p, q in zip(own.parameters(), before, strict=True))
        reference = copy.deepcopy(module)
        reference(X).sum().backward()
        for p, q in zip(own.parameters(), reference.parameters(), strict=True):
            close(p.detach(), q.detach(), "weight")
            close(p.grad, q.grad, "gradient")
            assert layout_of(p) is None
        close(own(X), reference(X), "output")

    run_threads(body, 2)


def test_torch_is_itself_again_when_the_last_part_is_gone() -> None:
    from torch.utils import checkpoint

    module, plan = mlp()
    gc.collect()
    before = checkpoint.__dict__.copy(), nn.TransformerEncoder.forward
    on_ranks(lambda part, ranks: checkpoint.__dict__ != before[0] or pytest.fail("nothing was installed"), module, plan)
    run_threads(lambda ranks: SplitPart(copy.deepcopy(module), plan, ranks).plan, 2)  # forgotten, not undone
    gc.collect()
    assert (checkpoint.__dict__, nn.TransformerEncoder.forward) == before


def test_a_plan_for_something_else_is_refused() -> None:
    module, plan = mlp()
    ranks = run_threads(lambda ranks: ranks, 3)[0]
    with pytest.raises(SplitError, match="a plan for 2 ranks cannot be carried out on 3"):
        SplitPart(copy.deepcopy(module), plan, ranks)
    ranks = run_threads(lambda ranks: ranks, 2)[0]
    with pytest.raises(SplitError, match=r"a.weight of shape \(16, 8\); the module has \(12, 8\)"):
        SplitPart(MLP(8, 12), plan, ranks)


# ---- settings


class Block(nn.Module):
    def __init__(self, d: int = 32, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> Any:
        b, t, _ = x.shape
        y = self.n1(x)
        q, k, v = (f(y).view(b, t, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def test_sequence_parallel() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block()).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)

    def body(part: SplitPart, ranks: ThreadRanks) -> None:
        out = part.module(x.clone().requires_grad_())
        assert isinstance(out, SplitTensor)
        assert out.place == 1
        assert out.local.shape[1] in (3, 4)
        same_as(module, part, x)

    on_ranks(body, module, choose(module, 2, (x.clone().requires_grad_(),)), sequence_parallel=True)
