"""Collections on ranks: the merged values are those of one device on the global batch, whatever the layout."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import epl
from epl.errors import UsageError
from epl.graph.collections import listener
from epl.train import collected
from tests.harness import rank_errors, run_ranks

K = epl.GraphKeys
ROWS, MICRO = 17, 2


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    if epl.Env._current is not None:
        epl.Env._current.close()
        epl.Env._current = None
    collected._process.forget()


class Part(nn.Module):
    """Adds its values whenever it runs: per micro batch, on the rank of its stage."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        y = torch.tanh(self.layer(x))
        epl.add_to_collection(y.mean(), K.GLOBAL_MEAN_OBJECTS)
        epl.add_to_collection(K.GLOBAL_SUM_OBJECTS, [y.sum(0), (y > 0).sum()])
        epl.add_to_collection(y[:, 0], K.GLOBAL_CONCAT_OBJECTS)
        epl.add_to_collection(y.square().mean(0), K.LOCAL_MEAN_OBJECTS)
        epl.add_to_collection(y, K.LOCAL_CONCAT_OBJECTS)
        return y


class Net(nn.Module):
    """Adds in its glue too: before a module (per micro batch) and after the last one (of the whole batch)."""

    def __init__(self, widths):
        super().__init__()
        self.first, self.second = Part(), Part()
        if widths:
            for number, (part, width) in enumerate(zip((self.first, self.second), widths, strict=True)):
                kind = epl.split if width == "split" else epl.replicate
                epl.annotate(kind(2 if width == "split" else width, name=f"stage_{number}"), part)

    def forward(self, x):
        h = self.first(x) * 2
        epl.add_to_collection(h.sum(), K.GLOBAL_SUM_OBJECTS)
        epl.add_to_collection(h.mean(1), K.LOCAL_CONCAT_OBJECTS)
        y = self.second(h) + x
        epl.add_to_collection(y.mean(), K.LOCAL_MEAN_OBJECTS)
        epl.add_to_collection(y, K.GLOBAL_CONCAT_OBJECTS)
        return y


def _train(micro_batches: int, widths: tuple[int, ...], batch: int):
    """The values of every step, by collection."""
    together = {"cluster.colocate_split_and_replicate": widths == ("split", "split")}
    epl.init(epl.Config({"pipeline.num_micro_batch": micro_batches, "communication.timeout": 30, **together}))
    torch.manual_seed(0)
    model = Net(widths).double()
    if not widths:
        epl.annotate(epl.replicate(1), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(ROWS, 3, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.flip(0)), batch_size=batch)
    model, optimizer, loader = epl.parallelize(model, optimizer, loader)
    steps = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        rows = (model(inputs) - targets).square().sum(1)
        loss = rows.mean()
        epl.add_to_collection(loss, K.GLOBAL_MEAN_OBJECTS)
        epl.add_to_collection(rows, K.GLOBAL_CONCAT_OBJECTS)
        loss.backward()
        epl.add_to_collection(rows.sum(), K.GLOBAL_SUM_OBJECTS)
        epl.add_to_collection(targets, K.LOCAL_CONCAT_OBJECTS)  # a real tensor
        optimizer.step()
        found = {key.value: epl.get_collection(key) for key in K}
        again = {key.value: epl.get_collection(key) for key in K}
        assert all(torch.equal(a, b) for key in K for a, b in zip(found[key], again[key], strict=True))
        steps.append(found)
    return steps


@functools.cache
def _reference(batch: int):
    """One device without micro batches: every object is added once, and nothing is merged."""
    return _train(1, (), batch)


LAYOUTS = [
    # ranks, micro batches, widths of the stages
    pytest.param(1, 3, (), id="1 rank, 3 micro batches"),
    pytest.param(2, 1, (), id="2 replicas"),
    pytest.param(3, 1, (), id="3 replicas"),
    pytest.param(3, 2, (), id="3 replicas, 2 micro batches"),
    pytest.param(2, 3, (1, 1), id="2 stages"),
    pytest.param(4, 2, (1, 1), id="2 replicas of 2 stages"),
    pytest.param(3, 2, (2, 1), id="stages of unequal width"),
    pytest.param(3, 2, (1, "split"), id="a split stage"),  # its ranks all have all rows: each was counted
    pytest.param(2, 2, ("split", "split"), id="split, 2 micro batches"),
]


