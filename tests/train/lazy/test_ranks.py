"""What the ranks of a replica know of each other's values: who has a number, who may read alone, and what happens if they part ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epl.errors import RanksDisagreeError
from epl.train.lazy import node_of
from tests.train.lazy.double import Double, Replica

X, Y = torch.linspace(-1, 1, 40 * 6).view(40, 6).sin(), torch.arange(40) % 3


def model(width: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width))


def on_ranks(loop, ranks=2):
    """`loop(rank, wrap)` on every rank."""
    replica = Replica(ranks)
    return replica.run(
        lambda rank: loop(rank, lambda m, micro_batches=4, home=None: Double(m, micro_batches, replica, rank, home))
    )


def test_small_values_reach_every_rank_at_the_end_of_backward():
    def loop(rank, wrap):
        M = wrap(model())
        loss = F.cross_entropy(M(X), Y)
        perplexity = loss.detach().exp()
        loss.backward()
        count = len(M.carrier.events)
        alone = (loss.item(), f"{perplexity:.3f}", (loss / 4).item()) if rank == 0 else ()  # nobody else is asked
        assert len(M.carrier.events) == count
        return alone, M.carrier.pushed

    (alone, pushed), (_, pushed_at_home) = on_ranks(loop)
    expected = F.cross_entropy(model()(X), Y)
    assert alone[0] == pytest.approx(expected.item(), rel=1e-6)
    assert alone[1] == f"{expected.exp():.3f}"
    assert pushed == pushed_at_home == [(), ()]


def test_large_values_stay_at_home_and_travel_when_all_ranks_read_them():
    def loop(rank, wrap):
        M = wrap(model(width=40))
        outputs = M(X)
        F.cross_entropy(outputs, Y).backward()
        node = node_of(outputs)
        before = node.done, node.everywhere, node.value is None
        numbers = outputs.detach().numpy().copy()
        return before, numbers, M.carrier.events

    (there, numbers, events), (at_home, _, _) = on_ranks(loop)
    assert there == (True, False, True)
    assert at_home == (True, False, False)
    assert numbers == pytest.approx(model(width=40)(X).detach().numpy(), rel=1e-5)
    assert events[-2:] == ["reading a value (numpy)", "share [40, 40]"]


@pytest.mark.parametrize(
    "alone",
    [
        pytest.param(lambda out, loss: out.sum().item(), id="reading logits"),
        pytest.param(lambda out, loss: print(f"{loss:.2f}"), id="printing the loss before backward"),
        pytest.param(lambda out, loss: out.softmax(-1), id="recording more than the others"),
    ],
)
def test_a_rank_that_does_something_alone_is_told_so_on_all_ranks(alone):
    def loop(rank, wrap):
        M = wrap(model(width=40))
        outputs = M(X)
        loss = F.cross_entropy(outputs, Y)
        if rank == 0:
            alone(outputs, loss)
        loss.backward()

    with pytest.raises(RanksDisagreeError, match="different places"):
        on_ranks(loop)


def test_reading_after_backward_alone_is_refused_for_large_values():
    def loop(rank, wrap):
        M = wrap(model(width=40))
        outputs = M(X)
        F.cross_entropy(outputs, Y).backward()
        if rank == 0:
            outputs.sum().item()
        M(X).sum().item()

    with pytest.raises(RanksDisagreeError, match="different places"):
        on_ranks(loop)


def test_a_value_kept_by_one_rank_alone_disturbs_nobody():
    """`if rank == 0: history.append(loss)`: what is pushed is what home still holds."""

    def loop(rank, wrap):
        net = model()
        M, history = wrap(net), []
        for i in range(3):
            loss = F.cross_entropy(M(X + i), Y)
            loss.backward()
            if rank == 0:
                history.append(loss)
        return [h.item() for h in history]

    history, _ = on_ranks(loop)
    assert history == pytest.approx([F.cross_entropy(model()(X + i), Y).item() for i in range(3)], rel=1e-6)


def gradients_on_ranks(loss_of, ranks=2, **double):
    """Every parameter's gradient, from the rank that has it, and the loss on every rank."""

    def loop(rank, wrap):
        net = model()
        M = wrap(net, **double)
        loss = loss_of(M, net)
        loss.backward()
        return loss.item(), [p.grad for p in net.parameters()], M.carrier.events

    results = on_ranks(loop, ranks)
    gradients = [next((g for g in some if g is not None), None) for some in zip(*(r[1] for r in results), strict=True)]
    return [r[0] for r in results], gradients, results[0][2]


def gradients_plainly(loss_of):
    net = model()
    loss = loss_of(net, net)
    loss.backward()
    return loss.item(), [p.grad for p in net.parameters()]


TERMS = {
    "all parameters": lambda net: 1e-2 * sum(p.pow(2).sum() for p in net.parameters()),
    "the first layer": lambda net: net[0].weight.norm(),
    "the last layer": lambda net: net[2].weight.abs().sum(),
    "parameters of two ranks multiplied": lambda net: (net[2].weight @ net[0].weight).pow(2).mean(),
    "an attribute and a function of one's own": lambda net: own(net[0].weight.T) + own(net[2].weight),
    "by stack": lambda net: torch.stack([p.norm() for p in net.parameters()]).norm(),
    "detached": lambda net: sum(p.detach().abs().mean() for p in net.parameters()) * net[2].bias.sum(),
    "times a constant tensor": lambda net: (net[0].bias * torch.arange(8)).sum(),
}


