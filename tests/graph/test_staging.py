"""Recorded calls as plain data, cut into stages and replayed stage by stage: the same numbers as the whole model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epl
from epl.errors import PlanError
from epl.graph import registry, taskgraphs_of
from epl.graph.owners import owners_of
from epl.graph.record import MIXED, RecordedCall, Recordings
from epl.graph.record.describe import describe, name_of
from epl.graph.record.steps import changed
from epl.graph.staging import graph_nodes, wanted_at_home
from epl.plan import GraphNode, StageCut, cut_stages


def record(model: nn.Module, *args: Any, **kwargs: Any) -> RecordedCall:
    return Recordings(model, owners_of(model, taskgraphs_of(model, registry))).of(args, kwargs, 1)


def nodes_and_cut(model: nn.Module, recorded: RecordedCall) -> tuple[dict[str, GraphNode], StageCut]:
    graphs = taskgraphs_of(model, registry)
    owners = {name: t.name if (t := graphs.of_parameter.get(name)) else None for name, _ in model.named_parameters()}
    nodes = graph_nodes(recorded, model)
    names = [m.taskgraph.name for m in graphs]
    cut = cut_stages(nodes, taskgraphs=names, parameters=owners, home=wanted_at_home(recorded))
    return {node.name: node for node in nodes}, cut


def run_stages(recorded: RecordedCall, cut: StageCut, tensors: list[torch.Tensor]) -> Any:
    """What the stages give, one after the other, each with only its inputs and what has been sent to it."""
    places = recorded.whole.nodes
    envs: list[dict[Any, Any]] = []
    body = set(recorded.body)
    for stage in range(cut.num_stages):
        env = recorded.whole.feed(tensors, recorded.given)
        for (made, used), values in cut.edges.items():
            if used == stage:
                env.update({places[value]: envs[made][places[value]].detach().clone() for value in values})
        recorded.whole.replay([places[i] for i in cut.nodes_of(stage) if places[i] in body], env)
        envs.append(env)
    return recorded.finish(tensors, [envs[-1][node] for node in recorded.frontier])


def agree(model: nn.Module, *args: torch.Tensor, **kwargs: Any) -> tuple[dict[str, GraphNode], StageCut]:
    recorded = record(model, *args, **kwargs)
    nodes, cut = nodes_and_cut(model, recorded)
    with torch.no_grad():
        expected = copy.deepcopy(model)(*args, **kwargs)
        torch.testing.assert_close(run_stages(recorded, cut, recorded.input_tensors(args, kwargs)), expected)
    return nodes, cut


class Chain(nn.Module):
    """Stages whose forward is given; parts that no scope covers beside them."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], stages: int = 2) -> None:
        super().__init__()
        self.body = forward
        self.norm = nn.LayerNorm(4)
        self.token = nn.Parameter(torch.randn(1, 4))
        self.register_buffer("table", torch.arange(4.0))
        for number in range(stages):
            with epl.replicate(1, name=f"s{number}"):
                setattr(self, f"part{number}", nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def _change_a_view(h: torch.Tensor) -> torch.Tensor:
    first = h[0]
    first += 1
    return h


def _without_first_row(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0] = 0
    return x


def _from_itself(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 0] = x[:, 1] * 2
    return x


def _read_before(m: Any, x: torch.Tensor) -> Any:
    h = m.part0(x)
    view = h[:, 1]
    before = view * 2
    h[:, 1] = 3
    return m.part1(h), before, view + 1


def _fill(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2, *x.shape)
    out[0] = m.part0(x)
    out[1] = m.part1(out[0])
    return out.sum(0)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.part1(m.part0(x)),
        lambda m, x: m.part1(torch.relu(m.part0(m.norm(x)))) + x,
        lambda m, x: m.part1(torch.cat([m.token.expand(len(x), -1), m.part0(x)])),
        lambda m, x: {"out": m.part1(m.part0(x) * m.table), "pair": (x + 1, m.token)},
        lambda m, x: m.part1(torch.stack(m.part0(x).chunk(2, -1)).flatten(0, 1).reshape(-1, 4)),
        lambda m, x: F.linear(m.part1(m.part0(x)), m.part0.weight),
        lambda m, x: m.part1(m.part0(x).clone().add_(1)),
        lambda m, x: (m.part0(x), m.part1(x)),
        lambda m, x: m.part1(_change_a_view(m.part0(x))),
        lambda m, x: _fill(m, x),
        lambda m, x: m.part1(m.part0(_without_first_row(x)) + x),
        lambda m, x: m.part1(_from_itself(m.part0(_from_itself(x))) + x),
        _read_before,
    ],
)
def test_stages_give_what_the_model_gives(forward: Callable[[Any, torch.Tensor], Any]) -> None:
    agree(Chain(forward), torch.randn(6, 4))


def test_a_part_that_runs_before_and_after_another_one() -> None:
    """As of a GAN's discriminator, on real rows and on generated ones: it was refused as a cycle, though nothing goes back."""
    model = Chain(lambda m, x: (m.part1(x), m.part1(m.part0(x))))
    _, cut = agree(model, torch.randn(6, 4))
    assert cut.order == ("s0", "s1")