@pytest.mark.parametrize(("ranks", "micro_batches", "widths"), LAYOUTS)
def test_values_are_those_of_one_device(ranks, micro_batches, widths):
    """17 rows over steps of 4 to 12: the last step is uneven between replicas and micro batches."""
    replicas = 1 if "split" in widths else ranks // (sum(widths) or 1)
    expected = _reference(MICRO * micro_batches * replicas)
    found = run_ranks(_train, ranks, micro_batches, widths, MICRO)
    for step, want in enumerate(expected):
        for key in K:
            name = f"step {step}, {key.value}"
            for rank in range(ranks):
                assert len(found[rank][step][key]) == len(want[key]), name
            if key.is_global or replicas == 1:
                for rank in range(ranks):
                    _compare(found[rank][step][key], want[key], f"{name}, rank {rank}")
            elif key.how == "CONCAT":  # of all replicas, one after the other, they are the global batch
                local = [found[r * (ranks // replicas)][step][key] for r in range(replicas)]
                joined = [torch.cat(parts) for parts in zip(*local, strict=True)]
                # In the last step a replica may have no row of its own: its loop sees one that is another's.
                _compare([t[: len(w)] for t, w in zip(joined, want[key], strict=True)], want[key], name)


def _compare(found, expected, name):
    assert len(found) == len(expected), name
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape, f"{name}, object {number}"
        assert not a.requires_grad
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")


def test_the_reference_itself():
    steps = _reference(MICRO)
    x = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert [len(s) for s in steps[0].values()] == [4, 3, 6, 4, 3, 0]
    for found in steps:
        first, second = found[K.LOCAL_CONCAT_OBJECTS][0], found[K.LOCAL_CONCAT_OBJECTS][2]
        assert torch.equal(found[K.GLOBAL_MEAN_OBJECTS][0], first.mean())
        assert torch.equal(found[K.GLOBAL_SUM_OBJECTS][0], first.sum(0))
        assert found[K.GLOBAL_SUM_OBJECTS][1] == (first > 0).sum()
        assert torch.equal(found[K.GLOBAL_SUM_OBJECTS][2], (first * 2).sum())
        assert torch.equal(found[K.GLOBAL_CONCAT_OBJECTS][1], second[:, 0])
        torch.testing.assert_close(found[K.GLOBAL_MEAN_OBJECTS][2], found[K.GLOBAL_CONCAT_OBJECTS][3].mean())
    assert x.shape[0] == sum(len(found[K.GLOBAL_CONCAT_OBJECTS][0]) for found in steps)


# ---- plainly ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("initialized", [False, True])
def test_on_one_process(initialized):
    if initialized:
        epl.init()
    epl.add_to_collection(torch.tensor(2.0, requires_grad=True), K.GLOBAL_MEAN_OBJECTS)
    epl.add_to_collection("GLOBAL_MEAN_OBJECTS", torch.tensor([1, 2]))
    epl.add_to_collection(torch.tensor(3.0), K.LOCAL_CONCAT_OBJECTS)
    first, second = epl.get_collection(K.GLOBAL_MEAN_OBJECTS)
    assert (first.item(), first.requires_grad, second.tolist()) == (2.0, False, [1.0, 2.0])
    assert epl.get_collection("LOCAL_CONCAT_OBJECTS")[0].tolist() == [3.0]
    assert epl.get_collection(K.LOCAL_SUM_OBJECTS) == []


def test_a_value_is_taken_as_it_is_when_it_is_added():
    total = torch.ones(2)
    epl.add_to_collection(total, K.LOCAL_SUM_OBJECTS)
    total += 1
    epl.get_collection(K.LOCAL_SUM_OBJECTS)[0].zero_()
    assert epl.get_collection(K.LOCAL_SUM_OBJECTS)[0].tolist() == [1.0, 1.0]


def test_an_optimizer_step_begins_anew():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(3):
        weight.grad = torch.ones(2)
        epl.add_to_collection(torch.tensor(step), K.LOCAL_SUM_OBJECTS)
        optimizer.step()
        assert [v.item() for v in epl.get_collection(K.LOCAL_SUM_OBJECTS)] == [step]


def test_another_batch_begins_anew():
    epl.init()
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=1)
    epl.parallelize(nn.Linear(1, 1), loader)
    for (x,) in loader:  # an evaluation: no optimizer
        epl.add_to_collection(x, K.GLOBAL_CONCAT_OBJECTS)
        assert [v.tolist() for v in epl.get_collection(K.GLOBAL_CONCAT_OBJECTS)] == [x.tolist()]
    assert epl.get_collection(K.GLOBAL_CONCAT_OBJECTS)[0].tolist() == [3.0]


def test_init_forgets():
    epl.init()
    epl.add_to_collection(torch.ones(1), K.LOCAL_SUM_OBJECTS)
    epl.init()
    assert epl.get_collection(K.LOCAL_SUM_OBJECTS) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_is_computed_again_adds_once(reentrant):
    part = Part()
    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(part, x, use_reentrant=reentrant).sum().backward()
    assert len(epl.get_collection(K.GLOBAL_MEAN_OBJECTS)) == 1


def test_a_hook_may_add_during_backward():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: epl.add_to_collection(gradient, K.LOCAL_SUM_OBJECTS))
    y.sum().backward()
    assert epl.get_collection(K.LOCAL_SUM_OBJECTS)[0].tolist() == [1.0, 1.0]


def test_what_is_no_tensor_is_refused():
    with pytest.raises(UsageError, match="found float"):
        epl.add_to_collection(1.0, K.LOCAL_SUM_OBJECTS)
    with pytest.raises(UsageError, match="sparse"):
        epl.add_to_collection(torch.ones(2).to_sparse(), K.LOCAL_SUM_OBJECTS)
    with pytest.raises(UsageError, match="GLOBAL_CONCAT_OBJECTS"):
        epl.add_to_collection(torch.ones(2), "losses")
    with pytest.raises(UsageError, match="LOCAL_SUM_OBJECTS"):
        epl.get_collection("losses")
    assert listener() is None


# ---- on ranks --------------------------------------------------------------------------------------------------------


def _evaluate():
    """Values of an evaluation, and of a training step of which some are read before backward."""
    epl.init(epl.Config({"pipeline.num_micro_batch": 2, "communication.timeout": 30}))
    torch.manual_seed(0)
    model = Net((1, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epl.parallelize(model, optimizer)
    x = torch.randn(5, 3, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    before = epl.get_collection(K.GLOBAL_CONCAT_OBJECTS)
    optimizer.step()
    optimizer.zero_grad()
    loss = model(x).square().mean()
    epl.add_to_collection(loss, K.LOCAL_MEAN_OBJECTS)
    early = epl.get_collection(K.LOCAL_MEAN_OBJECTS)
    loss.backward()
    late = epl.get_collection(K.LOCAL_MEAN_OBJECTS)
    optimizer.step()
    concat = epl.get_collection(K.GLOBAL_CONCAT_OBJECTS)
    assert all(torch.equal(a, b) for a, b in zip(before, concat, strict=True))
    return [v.tolist() for v in early], [v.tolist() for v in late], loss.item()


def test_evaluation_and_values_read_before_backward():
    first, second = run_ranks(_evaluate, 2)
    assert first == second
    early, late, loss = first
    assert early[-1] == late[-1] == pytest.approx(loss)
    assert len(late) == 4  # two modules, the glue behind them, the loop
    assert early == late


def _own_stages():
    epl.init(epl.Config({"pipeline.num_micro_batch": 2, "communication.timeout": 30}))
    epl.setup_process_groups([("data", 2), ("pipe", 2)])
    rank = epl.Env.get().cluster.rank
    replica, stage = divmod(rank, 2)
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    rows = (3, 5)[replica]
    x = torch.arange(8.0).split((3, 5))[replica].view(rows, 1)

    def forward(received, x):
        y = weight(x if stage == 0 else received)
        epl.add_to_collection(y.mean(), K.GLOBAL_MEAN_OBJECTS)
        epl.add_to_collection(y[:, 0], K.LOCAL_CONCAT_OBJECTS)
        return y if stage == 0 else y.mean()

    losses = epl.forward_backward(forward, x, module=weight)
    epl.add_to_collection(losses, K.GLOBAL_CONCAT_OBJECTS)
    return [[v.tolist() for v in epl.get_collection(key)] for key in K]


def test_stages_of_ones_own():
    found = run_ranks(_own_stages, 4)
    for rank, (concat, mean, _, local, *_) in enumerate(found):
        assert concat == [[0.5, 2.0, 4.0, 6.5]]
        assert mean == [pytest.approx(3.5)] * 2  # of both stages, over 8 rows
        assert local == [[0.0, 1.0, 2.0] if rank < 2 else [3.0, 4.0, 5.0, 6.0, 7.0]] * 2


def _one_rank_adds():
    epl.init(epl.Config({"communication.timeout": 20}))
    if epl.Env.get().cluster.rank == 0:
        epl.add_to_collection(torch.ones(1), K.GLOBAL_SUM_OBJECTS)
    epl.get_collection(K.GLOBAL_SUM_OBJECTS)


def _one_rank_reads():
    epl.init(epl.Config({"communication.timeout": 20}))
    epl.add_to_collection(torch.ones(1), K.GLOBAL_SUM_OBJECTS)
    if epl.Env.get().cluster.rank == 0:
        epl.get_collection(K.GLOBAL_SUM_OBJECTS)
    epl.global_sum(1.0)


def _one_rank_reads_its_own():
    epl.init(epl.Config({"communication.timeout": 20}))
    epl.set_default_strategy(epl.replicate(1))
    epl.parallelize(nn.Linear(1, 1))
    epl.add_to_collection(torch.ones(1), K.LOCAL_SUM_OBJECTS)
    if epl.Env.get().cluster.rank == 0:
        return epl.get_collection(K.LOCAL_SUM_OBJECTS)[0].tolist()
    return [1.0]


def test_ranks_that_part_ways_are_told():
    for error in rank_errors(_one_rank_adds, 2):
        assert error is not None
        assert error[0] == "UsageError"
        assert "not under `if rank == 0:`" in error[1]
    for error in rank_errors(_one_rank_reads, 2):
        assert error is not None
        assert error[0] == "RanksDisagreeError"
    assert run_ranks(_one_rank_reads_its_own, 2) == [[1.0], [1.0]]  # nothing to merge with others: one may read alone


class Choosy(nn.Module):
    """Adds something only if a value of the micro batch says so."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        if (x > 2).any():
            epl.add_to_collection(x.sum(), K.LOCAL_SUM_OBJECTS)
        return self.layer(x)


def test_what_is_added_in_some_micro_batches_only_is_refused():
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    model = nn.Sequential(Choosy())
    epl.parallelize(model)
    model(torch.arange(4.0).view(4, 1)).sum().backward()
    with pytest.raises(UsageError, match="2 of 4 rows"):
        epl.get_collection(K.LOCAL_SUM_OBJECTS)


def _empty_ones():
    epl.init(epl.Config({"communication.timeout": 20}))
    rank = epl.Env.get().cluster.rank
    epl.add_to_collection(torch.empty(0, 2), K.GLOBAL_CONCAT_OBJECTS)
    before = [v.shape for v in epl.get_collection(K.GLOBAL_CONCAT_OBJECTS)]
    epl.add_to_collection(torch.full((rank, 2), rank, dtype=torch.float16), K.GLOBAL_CONCAT_OBJECTS)
    return before, [v.tolist() for v in epl.get_collection(K.GLOBAL_CONCAT_OBJECTS)]


def test_empty_tensors():
    for before, after in run_ranks(_empty_ones, 3):
        assert before == [(0, 2)]
        assert after == [[], [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]]
