"""epl.parallelize: what it takes, gives back and refuses; metrics and state dicts."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import epl
from epl.errors import PlanError, StateError, UsageError
from epl.train.effect import settings_without_effect
from epl.train.replicas import Replicas
from tests.harness import rank_errors, run_ranks


@pytest.fixture
def alone():
    epl.init()
    yield
    epl.Env._current.close()
    epl.Env._current = None


def _data(rows: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(rows * 2.0).view(rows, 2), torch.zeros(rows))


class Mine(nn.Sequential):
    pass


def _same_objects():
    epl.init()
    epl.set_default_strategy(epl.replicate(1))
    model = Mine(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(_data(), batch_size=2)
    names = list(model.state_dict())
    given = epl.parallelize(model, loader, optimizer)
    assert given[0] is model
    assert given[1] is loader
    assert given[2] is optimizer
    assert type(model) is Mine
    assert isinstance(loader, DataLoader)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == names == list(epl.full_state_dict(model))
    assert epl.parallelize(model) is model
    return len(loader), epl.num_replicas()


def test_the_same_objects_come_back_in_order():
    assert run_ranks(_same_objects, 2) == [(2, 2), (2, 2)]


class Saved(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


def _saved_whole():
    epl.init()
    model = Saved()
    epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = torch.ones(1, 2)
    assert torch.equal(again(x), model(x))
    again(x * (epl.Env.get().cluster.rank + 1)).sum().backward()
    return again.layer.weight.grad


def test_a_saved_and_loaded_model_is_the_users_alone():
    first, second = run_ranks(_saved_whole, 2)
    assert not torch.equal(first, second)  # its gradients are not reduced: it is not the parallelized model


def _starting_weights():
    epl.init()
    torch.manual_seed(epl.Env.get().cluster.rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.normal_()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()  # state that differs between ranks before they are joined
    epl.parallelize(model, optimizer)
    moments = [v for entry in optimizer.state.values() for v in entry.values()]
    return [*model.parameters(), *model.buffers(), *moments]


def test_weights_buffers_and_optimizer_state_become_rank_0s():
    ranks = run_ranks(_starting_weights, 3)
    for tensors in ranks[1:]:
        for a, b in zip(ranks[0], tensors, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (
            lambda m: [torch.optim.lr_scheduler.StepLR(torch.optim.SGD(m.parameters(), lr=1), 1)],
            "schedulers need nothing",
        ),
        (lambda m: [nn.Linear(1, 1)], "call epl.parallelize again"),
        (lambda m: [_data()], "DataLoader that reads it"),
        (lambda m: [[torch.optim.SGD(m.parameters(), lr=1)]], "one by one"),
        (lambda m: ["x", 3], "2 problems"),
        (lambda m: [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)], "no optimizer holds a parameter"),
    ],
)
def test_wrong_arguments(alone, others, expected):
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=expected):
        epl.parallelize(model, *others(model))


def test_the_first_argument_is_the_model(alone):
    with pytest.raises(UsageError, match=r"nn\.Module"):
        epl.parallelize(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1))


def test_a_pipeline_on_one_device_simply_runs(alone):
    with epl.replicate(1, name="a"):
        first = nn.Linear(2, 2)
    with epl.split(4, name="b"):
        second = nn.Linear(2, 2)
    model = epl.parallelize(nn.Sequential(first, second))
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert epl.Env.get().plan.layout == "single"


def _does_not_divide():
    epl.init()
    epl.set_default_strategy(epl.replicate(2))
    epl.parallelize(nn.Linear(2, 2))


def test_devices_that_do_not_divide_are_refused_alike():
    errors = rank_errors(_does_not_divide, 3)
    assert len(set(errors)) == 1
    assert errors[0][0] == PlanError.__name__


def _different_models():
    epl.init()
    epl.parallelize(nn.Linear(2 + epl.Env.get().cluster.rank, 2))


def test_models_that_differ_between_ranks_are_refused_alike():
    errors = rank_errors(_different_models, 2)
    assert errors[0] == errors[1]
    assert "weight" in errors[0][1]


def _contradicting_topology():
    epl.init()
    epl.setup_process_groups([("data", 2), ("tensor", 2)])
    epl.parallelize(nn.Linear(2, 2))


def test_a_topology_that_contradicts_the_plan_is_refused():
    for error in rank_errors(_contradicting_topology, 4):
        assert error is not None
        assert error[0] == PlanError.__name__
        assert '[("data", 4)]' in error[1]


def _shared():
    epl.init()
    trunk = nn.Linear(2, 2)
    epl.parallelize(nn.Sequential(trunk))
    epl.parallelize(nn.Sequential(trunk, nn.Linear(2, 2)))


def test_two_models_that_share_trained_parameters_are_refused():
    for error in rank_errors(_shared, 2):
        assert error is not None
        assert error[0] == PlanError.__name__


def test_metrics_on_one_device(alone):
    assert epl.global_mean(2.5) == 2.5
    assert epl.global_sum(torch.tensor([1, 2])).tolist() == [1, 2]
    assert epl.gather_for_metrics(torch.arange(3)).tolist() == [0, 1, 2]
    with epl.no_sync():
        pass


def _metrics(device_count: int, batch_size: int):
    epl.init()
    epl.set_default_strategy(epl.replicate(device_count))
    model = nn.Linear(2, 2)
    loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=batch_size)
    epl.parallelize(model, loader)
    seen = []
    for (x,) in loader:
        seen.append((epl.global_mean(x.mean()).item(), epl.gather_for_metrics(x).tolist()))
    total = epl.global_sum(1)
    with pytest.raises(UsageError):
        epl.no_sync(nn.Linear(1, 1)).__enter__()
    return seen, total.item()


@pytest.mark.parametrize(("device_count", "batch_size", "step"), [(1, 3, 9), (3, 6, 6), (1, 1, 3)])
def test_metrics_are_those_of_the_global_batch_in_its_order(device_count, batch_size, step):
    rows = torch.arange(10.0)
    expected = [(rows[i : i + step].mean().item(), rows[i : i + step].tolist()) for i in range(0, 10, step)]
    for seen, total in run_ranks(_metrics, 3, device_count, batch_size):
        assert [s[1] for s in seen] == [e[1] for e in expected]
        assert [s[0] for s in seen] == pytest.approx([e[0] for e in expected])
        assert total == 3


def _load(kind: str):
    epl.init()
    rank = epl.Env.get().cluster.rank
    model = nn.Linear(2, 2)
    epl.parallelize(model)
    state = {name: torch.full_like(t, 7.0) for name, t in epl.full_state_dict(model).items()}
    if kind == "rank 0 only":
        epl.load_full_state_dict(model, state if rank == 0 else None)
    elif kind == "missing on rank 1":
        epl.load_full_state_dict(model, {} if rank == 1 else state)
    elif kind == "nowhere":
        epl.load_full_state_dict(model, None)
    return [p.detach() for p in model.parameters()]


def test_a_whole_state_is_loaded_from_rank_0():
    for parameters in run_ranks(_load, 2, "rank 0 only"):
        assert all((p == 7).all() for p in parameters)


@pytest.mark.parametrize("kind", ["missing on rank 1", "nowhere"])
def test_a_state_that_does_not_fit_is_refused_alike(kind):
    errors = rank_errors(_load, 2, kind)
    assert errors[0] == errors[1]
    assert errors[0][0] == StateError.__name__


def test_state_problems_are_all_named(alone):
    model = nn.Linear(2, 3)
    before = model.weight.detach().clone()
    with pytest.raises(StateError) as error:
        epl.load_full_state_dict(model, {"weight": torch.ones(9, 9), "else": torch.ones(1)})
    for part in ("bias is missing", "else is not in the model", "expected shape (3, 2), found (9, 9)"):
        assert part in str(error.value)
    assert torch.equal(model.weight, before)


def test_compiled_models_keep_the_users_names(alone):
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    assert list(epl.full_state_dict(model)) == ["weight", "bias"]
    epl.load_full_state_dict(model, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert model.weight.sum() == 4


def test_settings_without_effect_are_named(alone):
    model = epl.parallelize(nn.Linear(1, 1))
    plan = Replicas.of(model).plan
    config = epl.Config({"communication.fp16": True, "io.drop_last_files": True, "communication.timeout": 5})
    texts = settings_without_effect(config, plan)
    assert [t.partition(" ")[0] for t in texts] == ["communication.fp16", "io.drop_last_files"]
    assert settings_without_effect(epl.Config(), plan) == []


def _files():
    epl.init(epl.Config({"io.slicing": True}))
    files = epl.data.slice_files([f"part-{n}" for n in range(4)])
    epl.parallelize(nn.Linear(1, 1))
    return list(files)


def test_files_are_sliced_by_replica_once_the_plan_is_known():
    assert run_ranks(_files, 2) == [["part-0", "part-2"], ["part-1", "part-3"]]


def test_model_is_released_by_the_next_init(alone):
    model = nn.Linear(1, 1)
    epl.parallelize(model)
    assert Replicas.of(model) is not None
    epl.init()
    assert Replicas.of(model) is None


def _normalised_by_a_global_count(devices):
    epl.init()
    if devices > 1:
        epl.set_default_strategy(epl.replicate(devices))
    torch.manual_seed(0)
    x, y = torch.randn(13, 4, dtype=torch.float64), torch.randint(0, 3, (13,))
    model = nn.Linear(4, 3).double()
    plain = copy.deepcopy(model)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    epl.parallelize(model, loader)
    rows = 4 * epl.num_replicas()
    for step, (a, b) in enumerate(loader):
        counted = (b != 0).double()
        loss_sum = (F.cross_entropy(model(a), b, reduction="none") * counted).sum()
        model.zero_grad()
        if devices == 1:
            loss = loss_sum * epl.num_replicas() / epl.global_sum(counted.sum())
        else:
            loss = loss_sum / len(b) * epl.global_sum(len(b)) / epl.global_sum(counted.sum())
        loss.backward()
        xs, ys = x[step * rows : (step + 1) * rows], y[step * rows : (step + 1) * rows]
        plain.zero_grad()
        F.cross_entropy(plain(xs), ys.where(ys != 0, -100)).backward()
        torch.testing.assert_close(model.weight.grad, plain.weight.grad)
    return epl.num_replicas()


def test_a_loss_divided_by_a_global_count_is_exact_in_the_tail_too():
    assert run_ranks(_normalised_by_a_global_count, 2, 1) == [2, 2]


def test_a_loss_divided_by_a_global_count_where_ranks_divide_a_replicas_rows():
    # The guide said to use "sum" and to divide by the global count alone, which is 1/k of it.
    assert run_ranks(_normalised_by_a_global_count, 2, 2) == [1, 1]


def _optimizer_made_later():
    epl.init(epl.Config({"communication.clip_after_allreduce": False}))
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(model.weight)
    epl.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.full((1, 2), epl.Env.get().cluster.rank + 1.0, dtype=torch.float64)).sum().backward()
    own = model.weight.grad.clone()
    optimizer.step()
    return own, model.weight.detach()


def test_an_optimizer_made_after_parallelize_does_not_escape():
    # With the reduction postponed to the step it would otherwise have stepped on this rank's gradient alone.
    for rank, (own, weight) in enumerate(run_ranks(_optimizer_made_later, 2)):
        assert own.tolist() == [[rank + 1.0] * 2]
        assert weight.tolist() == [[1 - 1.5] * 2]
