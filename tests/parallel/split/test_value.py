"""Split values: how they look, what raises, who gets which gradient, what happens to them in place."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional as F

from epl import _torch
from epl.errors import SplitError
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, enter, partial, recut, shard, take, whole
from epl.plan.split.cut import Axis, Cut
from epl.report import log
from tests.parallel.split.compare import compare, even
from tests.parallel.split.threads import run_threads

CUT = Cut(Axis("features", 5, 2))
X = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _cut(ranks, learns: bool = False) -> SplitTensor:
    return shard(CUT.take(X, 1, ranks.rank).clone().requires_grad_(learns), 1, CUT, ranks)


def test_it_looks_whole_and_asking_sends_nothing():
    def run(ranks):
        value = _cut(ranks, learns=True)
        assert value.shape == (3, 5)
        assert (value.ndim, value.dim(), value.numel(), len(value)) == (2, 2, 15, 3)
        assert value.size(-1) == 5
        assert value.dtype is torch.float64
        assert value.requires_grad
        assert value.is_leaf
        assert torch.is_floating_point(value)
        assert value.stride() == (5, 1)
        assert torch.result_type(value, 1.0) is torch.float64
        assert "dim 1" in repr(value)
        assert f"{value}" == str(value) == repr(value)
        assert ranks.calls == []

    run_threads(run, 2)


def test_what_is_below_torch_functions_raises():
    def run(ranks):
        with _torch.no_tensor_subclass(), pytest.raises(SplitError, match=r"epl\.whole"):
            torch.sin(_cut(ranks))

    run_threads(run, 2)


def test_a_function_without_a_rule_gathers_with_a_notice(caplog):
    caplog.set_level("INFO")

    def run(ranks):
        return torch.linalg.svdvals(_cut(ranks)), ranks.calls

    for values, calls in run_threads(run, 2):
        assert torch.allclose(values, torch.linalg.svdvals(X))
        assert calls == ["all-gather"]


def test_a_sequence_that_grows_is_told_of_once(caplog, monkeypatch):
    # Every step of a generate loop said it again, with one more place in the shape.
    caplog.set_level("INFO")
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log.logger, "propagate", True)

    def run(ranks):
        for rows in (1, 2, 3):
            torch.linalg.svdvals(shard(CUT.take(X[:rows], 1, ranks.rank).clone(), 1, CUT, ranks))

    run_threads(run, 2)
    assert caplog.text.count("svdvals has no rule") == 1


def test_reading_a_value_gathers():
    def run(ranks):
        value = _cut(ranks)
        assert value.sum().item() == pytest.approx(float(X.sum()))
        assert float(value[0, 4]) == float(X[0, 4])
        assert value.tolist() == X.tolist()
        assert bool((value < 99).all())
        assert (value.numpy() == X.numpy()).all()

    run_threads(run, 2)


def test_recut_there_and_back_is_the_identity_with_its_gradient():
    rows = Cut(Axis("rows", 3, 2, (1, 2)))

    def program(x):
        if not isinstance(x, SplitTensor):
            return x * 2
        turned = recut(x, 0, rows)
        assert turned.place == 0
        assert turned.local.shape == (rows.length(x.ranks.rank), 5)
        return recut(turned, 1, CUT) * 2

    ranks = compare(program, [X], [(1, CUT)], 2)
    assert ranks[0].calls.count("all-to-all") == 4


def test_a_whole_value_enters_once_while_a_part_runs():
    def run(ranks):
        region.depth, region.entered = 1, {}
        x = X.clone().requires_grad_()
        assert enter(x, ranks) is enter(x, ranks)
        with torch.no_grad():
            x.add_(1)
        assert enter(x, ranks) is not enter(x.detach().requires_grad_(), ranks)
        region.depth, region.entered = 0, {}
        assert enter(x, ranks) is not enter(x, ranks)

    run_threads(run, 2)


def test_partial_sums_are_summed_once_and_only_when_asked():
    def run(ranks):
        value = partial(X.clone(), ranks, True)
        other = value + torch.ones(5, dtype=torch.float64)
        last = other + other
        assert ranks.calls == []
        assert torch.equal(whole(value), X * 2)
        assert torch.equal(whole(other), X * 2 + 1)
        assert ranks.calls == ["all-reduce"]
        return whole(last)

    for found in run_threads(run, 2):
        assert torch.allclose(found, X * 4 + 2)


def test_a_sum_may_be_changed_in_place_by_whoever_gets_it():
    # The sum was a view made inside an autograd function; torch forbids changing such a view in place.
    def program(x):
        x = whole(x * 1)
        x += 1
        return x

    compare(program, [X], ["sum"], 2)


def test_changing_one_sum_leaves_those_made_from_it_alone():
    def program(x):
        y = x + torch.ones(5, dtype=torch.float64)
        F.relu(x, inplace=True)
        return x, y

    compare(program, [X], ["sum"], 2)


def test_a_term_changed_before_the_sum_is_made_is_refused():
    def run(ranks):
        term = torch.ones(3, 5, dtype=torch.float64)
        value = partial(X.clone(), ranks) + term
        term.add_(1)
        with pytest.raises(SplitError, match="out of place"):
            whole(value)

    run_threads(run, 2)


def test_a_gathered_view_changes_its_base():
    def program(x):
        x = x * 1
        row = x[1]
        row.mul_(3)
        x[:, 4].zero_()
        x.diagonal().add_(1)
        return x, x.sum(0)

    for layout in (None, "sum", (0, even(3, 2)), (1, CUT)):
        compare(program, [X], [layout], 2)


def test_writing_into_split_values_by_out_is_refused():
    def run(ranks):
        with pytest.raises(SplitError):
            torch.add(X, 1, out=_cut(ranks))
        with pytest.raises(SplitError):
            partial(X.clone(), ranks).data = X
        with pytest.raises(SplitError):
            _cut(ranks).data = X[:1]

    run_threads(run, 2)


def test_data_that_is_set_is_this_ranks_block():
    def run(ranks):
        value = _cut(ranks, learns=True)
        value.data = 2 * X
        first = whole(value.detach().clone())
        value.data = value.data * 2
        return first, whole(value.detach())

    for first, second in run_threads(run, 2):
        assert torch.equal(first, 2 * X)
        assert torch.equal(second, 4 * X)


@pytest.mark.parametrize("layout", ["sum", (0, even(3, 2)), (1, CUT)])
def test_another_shape_in_place_is_refused(layout):
    # A sum kept its old shape, a block ended in "start (3) + length (3) exceeds dimension size".
    with pytest.raises(SplitError, match=r"unsqueeze_ would give .* assign the result of unsqueeze"):
        compare(lambda x: x.unsqueeze_(0), [X], [layout], 2)


def test_gradients_of_gradients():
    def program(x, w):
        (found,) = torch.autograd.grad(F.linear(x, w).tanh().sum(), w, create_graph=True)
        return found.square()

    for layout in ((0, even(4, 2)), (1, even(5, 2))):
        compare(program, [X, torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)], [None, layout], 2)


TARGETS = torch.tensor([0, 3, 1])
OVER_CLASSES = {
    "cross_entropy": lambda logits: F.cross_entropy(logits, TARGETS, reduction="none", label_smoothing=0.1),
    "soft targets": lambda logits: F.cross_entropy(logits, F.one_hot(TARGETS, 4) * 0.9, reduction="none"),
    "softmax": lambda logits: (logits.softmax(1) * torch.arange(4)).square().sum(1),
    "log_softmax": lambda logits: logits.log_softmax(1).square().sum(1),
    "norm": lambda logits: logits.norm(dim=1),
}


@pytest.mark.parametrize("name", OVER_CLASSES)
def test_gradients_of_gradients_over_classes(name):
    # Their backward read what was neither an argument nor a result of theirs, or was made once only: a penalty on gradients lost, in
    # silence, all that it has to do with the logits.
    def program(x, w):
        (found,) = torch.autograd.grad(OVER_CLASSES[name](F.linear(x, w)).sum(), x, create_graph=True)
        return found.square()

    for ways in (2, 3):
        compare(
            program, [X, torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)], [None, (0, even(4, ways))], ways
        )


def test_taking_a_block_joins_its_gradient():
    def run(ranks):
        x = X.clone().requires_grad_()
        (take(x, 1, CUT, ranks) * (ranks.rank + 1)).sum().backward()
        return x.grad

    for gradient in run_threads(run, 2):
        assert gradient[0].tolist() == [1, 1, 1, 2, 2]


def test_ranks_in_different_collectives_fail_instead_of_waiting():
    def run(ranks):
        if ranks.rank:
            whole(_cut(ranks))
        else:
            whole(partial(X.clone(), ranks))

    with pytest.raises(AssertionError, match="different collectives"):
        run_threads(run, 2)
    with pytest.raises(AssertionError, match="in vain"):
        run_threads(lambda ranks: ranks.rank and whole(_cut(ranks)), 2, deadline=0.2)
    assert threading.active_count() < 10
