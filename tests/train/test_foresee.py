"""`epl.plan`: plans without a launch, of annotated models and of automatic stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import epl
from epl.env import Env
from epl.errors import PlanError, StrategyError, UsageError
from epl.graph import registry
from epl.plan import Plan

IDS = torch.zeros(8, 5, dtype=torch.long)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Env, "_current", None)
    registry.reset()
    yield
    registry.reset()


def settings(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"EPL_{name.upper()}", str(value))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Six blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def annotated(*counts: int, cuts: tuple[int, ...] = (3,)) -> Net:
    net = Net()
    names = "abcdef"
    edges = (0, *cuts, 6)
    for number, count in enumerate(counts):
        parts = [*net.blocks[edges[number] : edges[number + 1]]]
        epl.annotate(epl.replicate(count, name=names[number]), parts)
    return net


def test_an_annotated_model_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    made = epl.plan(annotated(1, 1), IDS, num_devices=4, num_micro_batch=4)
    assert (made.layout, made.num_replicas, made.settings.num_micro_batch) == ("staged", 2, 4)
    assert [stage.modules for stage in made.stages] == [
        ("embed", "blocks.0", "blocks.1", "blocks.2"),
        ("blocks.3", "blocks.4", "blocks.5", "head"),
    ]
    assert [stage.parameters for stage in made.stages] == [160 + 3 * 280, 3 * 280 + 180]
    assert sum(stage.time or 0 for stage in made.stages) == pytest.approx(1.0)
    text = str(made)
    for piece in ("embed, blocks.0-2", "blocks.3-5, head", "PreferBackward, 4 micro batches", "2 × 2 × 4 = 16", "idle"):
        assert piece in text
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert capsys.readouterr() == ("", "")


def test_taskgraphs_come_in_order_of_execution() -> None:
    net = Net()
    epl.annotate(epl.replicate(1, name="late"), net.blocks[3:])
    epl.annotate(epl.replicate(1, name="early"), net.blocks[:3])
    made = epl.plan(net, IDS, num_devices=2)
    assert [t.name for t in made.taskgraphs] == ["early", "late"]
    assert made.taskgraphs[0].devices == ((0,),)


def test_a_loss_inside_the_model_and_keyword_arguments() -> None:
    made = epl.plan(annotated(1, 1), ids=IDS, labels=IDS, num_devices=2)
    assert [stage.taskgraph for stage in made.stages] == ["a", "b"]


def test_on_meta_nothing_is_computed_and_nothing_changes() -> None:
    with torch.device("meta"):
        net = annotated(1, 1)
    before = torch.get_rng_state()
    made = epl.plan(net, IDS, num_devices=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert {p.device.type for p in net.parameters()} == {"meta"}
    assert made.stages == epl.plan(annotated(1, 1), IDS, num_devices=2).stages


def test_a_wide_stage_divides_its_activations() -> None:
    narrow = epl.plan(annotated(1, 1), IDS, num_devices=2)
    registry.reset()
    wide = epl.plan(annotated(1, 2), IDS, num_devices=3)
    assert wide.stages[0].activations == narrow.stages[0].activations
    assert wide.stages[1].activations == (narrow.stages[1].activations or 0) // 2


def test_without_inputs_only_the_devices() -> None:
    made = epl.plan(annotated(1, 1), num_devices=4)
    assert made.stages == ()
    assert [t.devices for t in made.taskgraphs] == [((0,), (2,)), ((1,), (3,))]


@pytest.mark.parametrize("devices", [None, 1, 8])
def test_an_unannotated_model_is_data_parallel_and_needs_no_recording(devices: int | None) -> None:
    class Refuses(Net):
        def forward(self, ids: torch.Tensor, labels: Any = None) -> Any:
            raise AssertionError("was run")

    made = epl.plan(Refuses(), IDS, num_devices=devices)
    assert (made.num_replicas, made.stages) == (devices or 1, ())


def test_scopes_in_the_forward_are_planned_and_forgotten() -> None:
    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with epl.replicate(1):
                x = self.a(x)
            with epl.replicate(2):
                return self.b(x)

    net, x = Scoped(), torch.zeros(4, 4)
    for _ in range(2):
        made = epl.plan(net, x, num_devices=6)
        assert [(t.strategy, stage.modules) for t, stage in zip(made.taskgraphs, made.stages, strict=True)] == [
            ("replicate(1)", ("a",)),
            ("replicate(2)", ("b",)),
        ]
    assert registry.taskgraphs == ()


def test_tied_weights_are_named() -> None:
    net = annotated(1, 1)
    net.head.weight = net.embed.weight
    made = epl.plan(net, IDS, num_devices=2)
    assert made.stages[0].tied == made.stages[1].tied == ("embed.weight",)
    assert "tied: embed.weight is held by stages 0, 1" in str(made)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_automatic_stages(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    settings(monkeypatch, auto_auto_parallel=True, pipeline_num_stages=stages)
    net = Net()
    made = epl.plan(net, IDS, num_devices=2 * stages, num_micro_batch=4)
    assert (made.num_replicas, made.devices_per_replica, len(made.stages)) == (2, stages, stages)
    called = [module for stage in made.stages for module in stage.modules]
    assert called == ["embed", *(f"blocks.{n}" for n in range(6)), "head"]
    times = [stage.time or 0 for stage in made.stages]
    assert max(times) < 2 / stages
    assert f"automatic stages: 8 parts cut into {stages}" in str(made)
    assert epl.taskgraphs(net).implicit  # nothing was annotated


def test_interleaved_automatic_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(
        monkeypatch,
        auto_auto_parallel=True,
        pipeline_num_stages=2,
        pipeline_num_chunks=2,
        pipeline_strategy="Interleaved",
    )
    made = epl.plan(Net(), IDS, num_devices=4, num_micro_batch=4)
    assert (len(made.stages), made.devices_per_replica, made.num_replicas) == (4, 2, 2)
    assert made.taskgraphs[0].devices == made.taskgraphs[2].devices == ((0,), (2,))


def test_stages_over_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch, auto_auto_parallel=True, pipeline_num_stages=4)
    net = Net()
    assert "span nodes" not in str(epl.plan(net, IDS, num_devices=8, devices_per_node=4))
    text = str(epl.plan(net, IDS, num_devices=4, devices_per_node=2))
    assert "stages span nodes: values cross between stage_1 and stage_2" in text


def test_annotations_win_over_automatic_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch, auto_auto_parallel=True, pipeline_num_stages=3)
    made = epl.plan(annotated(1, 1), IDS, num_devices=2)
    assert [stage.taskgraph for stage in made.stages] == ["a", "b"]
    assert "auto.auto_parallel has no effect: the model has annotations, and they win" in str(made)


def test_automatic_without_a_number_of_stages_is_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch, auto_auto_parallel=True)
    made = epl.plan(Net(), IDS, num_devices=4)
    assert made.num_replicas == 4
    assert "pipeline.num_stages is not set" in str(made)


def test_the_settings_of_init_are_used() -> None:
    epl.init(epl.Config({"pipeline.strategy": "PreferForward", "pipeline.num_micro_batch": 4}))
    try:
        text = str(epl.plan(annotated(1, 1), IDS, num_devices=2))
        assert "schedule: PreferForward, 4 micro batches" in text
        assert "4 micro batches, " in text.splitlines()[3]
    finally:
        Env.get().close()
        Env._current = None


def test_what_cannot_be_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="start 2 or 4 devices"):
        epl.plan(annotated(1, 1), IDS, num_devices=3)
    for wrong in (0, True, 2.0):
        with pytest.raises(UsageError, match="num_devices is a number of devices"):
            epl.plan(annotated(1, 1), IDS, num_devices=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a model"):
        epl.plan(IDS, num_devices=2)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="inside the scope"), epl.replicate(1):
        epl.plan(Net(), IDS)
    settings(monkeypatch, auto_auto_parallel=True, pipeline_num_stages=30)
    with pytest.raises(PlanError, match="30 stages are asked for, and the model has"):
        epl.plan(Net(), IDS, num_devices=30)


def test_a_cycle_is_refused_with_the_line() -> None:
    class Back(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with epl.replicate(1, name="attention"):
                self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            with epl.replicate(1, name="experts"):
                self.middle = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x)))

    with pytest.raises(PlanError, match=r"'middle' \(.*test_foresee.py:\d+\) of 'experts' feeds 'last'"):
        epl.plan(Back(), torch.zeros(2, 4), num_devices=2)


def test_works_under_no_grad_and_with_a_frozen_part() -> None:
    net = annotated(1, 1)
    net.blocks[0].requires_grad_(False)
    with torch.no_grad():
        made = epl.plan(net, IDS, num_devices=2)
    assert all(stage.activations for stage in made.stages)