def own(w):
    return Doubled.apply(w).sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 7 * gradient  # only this backward gives it


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("whole", [False, True], ids=["scheduled", "whole batch"])
def test_terms_over_parameters_count_where_they_live(name, ranks, whole):
    def loss_of(M, net):
        loss = F.cross_entropy(M(X), Y) + TERMS[name](net)
        if whole:
            loss.item()
        return loss

    expected, expected_gradients = gradients_plainly(loss_of)
    found, gradients, events = gradients_on_ranks(loss_of, ranks)
    assert ("scheduled" in events) != whole
    assert found == pytest.approx([expected] * ranks, rel=1e-5)
    for a, b in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_ranks_exchange_nothing_for_a_term_over_homes_own_parameters():
    _, _, events = gradients_on_ranks(lambda M, net: F.cross_entropy(M(X), Y) + net[2].weight.pow(2).sum())
    assert "exchange" not in events


def test_a_term_with_a_weight_of_its_own_gives_it_the_same_gradient_on_every_rank():
    def loop(rank, wrap):
        net, factor = model(), nn.Parameter(torch.tensor(0.3))
        M = wrap(net)
        loss = F.cross_entropy(M(X), Y) + factor * sum(p.pow(2).sum() for p in net.parameters())
        loss.backward()
        return factor.grad.item()

    net = model()
    expected = sum(p.pow(2).sum() for p in net.parameters()).item()
    assert on_ranks(loop) == pytest.approx([expected] * 2, rel=1e-5)


def test_a_term_alone_is_differentiated_by_its_owner_or_refused():
    def loop(rank, wrap):
        net = model()
        wrap(net)
        net[0].weight.pow(2).sum().backward()
        return net[0].weight.grad

    there, here = on_ranks(loop)
    assert here is None
    torch.testing.assert_close(there, 2 * model()[0].weight.detach())

    def both(rank, wrap):
        net = model()
        wrap(net)
        sum(p.sum() for p in net.parameters()).backward()

    with pytest.raises(RuntimeError, match="add it to a loss that calls the model"):
        on_ranks(both)


@pytest.mark.parametrize("homes", [(1, 1), (0, 1)])
def test_two_models_in_one_loss(homes):
    """With different homes neither has all numbers: every rank computes the loop's code itself."""

    def loss_of(M, D, outer):
        return F.mse_loss(D(torch.tanh(M(X)) * outer), torch.ones(40, 3)) + M(X).pow(2).mean()

    def nets():
        a = model()
        torch.manual_seed(1)
        return a, nn.Linear(3, 3), nn.Parameter(torch.tensor(1.5))

    a, b, outer = nets()
    expected = loss_of(a, b, outer)
    expected.backward()

    def loop(rank, wrap):
        a, b, outer = nets()
        loss = loss_of(wrap(a, home=homes[0]), wrap(b, home=homes[1]), outer)
        loss.backward()
        return loss.item(), [p.grad for p in [*a.parameters(), *b.parameters(), outer]]

    for value, gradients in (found := on_ranks(loop)):
        assert value == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(gradients[-1], outer.grad)
    for i, p in enumerate([*a.parameters(), *b.parameters()]):
        gradient = next(g[i] for _, g in found if g[i] is not None)
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-7)


def test_outer_leaves_get_their_gradients_on_every_rank_and_hooks_run_once():
    def loop(rank, wrap):
        torch.manual_seed(1)
        head, embedding = nn.Linear(3, 3), nn.Embedding(3, 3, sparse=True)
        unused, seen = nn.Parameter(torch.ones(3)), []
        head.weight.register_hook(lambda g: seen.append(g.clone()))
        M = wrap(model())
        out = M(X)
        loss = F.cross_entropy(head(out), Y) + (out - embedding(Y)).pow(2).mean() + (unused * 0).detach().sum()
        loss.backward()
        return head.weight.grad, head.bias.grad, embedding.weight.grad, unused.grad, len(seen)

    torch.manual_seed(1)
    head, embedding = nn.Linear(3, 3), nn.Embedding(3, 3, sparse=True)
    out = model()(X)
    (F.cross_entropy(head(out), Y) + (out - embedding(Y)).pow(2).mean()).backward()
    for weight, bias, table, unused, times in on_ranks(loop):
        torch.testing.assert_close(weight, head.weight.grad)
        torch.testing.assert_close(bias, head.bias.grad)
        assert table.is_sparse
        torch.testing.assert_close(table.to_dense(), embedding.weight.grad.to_dense())
        assert unused is None
        assert times == 1


@pytest.mark.parametrize("whole", [False, True], ids=["scheduled", "whole batch"])
def test_a_term_over_several_steps(whole):
    """Another rank's parameter is one node for ever: a backward must not use it up."""

    def steps(net, M):
        optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(M(X), Y) + 1e-2 * sum(p.pow(2).sum() for p in net.parameters())
            loss = loss.sqrt() if whole else loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def loop(rank, wrap):
        net = model()
        return steps(net, wrap(net))

    net = model()
    expected = steps(net, net)
    for found in on_ranks(loop):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_teacher_takes_no_part_in_the_backward():
    """Nothing of it is differentiated: its gradients must not be handed over, or reduced over replicas, either."""
    ended = []

    def loop(rank, wrap):
        M, T = wrap(model()), wrap(model())
        T.carrier.end_backward = lambda extra: ended.append(rank)
        loss = F.mse_loss(M(X), T(X * 2).detach())
        loss.backward()
        return T.carrier.events

    for events in on_ranks(loop):
        assert "forward" in events
    assert ended == []