def test_nodes_in_the_words_of_planning() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        first = m.part0(x * m.table + noise)
        first[0] += 1
        return m.part1(first + m.token)

    model = Chain(forward)
    model.alias = model.part0.weight
    recorded = record(model, torch.randn(6, 4))
    nodes, cut = nodes_and_cut(model, recorded)
    assert nodes["part0"].kind == "leaf"
    assert nodes["part0"].taskgraph == "s0"
    assert nodes["part0"].parameters == ("alias", "part0.bias")  # of several names the first
    assert (nodes["token"].kind, nodes["table"].kind, nodes["table"].buffers) == ("parameter", "constant", ("table",))
    assert nodes["randn_like"].random
    assert nodes["randn_like"].where.split(":")[0].endswith("test_staging.py")
    changes = [node for node in nodes.values() if node.effect_on is not None]
    assert changes
    assert cut.holders["token"] == (0,)
    assert cut.buffers["table"] == (0,)


def test_a_tail_that_uses_a_parameter_ties_it_to_the_last_stage() -> None:
    _, cut = agree(Chain(lambda m, x: F.linear(m.part1(m.part0(x)), m.part0.weight)), torch.randn(6, 4))
    assert cut.tied == {"part0.weight": (0, 1)}


def test_a_module_without_parameters_in_place_on_what_another_stage_made() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with epl.replicate(1, name="s0"):
                self.first = nn.Linear(4, 4)
            with epl.replicate(1, name="s1"):
                self.act = nn.ReLU(inplace=True)
                self.second = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.act(self.first(x)))

    _, cut = agree(Net(), torch.randn(6, 4))
    assert list(cut.edges) == [(0, 1)]


def test_a_value_changed_by_a_later_stage_and_used_by_an_earlier_one_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        first = m.part0(x)
        second = m.part1(first)
        first += 1
        return second, m.part0(first)

    model = Chain(forward)
    with pytest.raises(PlanError, match=r"(?s)'part1' .*test_staging.py:\d+\) in 's1'"):
        nodes_and_cut(model, record(model, torch.randn(6, 4)))


def test_values_go_by_the_users_names_in_refusals() -> None:
    """Our own steps were named in them, and 'changed' is written nowhere in the user's forward."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        first = m.part0(x)
        view = first[1:]
        second = m.part1(first)
        for _ in range(1100):  # more than Python's stack is deep
            first.add_(second)
        return m.part0(view)

    model = Chain(forward)
    recorded = record(model, torch.randn(6, 4))
    *_, after = (node for node in recorded.whole.nodes if node.target is changed)
    assert name_of(after) == "__getitem__ after add_"
    assert re.fullmatch(r"the value of __getitem__ at \S+, after add_ at \S+ has changed it", describe(after))
    with pytest.raises(PlanError, match=r"'__getitem__ after add_' \(.*test_staging.py:\d+\)"):
        nodes_and_cut(model, recorded)


def test_a_buffer_that_the_glue_sets_is_where_its_value_is_made() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.part0(x * m.table)
        m.table = h.mean(0).detach()
        return m.part1(h)

    nodes, cut = agree(Chain(forward), torch.randn(6, 4))
    assert cut.stages[nodes["table = …"].index] == (0,)
    assert cut.buffers == {"table": (0,)}


def test_a_buffer_that_one_stage_sets_and_another_reads_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.part1(m.part0(x * m.table))
        m.table = h.mean(0).detach()
        return h

    model = Chain(forward)
    with pytest.raises(PlanError, match=r"'table = …' .* the next call of the model in 's0'"):
        nodes_and_cut(model, record(model, torch.randn(6, 4)))


def test_scopes_in_the_forward_are_stages() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with epl.replicate(1, name="s0"):
                x = torch.relu(self.a(x))
            with epl.replicate(1, name="s1"):
                return self.b(x) * 2

    model = Net()
    recorded = record(model, torch.randn(6, 4))
    nodes = graph_nodes(recorded, model)
    cut = cut_stages(nodes, taskgraphs=["s0", "s1"], parameters={}, home=wanted_at_home(recorded))
    assert cut.order == ("s0", "s1")
    assert [cut.holders[name] for name in ("a.weight", "b.weight")] == [(0,), (1,)]


def test_a_taskgraph_may_be_given_for_every_call_of_a_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = torch.relu(self.layer(x))
            return x

    model = Net()
    x = torch.randn(6, 4)
    recorded = Recordings(model, lambda module: None).of((x,), {}, 1)
    nodes = graph_nodes(recorded, model, lambda path, number: f"s{number // 2}")
    cut = cut_stages(nodes, taskgraphs=["s0", "s1"], parameters={"layer.weight": "s0"}, home=wanted_at_home(recorded))
    assert cut.tied == {"layer.weight": (0, 1), "layer.bias": (0, 1)}
    with torch.no_grad():
        torch.testing.assert_close(run_stages(recorded, cut, [x]), model(x))


def test_owners_of_modules() -> None:
    model = Chain(lambda m, x: x)
    model.both = nn.Sequential(model.part0, model.part1)
    model.some = nn.Sequential(model.part0, nn.ReLU())
    model.none = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    model.empty = nn.ModuleList()
    owner = owners_of(model, taskgraphs_of(model, registry))
    assert [owner(model.part0), owner(model.both), owner(model.some)] == ["s0", MIXED, MIXED]
    assert [owner(model.none), owner(model.norm), owner(model.empty), owner(model)] == [None, None, None, MIXED]


def test_an_unannotated_model_has_no_owners() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    owner = owners_of(model, taskgraphs_of(model, registry))
    assert {owner(module) for module in model.modules()} == {None}
