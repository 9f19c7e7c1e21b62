"""Which TaskGraph everything in a model belongs to."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from epl.errors import StrategyError
from epl.graph import TaskGraphs, registry, taskgraphs_of
from epl.plan import TaskGraphSpec
from epl.strategy import annotate, replicate, set_default_strategy, split


def resolve(model: nn.Module) -> TaskGraphs:
    return taskgraphs_of(model, registry)


def names(graphs: TaskGraphs) -> list[str]:
    return [m.taskgraph.name for m in graphs]


class Staged(nn.Module):
    """Two stages around parts that no scope covers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        with replicate(1, name="stage_0"):
            self.embed = nn.Embedding(10, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        with split(2, name="stage_1"):
            self.late = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.head = nn.Linear(4, 10, bias=False)
            self.scale = nn.Parameter(torch.ones(1))
        self.head.weight = self.embed.weight
        self.act = nn.ReLU()


def test_an_unannotated_model_is_one_implicit_taskgraph() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    graphs = resolve(model)
    assert graphs.implicit
    assert graphs.specs() == (TaskGraphSpec("model", "replicate", 1),)
    assert graphs[0].holds == ("",)
    assert graphs[0].parameters == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert graphs[0].buffers == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert graphs[0].numel == 2 * 3 + 3 + 3 + 3
    assert graphs.uncovered == ()
    assert "no annotation" in graphs.notices()[0]


def test_golden_table() -> None:
    graphs = resolve(Staged())
    assert str(graphs) == (
        "TaskGraph  strategy      holds              parameters  shared\n"
        "---------  ------------  -----------------  ----------  ------\n"
        "stage_0    replicate(1)  embed, layers             100       1\n"
        "stage_1    split(2)      scale, late, head         101       1\n"
        "uncovered: norm, act\n"
        "shared: embed.weight (stage_0) = head.weight (stage_1)"
    )


def test_uncovered_parts_beside_several_taskgraphs_are_listed() -> None:
    graphs = resolve(Staged())
    assert names(graphs) == ["stage_0", "stage_1"]
    assert graphs.uncovered == ("norm", "act")
    assert "norm.weight" not in graphs.of_parameter
    assert "" not in graphs.of_module, "the root is glue between its parts"
    assert graphs.notices() == ()


def test_uncovered_parts_beside_one_split_are_computed_alike_on_its_devices() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)
            with split(2, name="only"):
                self.head = nn.Linear(2, 2)

    graphs = resolve(Net())
    assert names(graphs) == ["only"]
    assert graphs.uncovered == ("body",)
    assert graphs[0].holds == ("head",)
    assert not graphs.implicit


def test_with_a_default_nothing_is_uncovered() -> None:
    set_default_strategy(replicate(4, name="rest"))
    graphs = resolve(Staged())
    assert names(graphs) == ["rest", "stage_0", "stage_1"]
    assert graphs[0].holds == ("norm", "act")
    assert graphs.uncovered == ()


def test_a_model_built_before_the_default_belongs_to_the_first_one() -> None:
    model = nn.Linear(2, 2)
    set_default_strategy(replicate(1, name="first"))
    set_default_strategy(replicate(1, name="second"))
    graphs = resolve(model)
    assert names(graphs) == ["first"]
    assert not graphs.implicit


def test_a_default_that_was_ended_takes_nothing_more() -> None:
    set_default_strategy(replicate(1, name="ended"))
    set_default_strategy(None)
    assert resolve(nn.Linear(2, 2)).implicit


def test_a_default_that_covers_only_the_root_gets_no_devices() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with replicate(1, name="a"):
                self.a = nn.Linear(2, 2)
            with replicate(1, name="b"):
                self.b = nn.Linear(2, 2)

    set_default_strategy(replicate(1, name="default"))
    graphs = resolve(Net())
    assert names(graphs) == ["a", "b"]
    assert graphs.notices() == ()


def test_each_default_takes_what_was_built_under_it() -> None:
    set_default_strategy(replicate(1, name="one"))
    first = nn.Linear(2, 2)
    set_default_strategy(replicate(1, name="two"))
    second = nn.Linear(2, 2)
    graphs = resolve(nn.Sequential(first, second))
    assert [(m.taskgraph.name, m.holds) for m in graphs] == [("one", ("0",)), ("two", ("1",))]


def test_a_part_from_outside_goes_with_the_module_around_it() -> None:
    for default in (None, replicate(1, name="default")):
        registry.reset()
        set_default_strategy(default)
        part = nn.Linear(2, 2)
        with replicate(1, name="scope"):
            wrapper = nn.Sequential(part)
        with replicate(1, name="other"):
            other = nn.Linear(2, 2)
        graphs = resolve(nn.ModuleList([wrapper, other]))
        assert names(graphs) == ["scope", "other"]
        assert graphs.of_parameter["0.0.weight"].name == "scope"


