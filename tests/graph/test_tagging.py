"""Tags reach everything that is built in a scope, and survive what people do to modules."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from epl.graph import registry, taskgraphs_of
from epl.graph.tagging import module_tag, tensor_tags
from epl.strategy import replicate, set_default_strategy


def names_in(module: nn.Module) -> set[str | None]:
    tags = [module_tag(part) for part in module.modules()]
    return {None if tag is None else tag.taskgraph.name for tag in tags}


BUILD: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(2, 2),
    "sequential": lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())),
    "module list": lambda: nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]),
    "module dict": lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}),
    "parameter list": lambda: nn.ParameterList([torch.zeros(2), torch.zeros(3)]),
    "parameter dict": lambda: nn.ParameterDict({"a": torch.zeros(2)}),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "lstm": lambda: nn.LSTM(2, 3, num_layers=2),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "weight norm": lambda: weight_norm(nn.Linear(2, 2)),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False),
    "meta": lambda: nn.Linear(2, 2, device="meta"),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()),
    "scripted": lambda: torch.jit.script(nn.Linear(2, 2)),
}


# torch.jit is deprecated in torch, and still used by people.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", BUILD)
def test_everything_built_in_a_scope_belongs_to_it(kind: str) -> None:
    with replicate(1, name="scope"):
        module = BUILD[kind]()
    assert names_in(module) == {"scope"}
    assert not any(tensor_tags(part) for part in module.modules())
    graphs = taskgraphs_of(module, registry)
    assert [g.taskgraph.name for g in graphs] == ["scope"]
    assert {t.name for t in graphs.of_parameter.values()} == {"scope"}
    assert len(graphs.of_parameter) == len(list(module.parameters()))


def test_torch_is_as_it_was_after_a_scope_and_after_a_default() -> None:
    init = nn.Module.__init__
    with replicate(1):
        assert nn.Module.__init__ is not init
    assert nn.Module.__init__ is init
    set_default_strategy(replicate(1))
    with replicate(1):
        pass
    assert nn.Module.__init__ is not init
    set_default_strategy(replicate(1))
    set_default_strategy(None)
    assert nn.Module.__init__ is init


def test_a_patch_made_over_ours_stays_and_tagging_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler patches `Module.__init__` for good the first time it compiles, perhaps under a default."""
    monkeypatch.setattr(nn.Module, "__init__", nn.Module.__init__)
    built: list[str] = []
    set_default_strategy(replicate(1, name="first"))
    ours: Any = nn.Module.__init__

    def theirs(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)
        built.append(type(self).__name__)

    nn.Module.__init__ = theirs  # type: ignore[method-assign]
    set_default_strategy(None)
    assert nn.Module.__init__ is theirs
    assert names_in(nn.Linear(2, 2)) == {None}
    with replicate(1, name="second"):
        assert names_in(nn.Linear(2, 2)) == {"second"}
    assert nn.Module.__init__ is theirs
    assert built == ["Linear", "Linear"]
    monkeypatch.undo()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))
        with replicate(1, name="a"):
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("nothing", None)
            self.child = nn.Linear(2, 2)
        with replicate(1, name="b"):
            self.items = nn.ParameterList()
        with replicate(1, name="a"):
            self.items.append(nn.Parameter(torch.zeros(5)))


def test_bare_parameters_and_buffers_are_tagged_one_by_one() -> None:
    model = Bare()
    assert module_tag(model) is None
    assert {name: tag.taskgraph.name for name, tag in tensor_tags(model).items()} == {"weight": "a", "mean": "a"}
    graphs = taskgraphs_of(model, registry)
    assert graphs.of_parameter["weight"].name == "a"
    assert graphs.of_parameter["items.0"].name == "a"
    assert graphs.of_buffer["mean"].name == "a"
    assert tensor_tags(model.child) == {}


def test_a_bare_parameter_registered_again_follows_the_new_scope() -> None:
    model = Bare()
    with replicate(1, name="c"):
        model.weight = nn.Parameter(torch.ones(2))
    assert tensor_tags(model)["weight"].taskgraph.name == "c"


def test_a_buffer_assigned_anew_stays_where_it_was_built() -> None:
    """With a default in force, batch statistics kept as `self.mean = ...` in a forward must not wander."""
    model = Bare()
    set_default_strategy(replicate(1, name="default"))
    model.mean = torch.ones(3)
    assert tensor_tags(model)["mean"].taskgraph.name == "a"
    model.register_buffer("later", torch.ones(3))
    assert tensor_tags(model)["later"].taskgraph.name == "default"


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    loaded = pickle.loads(pickle.dumps(model))
    assert isinstance(loaded, nn.Module)
    return loaded


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


def emptied(model: nn.Module) -> nn.Module:
    return model.to("meta").to_empty(device="cpu")


def doubled(model: nn.Module) -> nn.Module:
    return model.double()


@pytest.mark.parametrize("change", [copied, pickled, saved, emptied, doubled])
def test_tags_survive(change: Callable[[nn.Module], nn.Module]) -> None:
    model = Bare()
    before = taskgraphs_of(model, registry)
    after = taskgraphs_of(change(model), registry)
    assert after == before
    assert [m.taskgraph for m in after] == [m.taskgraph for m in before]


def test_a_saved_model_keeps_its_taskgraphs_in_another_session() -> None:
    data = pickle.dumps(Bare())
    registry.reset()
    graphs = taskgraphs_of(pickle.loads(data), registry)
    assert [m.taskgraph.name for m in graphs] == ["a"]
    assert not graphs.implicit


def test_a_copy_does_not_share_tags_with_the_original() -> None:
    model = Bare()
    twin = copy.copy(model)
    with replicate(1, name="twin only"):
        twin.weight = nn.Parameter(torch.ones(2))
    assert tensor_tags(model)["weight"].taskgraph.name == "a"


def test_tags_survive_the_materialisation_of_lazy_modules() -> None:
    with replicate(1, name="scope"):
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    graphs = taskgraphs_of(model, registry)
    assert (graphs[0].numel, graphs[0].lazy) == (0, 4)
    model(torch.zeros(4, 2))
    graphs = taskgraphs_of(model, registry)
    assert (graphs[0].numel, graphs[0].lazy) == (2 * 3 + 3 + 3 + 3, 0)
    assert names_in(model) == {"scope"}


def test_weight_norm_put_on_later_stays_with_the_layer() -> None:
    with replicate(1, name="scope"):
        layer = nn.Linear(2, 2)
    set_default_strategy(replicate(1, name="default"))
    weight_norm(layer)
    assert parametrize.is_parametrized(layer)
    graphs = taskgraphs_of(layer, registry)
    assert [m.taskgraph.name for m in graphs] == ["scope"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_tagged_model_can_be_scripted() -> None:
    with replicate(1, name="scope"):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_buffer("scale", torch.ones(1))
    scripted = torch.jit.script(model)
    x = torch.randn(3, 2)
    assert torch.equal(scripted(x), model(x))


def test_state_dicts_know_nothing_of_tags() -> None:
    model = Bare()
    assert set(model.state_dict()) == {"own", "weight", "mean", "child.weight", "child.bias", "items.0"}
