"""epl.init and Env: what a process knows, before and after, alone and among others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import epl
from epl.cluster.bits import pack_bits, unpack_bits
from epl.errors import ClusterError, ConfigError, NotBuiltError, NotInitializedError, StrategyError, UsageError
from tests.harness import rank_errors, run_ranks


@pytest.fixture(autouse=True)
def closed():
    """Each test begins and ends outside of any run."""
    yield
    if epl.Env._current is not None:
        epl.Env._current.close()
        epl.Env._current = None


def test_before_init_env_tells_what_it_found(monkeypatch):
    monkeypatch.setenv("EPL_COMMUNICATION_MAX_SPLITS", "7")
    env = epl.Env.get()
    assert not env.initialized
    assert (env.cluster.rank, env.cluster.total_gpu_num, env.cluster.worker_num) == (0, 1, 1)
    assert env.config.communication.max_splits == 7
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "call",
    [
        lambda: epl.parallelize(nn.Linear(1, 1)),
        lambda: epl.global_mean(torch.ones(1)),
        lambda: epl.global_sum(1.0),
        lambda: epl.gather_for_metrics(torch.ones(1)),
        lambda: epl.setup_process_groups([("data", 1)]),
    ],
)
def test_what_needs_others_says_to_call_init(call):
    with pytest.raises(NotInitializedError, match=r"epl\.init\(\)"):
        call()


def test_one_process_needs_no_launcher_and_no_port():
    epl.init()
    env = epl.Env.get()
    assert env.initialized
    assert env.cluster.kind == "single"
    assert epl.global_mean(torch.tensor(3.0)) == 3.0
    assert epl.num_replicas() == 1


def test_init_takes_a_config_only():
    with pytest.raises(UsageError, match=r"epl\.init\(epl\.Config"):
        epl.init({"pipeline.num_micro_batch": 4})  # type: ignore[arg-type]


def test_a_second_init_forgets_the_first():
    epl.init(epl.Config({"communication.max_splits": 3}))
    epl.set_default_strategy(epl.replicate(1))
    model = nn.Linear(2, 2)
    epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group = dist.new_group()
    epl.init()
    assert epl.Env.get().config.communication.max_splits == 5
    assert epl.Env.get().plan is None
    assert not model._forward_pre_hooks
    assert dist.get_world_size(group) == 1  # a group the user made stays good
    assert epl.graph.registry.default is None


def test_init_inside_a_scope_is_refused():
    epl.init()
    with epl.replicate(1), pytest.raises(StrategyError, match="inside the scope"):
        epl.init()


def _again():
    epl.init(epl.Config({"communication.timeout": 30}))
    results = []
    for timeout in (30, 40, 40):
        epl.init(epl.Config({"communication.timeout": timeout}))
        epl.set_default_strategy(epl.replicate(1))
        torch.manual_seed(0)
        model = nn.Linear(2, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        epl.parallelize(model, optimizer)
        model(torch.full((1, 2), dist.get_rank() + 1.0, dtype=torch.float64)).sum().backward()
        optimizer.step()
        results.append(model.weight.detach().clone())
    return results


def test_init_again_and_again_on_ranks():
    first, second = run_ranks(_again, 2)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, first[0])
        assert torch.equal(a, b)


def _facts():
    epl.init()
    c = epl.Env.get().cluster
    return c.rank, c.worker_num, c.worker_index, c.gpu_num_per_worker, c.total_gpu_num, c.is_first_rank, c.kind


def test_ranks_of_a_worker_share_its_index():
    launched = {"EPL_LAUNCH_NUM_WORKERS": "2", "EPL_LAUNCH_GPU_PER_WORKER": "2"}
    facts = run_ranks(_facts, 4, env=launched)
    assert facts == [(r, 2, r // 2, 2, 4, r == 0, "epl-launch") for r in range(4)]


def _visible(devices: str):
    epl.init(epl.Config({"cluster.run_visible_devices": devices}))
    return str(epl.Env.get().cluster.device)


def test_visible_devices_must_be_as_many_as_the_workers_processes():
    assert run_ranks(_visible, 2, "0,1") == ["cpu", "cpu"]
    for error in rank_errors(_visible, 2, "0,1,2"):
        assert error is not None
        assert error[0] == ClusterError.__name__
        assert "--gpu_per_worker 3" in error[1]


def _different_settings():
    import os

    epl.init(epl.Config({"communication.max_splits": 3 + int(os.environ["RANK"])}))


def test_ranks_with_different_settings_all_say_so():
    errors = rank_errors(_different_settings, 2)
    assert errors[0] == errors[1]
    assert "epl.Config" in errors[0][1]


def _adopt():
    dist.init_process_group("gloo")
    epl.init()
    total = epl.global_sum(1.0)
    topology = epl.setup_process_groups([("data", 2)])
    return total.item(), topology.size("data")


def test_a_process_group_of_the_users_own_is_adopted():
    assert run_ranks(_adopt, 2) == [(2.0, 2), (2.0, 2)]


def _topology_without_init():
    dist.init_process_group("gloo")
    return epl.setup_process_groups([("pipe", 2), ("data", 1)]).ranks("pipe")


def test_topology_alone_adopts_the_users_process_group():
    assert run_ranks(_topology_without_init, 2) == [(0, 1), (0, 1)]


class _Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(2, 2)

    def forward(self, x):
        with epl.replicate(1, name="inside"):
            return self.part(x)


class _InTwoStages(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x):
        with epl.replicate(1, name="first"):
            x = torch.tanh(self.first(x))
        with epl.replicate(1):
            return self.second(x)


def _forward_scope(kind):
    epl.init()
    torch.manual_seed(0)
    model = epl.parallelize(kind().double())
    loss = model(torch.ones(4, 2, dtype=torch.float64)).square().sum()
    loss.backward()
    assert epl.Env.get().plan is not None
    layout = epl.Env.get().plan.layout
    return layout, loss.item(), sum(p.grad is not None for p in model.parameters())


def test_a_scope_in_forward_runs_alone_and_on_ranks():
    epl.init()
    layout, loss, _ = _forward_scope(_Inside)
    assert layout == "single"
    for found in run_ranks(_forward_scope, 2, _Inside):
        assert found == ("colocated", pytest.approx(loss), 2)


def test_scopes_in_forward_are_stages():
    epl.init()
    _, loss, trained = _forward_scope(_InTwoStages)
    assert trained == 4
    for found in run_ranks(_forward_scope, 2, _InTwoStages):
        assert found == ("staged", pytest.approx(loss), 2)


def test_settings_not_built_yet_are_refused_before_init():
    with pytest.raises(NotBuiltError):
        epl.Config({"zero.level": "v1"})
    with pytest.raises(ConfigError, match="num_micro_batch"):
        epl.Config({"pipeline.num_microbatch": 4})


def test_words_carry_bits_and_places():
    import epl.cluster.communication as communication

    bits = (1 << 300) | 5
    assert unpack_bits(pack_bits(bits)) == bits
    assert communication._kind_number("a") != communication._kind_number("b")
