"""The reducer alone, against one process that computes what the ranks computed together."""

from __future__ import annotations

import copy
import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import epl
from epl.parallel import GradientReducer, ReducePolicy
from epl.parallel.bucket import SMALLEST, divide
from tests.harness import run_ranks


class Net(nn.Module):
    """Parts that may be unused, frozen, shared, complex, of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.double()
        self.single = nn.Parameter(torch.randn(5, dtype=torch.float32))
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x, use_second=True, reentrant=None):
        h = self.first(x).tanh()
        if reentrant is not None:
            h = checkpoint(self.second, h, use_reentrant=reentrant).tanh()
            h = checkpoint(self.second, h, use_reentrant=reentrant)
        elif use_second:
            h = self.second(h)
        return h * self.single + (h * self.turn).abs()


def _net() -> Net:
    torch.manual_seed(3)
    return Net()


def _rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def _reference(ranks: int, method: str, passes) -> dict[str, torch.Tensor | None]:
    """Gradients of one process that runs every rank's backward passes on copies and adds them up."""
    nets = [_net() for _ in range(ranks)]
    for rank, net in enumerate(nets):
        for step, kwargs in passes(rank):
            net(_rows(rank, step), **kwargs).sum().backward()
    result = {}
    for name, _ in nets[0].named_parameters():
        held = [g for g in (net.get_parameter(name).grad for net in nets) if g is not None]
        result[name] = sum(held) / (1 if method == "sum" else ranks) if held else None
    return result


def _gradients(net: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad.clone() if p.grad is not None else None for name, p in net.named_parameters()}


def _compare(found, expected, tolerance=1e-12) -> None:
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            tol = 1e-5 if gradient.dtype == torch.float32 else tolerance
            torch.testing.assert_close(found[name], gradient, rtol=tol, atol=tol)


PASSES = {
    "plain": lambda rank: [(0, {})],
    "two backwards": lambda rank: [(0, {}), (1, {})],
    "unused everywhere": lambda rank: [(0, {"use_second": False})],
    "unused on rank 0": lambda rank: [(0, {"use_second": rank != 0})],
    "reentrant checkpoint": lambda rank: [(0, {"reentrant": True}), (1, {"reentrant": True})],
    "checkpoint": lambda rank: [(0, {"reentrant": False})],
}


def _run(name: str, method: str, no_sync_first: bool, max_splits: int, communicators: int):
    dist.init_process_group("gloo")
    net = _net()
    lanes = [dist.new_group() for _ in range(communicators - 1)]
    reducer = GradientReducer(net, policy=ReducePolicy(method=method, max_splits=max_splits), communicators=lanes)
    results = []
    for _ in range(2):  # twice: buckets are laid out anew after the first time
        net.zero_grad()
        passes = PASSES[name](dist.get_rank())
        for index, (step, kwargs) in enumerate(passes):
            context = reducer.no_sync if no_sync_first and index < len(passes) - 1 else torch.enable_grad
            with context():
                net(_rows(dist.get_rank(), step), **kwargs).sum().backward()
        results.append(_gradients(net))
    return results


@pytest.mark.parametrize("method", ["mean", "sum"])
@pytest.mark.parametrize(
    ("name", "no_sync_first"),
    [(n, False) for n in PASSES] + [(n, True) for n in PASSES if len(PASSES[n](0)) > 1],
)
def test_gradients(name, method, no_sync_first):
    expected = _reference(3, method, PASSES[name])
    for rank_results in run_ranks(_run, 3, name, method, no_sync_first, 5, 2):
        for found in rank_results:
            _compare(found, expected)


def _many_buckets():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)]).double()
    plain = copy.deepcopy(net)
    reducer = GradientReducer(net, policy=ReducePolicy(max_splits=4), communicators=[dist.new_group()])
    x = torch.randn(4, 2, 300, dtype=torch.float64)
    for _ in range(3):
        net.zero_grad()
        net(x[dist.get_rank()]).mean().backward()
    plain(x.view(-1, 300)).mean().backward()
    _compare(_gradients(net), _gradients(plain))
    return len(reducer._buckets)