def test_layers_copied_inside_a_scope_belong_to_it_whatever_the_default() -> None:
    set_default_strategy(replicate(1, name="default"))
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    with replicate(1, name="encoder"):
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert names(resolve(encoder)) == ["encoder"]


def test_a_scope_inside_a_scopes_module_keeps_its_own() -> None:
    with replicate(1, name="inner"):
        part = nn.Linear(2, 2)
    with replicate(1, name="outer"):
        wrapper = nn.Sequential(part, nn.Linear(2, 2))
    graphs = resolve(wrapper)
    assert [(m.taskgraph.name, m.holds) for m in graphs] == [("inner", ("0",)), ("outer", ("1",))]


def test_an_empty_scope_gets_no_devices_and_a_notice() -> None:
    with replicate(1, name="nothing"):
        pass
    with replicate(1, name="something"):
        model = nn.Linear(2, 2)
    graphs = resolve(model)
    assert names(graphs) == ["something"]
    assert [t.name for t in graphs.empty] == ["nothing"]
    assert "replicate(1) 'nothing'" in graphs.notices()[0]


def test_a_scope_that_holds_only_parts_of_others_is_empty_too() -> None:
    with replicate(1, name="parts"):
        parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with replicate(1, name="container"):
        model = nn.Sequential(*parts)
    graphs = resolve(model)
    assert names(graphs) == ["parts"]
    assert [t.name for t in graphs.empty] == ["container"]


def test_the_taskgraphs_of_another_model_are_not_reported() -> None:
    with replicate(1, name="generator"):
        generator = nn.Linear(2, 2)
    with replicate(1, name="discriminator"):
        discriminator = nn.Linear(2, 2)
    for model, name in ((generator, "generator"), (discriminator, "discriminator")):
        graphs = resolve(model)
        assert names(graphs) == [name]
        assert graphs.notices() == ()


def test_order_is_that_of_creation_not_of_the_model() -> None:
    with replicate(1, name="first"):
        a = nn.Linear(2, 2)
    with replicate(1, name="second"):
        b = nn.Linear(2, 2)
    assert names(resolve(nn.Sequential(b, a))) == ["first", "second"]


def test_shared_parameters_are_noticed_with_their_taskgraphs() -> None:
    graphs = resolve(Staged())
    assert [s.names for s in graphs.shared] == [(("embed.weight", "stage_0"), ("head.weight", "stage_1"))]
    assert graphs.shared[0].taskgraphs == {"stage_0", "stage_1"}


def test_a_shared_module_is_one_thing_with_several_names() -> None:
    shared = nn.Linear(2, 2)
    with replicate(1, name="a"):
        a = nn.Sequential(nn.Linear(2, 2), shared)
    with replicate(1, name="b"):
        b = nn.Sequential(nn.Linear(2, 2), shared)
    graphs = resolve(nn.ModuleDict({"plain": shared, "a": a, "b": b}))
    owners = {name: graphs.of_parameter[name].name for name in ("plain.weight", "a.1.weight", "b.1.weight")}
    assert set(owners.values()) == {"a"}
    assert len(graphs.shared) == 2
    assert graphs[0].numel == 6 + 6, "each parameter counts once"


def test_a_parameter_used_twice_in_one_module_is_shared() -> None:
    model = nn.Linear(2, 2)
    model.twin = model.weight
    assert [s.names for s in resolve(model).shared] == [(("weight", "model"), ("twin", "model"))]


def test_annotated_layers_of_a_foreign_model() -> None:
    model = nn.Transformer(4, 2, 4, 2, 8, batch_first=True)
    annotate(replicate(1, name="low"), model.encoder.layers[:2])
    annotate(replicate(1, name="high"), model.encoder.layers[2:], model.encoder.norm, model.decoder)
    graphs = resolve(model)
    assert graphs[0].holds == ("encoder.layers.0", "encoder.layers.1")
    assert graphs[1].holds == ("encoder.layers.2", "encoder.layers.3", "encoder.norm", "decoder")
    assert graphs.uncovered == ()
    assert "encoder.layers.0-1" in str(graphs)


def test_two_taskgraphs_of_one_name_are_refused() -> None:
    with replicate(1, name="stage"):
        old = nn.Linear(2, 2)
    data = pickle.dumps(old)
    registry.reset()
    with replicate(1, name="stage"):
        new = nn.Linear(2, 2)
    with pytest.raises(StrategyError, match="'stage'"):
        resolve(nn.Sequential(pickle.loads(data), new))


def test_a_parameterless_leaf_counts_as_a_part() -> None:
    with replicate(1, name="identity"):
        part = nn.Identity()
    with replicate(1, name="linear"):
        other = nn.Linear(2, 2)
    assert names(resolve(nn.Sequential(part, other))) == ["identity", "linear"]
