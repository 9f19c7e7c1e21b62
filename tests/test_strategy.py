"""Strategies as scopes, as the default, and on built modules."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from epl.errors import StrategyError, UsageError
from epl.graph import Annotation, registry, taskgraphs_of
from epl.graph.tagging import module_tag
from epl.strategy import Strategy, annotate, replicate, set_default_strategy, split, taskgraphs


@pytest.fixture(autouse=True)
def no_annotations() -> Iterator[None]:
    registry.reset()
    yield
    registry.reset()


@pytest.fixture
def inductor_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch sets this variable itself the first time it looks for its compiler.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def name_of(module: nn.Module) -> str | None:
    tag = module_tag(module)
    return None if tag is None else tag.taskgraph.name


def test_a_strategy_knows_what_was_asked_for() -> None:
    strategy = replicate(2, name="stage_0")
    assert (strategy.kind, strategy.device_count, strategy.name) == ("replicate", 2, "stage_0")
    assert repr(strategy) == "epl.replicate(device_count=2, name='stage_0')"
    assert (split().kind, split().device_count, split().name) == ("split", 1, None)
    assert repr(split()) == "epl.split(device_count=1)"


@pytest.mark.parametrize("make", [replicate, split])
@pytest.mark.parametrize("count", [0, -1, 2.0, True, False, "2", [1]])
def test_a_device_count_that_is_none_is_refused(make: object, count: object) -> None:
    with pytest.raises(StrategyError, match=re.escape(repr(count))):
        make(count)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["", 3, b"x"])
def test_a_name_that_is_none_is_refused(name: object) -> None:
    with pytest.raises(StrategyError, match="name"):
        replicate(1, name=name)  # type: ignore[arg-type]


def test_each_entry_makes_a_taskgraph_named_by_order() -> None:
    strategy = replicate(1)
    with strategy:
        a = nn.Linear(2, 2)
    with strategy:
        b = nn.Linear(2, 2)
    with split(2):
        c = nn.Linear(2, 2)
    assert [name_of(m) for m in (a, b, c)] == ["taskgraph_0", "taskgraph_1", "taskgraph_2"]
    assert [t.strategy for t in registry.taskgraphs] == ["replicate(1)", "replicate(1)", "split(2)"]


def test_a_name_by_order_avoids_a_name_that_is_taken() -> None:
    with replicate(1, name="taskgraph_1"):
        nn.Linear(2, 2)
    with replicate(1):
        assert name_of(nn.Linear(2, 2)) == "taskgraph_2"


def test_the_same_name_and_strategy_continues_a_taskgraph() -> None:
    with replicate(1, name="ends"):
        first = nn.Linear(2, 2)
    with replicate(1, name="middle"):
        nn.Linear(2, 2)
    with replicate(1, name="ends"):
        last = nn.Linear(2, 2)
    assert module_tag(first) == module_tag(last)
    assert [t.name for t in registry.taskgraphs] == ["ends", "middle"]


@pytest.mark.parametrize("other", [replicate(2, name="a"), split(1, name="a")])
def test_the_same_name_with_another_strategy_is_refused(other: Strategy) -> None:
    with replicate(1, name="a"):
        part = nn.Linear(2, 2)
    with pytest.raises(StrategyError, match=rf"'a'.*replicate\(1\).*{re.escape(other.annotation.strategy)}"):
        other.__enter__()
    with pytest.raises(StrategyError, match="'a'"):
        set_default_strategy(other)
    with pytest.raises(StrategyError, match="'a'"):
        annotate(other, part)
    assert registry.scope is None
    assert name_of(nn.Linear(2, 2)) is None


def test_nesting_is_refused_with_both_names() -> None:
    with replicate(1, name="outer"):
        with pytest.raises(StrategyError, match=r"'inner'.*'outer'"), split(2, name="inner"):
            pass
        assert name_of(nn.Linear(2, 2)) == "outer"
    assert [t.name for t in registry.taskgraphs] == ["outer"]


def test_an_error_inside_closes_the_scope() -> None:
    with pytest.raises(ZeroDivisionError), replicate(1):
        _ = 1 / 0
    assert registry.scope is None
    assert name_of(nn.Linear(2, 2)) is None


def test_scopes_of_threads_do_not_meet() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[str | None] = []

    def other() -> None:
        inside.wait(10)
        seen.append(name_of(nn.Linear(2, 2)))
        with split(1, name="other"):
            seen.append(name_of(nn.Linear(2, 2)))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with replicate(1, name="main"):
        inside.set()
        done.wait(10)
        assert name_of(nn.Linear(2, 2)) == "main"
    thread.join()
    assert seen == [None, "other"]


def test_a_default_covers_what_is_built_from_then_on_outside_scopes() -> None:
    before = nn.Linear(2, 2)
    set_default_strategy(replicate(1, name="first"))
    a = nn.Linear(2, 2)
    with split(2, name="scope"):
        b = nn.Linear(2, 2)
    c = nn.Linear(2, 2)
    set_default_strategy(replicate(2, name="second"))
    d = nn.Linear(2, 2)
    set_default_strategy(None)
    e = nn.Linear(2, 2)
    assert [name_of(m) for m in (before, a, b, c, d, e)] == [None, "first", "scope", "first", "second", None]


def test_a_default_inside_a_scope_is_refused() -> None:
    with replicate(1, name="here"), pytest.raises(StrategyError, match="'here'"):
        set_default_strategy(replicate(1))
    assert registry.default is None


def test_a_default_inside_a_forward_is_refused() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            set_default_strategy(replicate(1))
            return x

    with pytest.raises(StrategyError, match="forward"):
        Net()(torch.zeros(1))


@pytest.mark.parametrize("wrong", ["replicate", replicate, 2])
def test_what_is_no_strategy_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"epl\.replicate"):
        set_default_strategy(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"epl\.replicate"):
        annotate(wrong, nn.Linear(2, 2))  # type: ignore[arg-type]


def test_init_inside_a_scope_is_refused() -> None:
    with replicate(1, name="open"), pytest.raises(StrategyError, match="'open'"):
        registry.reset()


def test_reset_forgets_taskgraphs_and_default() -> None:
    set_default_strategy(replicate(1, name="a"))
    first = nn.Linear(2, 2)
    registry.reset()
    assert (registry.taskgraphs, registry.default) == ((), None)
    assert name_of(nn.Linear(2, 2)) is None
    set_default_strategy(replicate(1, name="a"))
    assert module_tag(nn.Linear(2, 2)) != module_tag(first)


# annotate


def test_annotate_tags_modules_with_everything_inside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    annotate(replicate(1, name="front"), model[0], model[1])
    annotate(split(2, name="head"), model[2])
    names = [name_of(m) for m in model.modules()]
    assert names == [None, "front", "front", "front", "front", "head"]


def test_annotate_takes_slices_lists_and_generators() -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))
    annotate(replicate(1, name="a"), layers[:2])
    annotate(replicate(1, name="b"), [layers[2], layers[3]], layers[4])
    annotate(replicate(1, name="c"), (layer for layer in layers[5:]))
    assert [name_of(layer) for layer in layers] == ["a", "a", "b", "b", "b", "c"]


def test_annotate_continues_by_name_and_may_repeat_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    annotate(replicate(1, name="a"), model[0])
    annotate(replicate(1, name="a"), model)
    assert {name_of(m) for m in model.modules()} == {"a"}
    assert len(registry.taskgraphs) == 1


def test_annotate_overrides_a_default_and_its_bare_parameters() -> None:
    set_default_strategy(replicate(1, name="default"))
    module = nn.Linear(2, 2)
    set_default_strategy(replicate(1, name="later"))
    module.extra = nn.Parameter(torch.zeros(2))
    annotate(split(2, name="head"), module)
    assert taskgraphs_of(module, registry).of_parameter["extra"].name == "head"
    assert name_of(module) == "head"


def test_annotate_refuses_what_a_scope_has_claimed_and_changes_nothing() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with split(2, name="mine"):
                self.head = nn.Linear(2, 2)
                self.scale = nn.Parameter(torch.ones(2))
            self.body = nn.Linear(2, 2)

    net = Net()
    with pytest.raises(StrategyError) as caught:
        annotate(replicate(1, name="all"), net)
    text = str(caught.value)
    assert "2 problems" in text
    assert "Net.head (Linear): it belongs to the scope split(2) 'mine'" in text
    assert "Net.scale: it belongs to the scope split(2) 'mine'" in text
    assert name_of(net.body) is None
    assert [t.name for t in registry.taskgraphs] == ["mine"]


def test_annotate_refuses_what_another_annotate_has_claimed() -> None:
    module = nn.Linear(2, 2)
    annotate(replicate(1, name="a"), module)
    with pytest.raises(StrategyError, match="earlier annotate, replicate\\(1\\) 'a'"):
        annotate(replicate(1), module)


def test_annotate_inside_a_scope_is_refused() -> None:
    module = nn.Linear(2, 2)
    with replicate(1, name="open"), pytest.raises(StrategyError, match=r"'x'.*'open'"):
        annotate(split(2, name="x"), module)


def test_annotate_refuses_what_is_no_module_all_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        annotate(replicate(1), nn.Linear(2, 2), torch.zeros(3), [nn.ReLU(), 7], "encoder")  # type: ignore[list-item, arg-type]
    text = str(caught.value)
    assert "argument 2 is a Tensor" in text
    assert "argument 3 holds a int" in text
    assert "argument 4 is a str" in text
    with pytest.raises(UsageError, match="at least one"):
        annotate(replicate(1))
    assert registry.taskgraphs == ()


# scopes in the wrong place


def test_a_scope_around_a_call_in_the_loop_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(StrategyError) as caught, split(2, name="loop"):
        model(torch.zeros(1, 2))
    text = str(caught.value)
    assert "Sequential was called inside the scope split(2) 'loop'" in text
    assert "with epl.split(2):" in text
    assert "epl.annotate(epl.split(2), model.part)" in text
    assert model(torch.zeros(1, 2)).shape == (1, 2), "after the scope calls are free again"


def test_a_scope_may_call_what_it_has_built() -> None:
    shared = nn.Linear(2, 2)
    with replicate(1, name="scope"):
        model = nn.Sequential(shared, nn.Linear(2, 2))
        assert model(torch.zeros(1, 2)).shape == (1, 2)


def test_a_dry_run_while_a_model_is_built_is_allowed() -> None:
    class Net(nn.Module):
        def __init__(self, backbone: nn.Module) -> None:
            super().__init__()
            self.backbone = backbone
            with replicate(1, name="head"):
                width = self.backbone(torch.zeros(1, 3)).shape[-1]
                self.head = nn.Linear(width, 2)

    net = Net(nn.Sequential(nn.Linear(3, 5), nn.ReLU()))
    assert net.head.in_features == 5
    assert name_of(net.head) == "head"
    assert name_of(net.backbone) is None


def test_reading_a_parametrised_weight_in_a_scope_is_no_call() -> None:
    old = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with replicate(1):
        new = nn.Linear(2, 2)
        new.load_state_dict({"weight": old.weight, "bias": old.bias})
    assert torch.equal(new.weight, old.weight)


# scopes inside a forward


class ForwardScope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)

    def tail(self, x: torch.Tensor) -> torch.Tensor:
        with split(2, name="inside"):
            return self.head(x)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.body(x))


def test_a_scope_inside_a_forward_is_reported_and_tags_nothing() -> None:
    seen: list[Annotation] = []
    registry.on_forward_scope = seen.append
    net = ForwardScope()
    net(torch.zeros(1, 2))
    net.forward(torch.zeros(1, 2))
    assert seen == [Annotation("split", 2, "inside")] * 2
    assert registry.taskgraphs == ()
    assert taskgraphs_of(net, registry).implicit


def test_a_scope_inside_a_forward_does_nothing_by_default() -> None:
    net = ForwardScope()
    x = torch.randn(3, 2)
    assert torch.equal(net(x), net.head(net.body(x)))


def test_a_scope_inside_a_forward_refuses_nesting() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ForwardScope()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with replicate(1, name="outer"):
                return self.inner(x)  # type: ignore[no-any-return]

    with pytest.raises(StrategyError, match=r"'inside'.*'outer'"):
        Outer()(torch.zeros(1, 2))
    assert registry.scope is None


def test_a_forward_scope_runs_again_under_checkpoint(inductor_directory: None) -> None:
    """The recomputed part runs on autograd's stack, without any module call around it."""

    class Net(ForwardScope):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.tail, self.body(x), use_reentrant=False)  # type: ignore[no-any-return]

    seen: list[Annotation] = []
    registry.on_forward_scope = seen.append
    net = Net()
    net(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 2
    assert net.head.weight.grad is not None
    assert registry.taskgraphs == ()


def test_a_model_built_during_a_forward_is_still_tagged() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with replicate(1, name="late"):
                self.inner = nn.Linear(2, 2)

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.part = Part()
            return x

    net = Net()
    net(torch.zeros(1))
    assert name_of(net.part.inner) == "late"


@pytest.mark.filterwarnings("default")
def test_a_forward_scope_traces_as_one_graph(inductor_directory: None) -> None:
    set_default_strategy(replicate(1))
    net = ForwardScope()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    x = torch.randn(3, 2)
    assert torch.equal(compiled(x), net(x))
    assert registry.scope is None
    torch.compiler.reset()


def test_taskgraphs_of_a_model_can_be_listed_and_printed() -> None:
    with replicate(2, name="front"):
        front = nn.Linear(2, 3)
    with split(2, name="head"):
        head = nn.Linear(3, 4)
    found = taskgraphs(nn.Sequential(front, head))
    assert [(m.taskgraph.name, m.taskgraph.strategy, m.holds) for m in found] == [
        ("front", "replicate(2)", ("0",)),
        ("head", "split(2)", ("1",)),
    ]
    assert "front" in str(found)
    assert "split(2)" in str(found)