def test_several_buckets_on_several_communicators():
    assert run_ranks(_many_buckets, 4) == [4] * 4


def _two_losses_apart():
    """Each backward pass touches half of the buckets; the other half must not travel, and stays right."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(400, 400), nn.Linear(400, 400)]).double()
    plain = copy.deepcopy(net)
    GradientReducer(net, policy=ReducePolicy(max_splits=2))
    x = torch.randn(2, 3, 400, dtype=torch.float64)
    for _ in range(2):
        net.zero_grad()
        for layer in net:
            layer(x[dist.get_rank()]).mean().backward()
    for layer in plain:
        layer(x.view(-1, 400)).mean().backward()
    _compare(_gradients(net), _gradients(plain))


def test_two_losses_that_touch_different_parts():
    run_ranks(_two_losses_apart, 2)


def _freeze_and_grow():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    net[0].requires_grad_(False)
    reducer = GradientReducer(net)
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    rank = dist.get_rank()

    def check() -> None:
        plain = copy.deepcopy(net)
        net.zero_grad()
        plain.zero_grad()
        net(x[rank]).mean().backward()
        torch.nn.Sequential.forward(plain, x.view(-1, 3)).mean().backward()
        _compare(_gradients(net), _gradients(plain))

    check()
    net[0].requires_grad_(True)
    check()
    net[1].requires_grad_(False)
    check()
    net.append(nn.Linear(3, 3).double())
    torch.nn.init.constant_(net[2].weight, 0.5)
    torch.nn.init.constant_(net[2].bias, 0.5)
    check()
    net.float()
    net.double()
    check()
    reducer.close()
    net.zero_grad()
    net(x[rank]).mean().backward()
    return net[2].weight.grad


def test_frozen_unfrozen_added_and_cast_parameters():
    first, second = run_ranks(_freeze_and_grow, 2)
    assert not torch.equal(first, second)  # closed: each rank has its own again


def _sparse(functional: bool, as_dense: bool, tied: bool):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 4, sparse=not functional)
            self.out = nn.Linear(4, 20)
            if tied:
                self.out.weight = self.table.weight

        def forward(self, ids):
            h = nn.functional.embedding(ids, self.table.weight, sparse=True) if functional else self.table(ids)
            return self.out(h)

    net = Words().double()
    plain = copy.deepcopy(net)
    GradientReducer(net, policy=ReducePolicy(sparse_as_dense=as_dense))
    ids = torch.tensor([[1, 1, 5], [5, 7, 1]])
    for _ in range(2):
        net.zero_grad()
        for _ in range(2):
            (net(ids[rank]).square().mean()).backward()
    for _ in range(2):
        (plain(ids.view(-1)).square().mean()).backward()
    found, expected = net.table.weight.grad, plain.table.weight.grad
    assert found.is_sparse == (expected.is_sparse and not as_dense)
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
    torch.testing.assert_close(net.out.bias.grad, plain.out.bias.grad)


@pytest.mark.parametrize(
    ("functional", "as_dense", "tied"),
    [c for c in itertools.product([False, True], repeat=3) if c != (True, True, True)],
)
def test_sparse_gradients(functional, as_dense, tied):
    run_ranks(_sparse, 2, functional, as_dense, tied)


def _hooks_see_own_gradient():
    dist.init_process_group("gloo")
    net = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(net.weight)
    seen = []
    net.weight.register_hook(lambda g: seen.append(g.clone()))
    GradientReducer(net, policy=ReducePolicy(method="sum"))
    net.weight.register_hook(lambda g: seen.append(g.clone()))
    net(torch.full((1, 2), dist.get_rank() + 1.0, dtype=torch.float64)).sum().backward()
    return seen, net.weight.grad


def test_the_users_hooks_run_once_on_this_ranks_gradient():
    for rank, (seen, gradient) in enumerate(run_ranks(_hooks_see_own_gradient, 2)):
        assert [s.tolist() for s in seen] == [[[rank + 1.0] * 2]] * 2
        assert gradient.tolist() == [[3.0, 3.0]]


def _fp16():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Linear(30, 30)
    plain = copy.deepcopy(net)
    GradientReducer(net, policy=ReducePolicy(fp16=True))
    x = torch.randn(2, 5, 30)
    net(x[dist.get_rank()]).square().mean().backward()
    plain(x.view(-1, 30)).square().mean().backward()
    difference = (net.weight.grad - plain.weight.grad).abs().max() / plain.weight.grad.abs().max()
    assert net.weight.grad.dtype == torch.float32
    return difference.item()


def test_fp16_communication_is_close_and_really_fp16():
    first, second = run_ranks(_fp16, 2)
    assert first == second
    assert 1e-6 < first < 2e-3


def _raises_then_goes_on():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    plain = copy.deepcopy(net)
    GradientReducer(net)
    x = torch.randn(2, 4, 3, dtype=torch.float64)

    def fail(gradient):
        raise ValueError("in the user's hook")

    handle = net[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="in the user's hook"):
        net(x[dist.get_rank()]).mean().backward()
    handle.remove()
    net.zero_grad()
    net(x[dist.get_rank()]).mean().backward()
    plain(x.view(-1, 3)).mean().backward()
    _compare(_gradients(net), _gradients(plain))


def test_a_backward_that_raised_leaves_no_trace():
    run_ranks(_raises_then_goes_on, 2)


def _buffers():
    dist.init_process_group("gloo")
    net = nn.BatchNorm1d(3).double()
    GradientReducer(net)
    for step in range(2):
        net(_rows(dist.get_rank(), step)[:, :3]).sum().backward()
    return net.running_mean, net.num_batches_tracked


def test_buffers_are_the_first_ranks():
    alone = nn.BatchNorm1d(3).double()
    for step in range(2):
        alone(_rows(0, step)[:, :3])
    for mean, count in run_ranks(_buffers, 3):
        torch.testing.assert_close(mean, alone.running_mean)
        assert count == 2


def _first_stands_still():
    dist.init_process_group("gloo")
    net = nn.BatchNorm1d(2).double()
    GradientReducer(net)
    net(torch.full((4, 2), float(dist.get_rank()), dtype=torch.float64)).sum().backward()
    return net.running_mean.tolist()


def test_buffers_that_moved_elsewhere_only_become_the_first_ranks_too():
    # What to send was once decided by the first rank alone, whose running mean of zeros had not moved.
    assert run_ranks(_first_stands_still, 2) == [[0.0, 0.0]] * 2


def _create_graph():
    dist.init_process_group("gloo")
    net = nn.Linear(2, 1)
    GradientReducer(net)
    net(torch.ones(1, 2)).square().sum().backward(create_graph=True)


def test_create_graph_is_refused():
    from tests.harness import rank_errors

    for error in rank_errors(_create_graph, 2):
        assert error is not None
        assert "torch.autograd.grad" in error[1]


def _by_hand(kind: str) -> tuple[list[str], list[torch.Tensor]]:
    """What was said in three steps of a loop, and the weights after them."""
    epl.init()
    said: list[str] = []
    logger = logging.getLogger("epl")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    net = _net()
    reducer = GradientReducer(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = net(_rows(epl.Env.get().cluster.rank, step)).pow(2).mean()
        if kind in ("autograd.grad", "averaged"):
            parameters = list(net.parameters())
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                if gradient is not None:
                    p.grad = epl.global_mean(gradient) if kind == "averaged" else gradient
        elif kind == "no_sync":
            with reducer.no_sync():
                loss.backward()
        else:
            loss.backward()
            for p in net.parameters():
                p.grad = None if p.grad is None else p.grad * 0.5
        optimizer.step()
        if kind == "twice":
            optimizer.step()
    logger.removeHandler(handler)
    reducer.close()
    return [text for text in said if "reduced over the 2 ranks" in text], [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["autograd.grad", "no_sync", "averaged", "replaced", "twice"])
def test_gradients_that_differ_from_rank_to_rank_are_not_used_in_silence(kind):
    # Gradients of autograd.grad are this rank's own: replicas that step with them drifted apart, and nobody said so.
    (said, weights), (other_said, other_weights) = run_ranks(_by_hand, 2, kind)
    drifts = kind in ("autograd.grad", "no_sync")
    assert len(said) == len(other_said) == drifts
    assert all(map(torch.equal, weights, other_weights)) != drifts
    assert not said or "epl.global_mean" in said[0]


def _words_between_buckets():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(600, 600) for _ in range(3)]).double()
    plain = copy.deepcopy(net)
    GradientReducer(net, policy=ReducePolicy(max_splits=3))
    x = torch.randn(2, 3, 600, dtype=torch.float64)
    rank = dist.get_rank()
    for step in range(3):
        net.zero_grad()
        loss = sum(layer(x[rank]).mean() for n, layer in enumerate(net) if rank == 0 or n != step)
        loss.backward()
        plain.zero_grad()
        (sum(layer(x[0]).mean() for layer in plain) / 2).backward()
        (sum(layer(x[1]).mean() for n, layer in enumerate(plain) if n != step) / 2).backward()
        _compare(_gradients(net), _gradients(plain))


def test_words_do_not_mix_with_buckets():
    # Words and buckets once shared a group: the rank with an unused layer spoke before its last bucket left, the other
    # after, and Gloo aborted both.
    run_ranks(_words_between_buckets, 2)


def test_divide_keeps_order_and_count():
    mib = SMALLEST
    assert divide([mib // 2] * 3, 5) == [3]
    assert divide([4 * mib] * 9, 5) == [2, 4, 6, 8, 9]
    for count in range(1, 12):
        for parts in range(1, 7):
            ends = divide([3 * mib] * count, parts)
            assert ends[-1] == count
            assert len(ends) == min(parts, count)
            assert ends == sorted(set(ends))


def _gradient_taken_away() -> str:
    epl.init()
    net = nn.Linear(2, 2)

    def take(parameter: torch.Tensor) -> None:
        parameter.grad = None

    net.weight.register_post_accumulate_grad_hook(take)
    GradientReducer(net, dist.group.WORLD)
    with pytest.raises(epl.errors.UsageError) as caught:
        net(torch.randn(3, 2)).sum().backward()
    return str(caught.value)


def test_a_hook_that_takes_the_gradient_away_is_refused():
    # An optimizer in backward whose hook came before the reducer's (parts under split are placed at the first call): an assertion failed.
    for said in run_ranks(_gradient_taken_away, 2):
        assert "the gradient of weight was gone before it was reduced over the 2 ranks" in said
        assert "Step after backward()" in said


def _without_parameters() -> None:
    epl.init()
    reducer = GradientReducer(nn.ReLU())
    reducer.finish()
    reducer.close()


def test_a_module_without_parameters_is_finished_at_once():
    # Split parameters that all stay whole leave their own reducer without any; it had never laid out buckets, and raised.
    run_ranks(_without_parameters, 1)


class Router(nn.Module):
    """Casts its own weights when it runs, as Switch Transformers' router does under another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gate.to(torch.float32)
        return self.gate(self.body(x).float())


def _cast_in_forward() -> list[torch.Tensor]:
    epl.init()
    torch.manual_seed(0)
    net = Router().double()
    GradientReducer(net)
    for step in range(2):
        net.zero_grad()
        net(_rows(dist.get_rank(), step)[:, :3]).sum().backward()
    return [p.grad for p in net.parameters()]  # type: ignore[misc]


def test_parameters_that_the_forward_casts() -> None:
    # The bucket was laid out for the dtype before: "attempting to assign a gradient with dtype 'double'".
    torch.manual_seed(0)
    net = Router().double()
    rows = torch.cat([_rows(rank, 1)[:, :3] for rank in range(2)])
    (net(rows).sum() / 2).backward()
    for found in run_ranks(_cast_in_forward, 2):
        for gradient, p in zip(found, net.parameters(), strict=True):
            assert gradient.dtype == p.dtype
            torch.testing.assert_close(gradient, p.grad)
