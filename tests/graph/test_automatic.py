"""Automatic stages of recorded models: what is in them, and that they give what the model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epl.errors import PlanError
from epl.graph.automatic import AutomaticStages, automatic_specs, choose_stages, unit_of
from epl.graph.blocks import find_units
from epl.graph.cost import leaf_costs
from epl.graph.record import RecordedCall, Recordings
from epl.graph.staging import graph_nodes, wanted_at_home
from epl.plan import StageCut, cut_stages
from tests.graph.test_staging import run_stages


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Embeddings, blocks, norm, a tied head; a table of positions that no module holds."""

    def __init__(self, layers: int = 6, width: int = 8) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(30, width), nn.Dropout(0.0)
        self.positions = nn.Parameter(torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(ids) + self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def choose(
    model: nn.Module, num_stages: int, *args: Any, **kwargs: Any
) -> tuple[RecordedCall, AutomaticStages, StageCut]:
    recorded = Recordings(model, unit_of(find_units(model, num_stages))).of(args, kwargs, 1)
    costs = leaf_costs(recorded, model, 1, torch.device("cpu"))
    chosen = choose_stages(recorded, model, costs, live=[1] * num_stages)
    cut = cut_stages(
        graph_nodes(recorded, model, chosen.of_call),
        taskgraphs=[spec.name for spec in automatic_specs(num_stages)],
        parameters=chosen.owners(model),
        home=wanted_at_home(recorded),
    )
    return recorded, chosen, cut


IDS = torch.randint(30, (6, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_stages_give_what_the_model_gives(num_stages: int) -> None:
    model = Language()
    recorded, chosen, cut = choose(model, num_stages, IDS)
    assert cut.order == tuple(f"stage_{n}" for n in range(num_stages))
    assert cut.tied == {"embed.weight": (0, num_stages - 1)}
    assert cut.holders["positions"] == (0,)
    assert [chosen.of_call(name, 0) for name in ("embed", "drop")] == ["stage_0"] * 2
    assert set(chosen.owners(model)) == {name for name, _ in model.named_parameters()}
    assert chosen.owners(model)["positions"] is None
    with torch.no_grad():
        torch.testing.assert_close(run_stages(recorded, cut, [IDS]), model(IDS))


def test_more_stages_than_parts_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(
        PlanError, match=r"3 stages are asked for, and the model has 2 parts that can be stages \(0,2\)"
    ):
        choose(model, 3, torch.zeros(2, 4))


def test_the_head_weighs_as_much_as_it_computes() -> None:
    model = Language(layers=4, width=8)
    model.head = nn.Linear(8, 200)
    _, chosen, _ = choose(model, 2, IDS)
    blocks = [chosen.of_call(f"blocks.{n}", 0) for n in range(4)]
    assert blocks.count("stage_0") > blocks.count("stage_1")


def test_a_module_called_over_and_over_is_in_several_stages() -> None:
    class Albert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(30, 8), Block(8), nn.Linear(8, 30)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for _ in range(6):
                x = self.block(x)
            return self.head(x)

    model = Albert()
    units = {"embed": model.embed, "block": model.block, "head": model.head}
    recorded = Recordings(model, unit_of(units)).of((IDS,), {}, 1)
    costs = leaf_costs(recorded, model, 1, torch.device("cpu"))
    chosen = choose_stages(recorded, model, costs, live=[2, 1])
    assert {chosen.of_call("block", 0), chosen.of_call("block", 5), chosen.of_call("block", 9)} == {
        "stage_0",
        "stage_1",
    }
    nodes = graph_nodes(recorded, model, chosen.of_call)
    cut = cut_stages(
        nodes, taskgraphs=["stage_0", "stage_1"], parameters=chosen.owners(model), home=wanted_at_home(recorded)
    )
    assert set(cut.tied) == {f"block.{name}" for name, _ in model.block.named_parameters()}
    with torch.no_grad():
        torch.testing.assert_close(run_stages(recorded, cut, [IDS]), model(IDS))


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama"])
def test_hugging_face_models(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    ends = {"vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    wide = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32, **ends}
    tall = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "decoder_start_token_id": 0, **ends}
    makers = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, n_embd=16, n_head=2, **ends)),
        "bert": lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(**wide)),
        "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**tall)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**wide)),
    }
    torch.manual_seed(0)
    model = makers[name]().eval()
    inputs: dict[str, Any] = {"input_ids": IDS}
    if name == "t5":
        inputs["labels"] = IDS
    recorded, _, cut = choose(model, 3, **inputs)
    assert {edge for edge in cut.edges if edge[1] - edge[0] == 1} == {(0, 1), (1, 2)}
    with torch.no_grad():
        found, expected = run_stages(recorded, cut, recorded.input_tensors((), inputs)), model(**inputs)
    key = "start_logits" if name == "bert" else "logits"
    torch.testing.assert_close(found[key], expected[key])
    if name == "gpt2":
        assert cut.tied == {"transformer.wte.weight": (0, 2)}
