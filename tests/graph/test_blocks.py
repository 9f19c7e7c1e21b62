"""The units that automatic stages are made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from epl.graph.blocks import find_units, structure_of
from epl.plan.table import compact_names


class Block(nn.Module):
    def __init__(self, width: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(experts))


class Tower(nn.Module):
    def __init__(self, layers: int, width: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Block(width, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)


class Net(nn.Module):
    def __init__(self, *towers: Tower) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.towers = nn.ModuleList(towers)
        self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def units(model: nn.Module, num_stages: int = 2) -> list[str]:
    return list(find_units(model, num_stages))


def test_blocks_and_what_is_around_them() -> None:
    assert units(Tower(3)) == ["embed", "layers.0", "layers.1", "layers.2", "norm"]


def test_families_inside_different_parts_are_all_found() -> None:
    found = units(Net(Tower(2), Tower(3)))
    inner = [f"towers.{i}.{part}" for i, n in ((0, 2), (1, 3)) for part in _tower(n)]
    assert found == ["stem", *inner, "head.0", "head.1", "head.2"]


def _tower(layers: int) -> list[str]:
    return ["embed", *(f"layers.{i}" for i in range(layers)), "norm"]


def test_what_repeats_inside_a_block_is_not_cut() -> None:
    assert units(Tower(2, experts=4)) == ["embed", "layers.0", "layers.1", "norm"]


def test_a_first_block_of_another_shape_is_a_unit_too() -> None:
    tower = Tower(3)
    tower.layers[0].bias_table = nn.Embedding(8, 2)
    assert units(tower) == ["embed", "layers.0", "layers.1", "layers.2", "norm"]


def test_a_part_without_blocks_stays_whole() -> None:
    model = nn.ModuleDict({"body": Tower(4), "pooler": Block()})
    assert compact_names(units(model)) == "body.embed, body.layers.0-3, body.norm, pooler"


def test_a_chain_of_layers_is_its_layers() -> None:
    chain = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 1))
    assert units(chain) == ["0", "1", "2.0", "2.1", "3"]


def test_too_few_units_are_opened_further_the_largest_first() -> None:
    model = nn.ModuleDict({"small": Block(2), "large": Block(8)})
    assert units(model, 1) == ["small", "large"]
    assert units(model, 3) == ["small", "large.norm", "large.up"]
    assert units(model, 4) == ["large.norm", "large.up", "small.norm", "small.up"]
    assert len(units(model, 9)) == 4


def test_a_unit_that_holds_more_than_its_share_is_opened() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(5, 4), "backbone": Block(32)})
    assert units(model, 2) == ["a", "b", "backbone.norm", "backbone.up"]


def test_a_shared_module_is_one_unit() -> None:
    tower = Tower(2)
    tower.again = tower.embed
    assert units(tower) == ["embed", "layers.0", "layers.1", "norm"]


def test_models_on_meta_and_lazy_modules() -> None:
    with torch.device("meta"):
        assert len(units(Tower(3))) == 5
    assert units(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))) == ["0", "1"]


def test_structure_looks_at_class_and_shapes() -> None:
    assert structure_of(Block(4)) == structure_of(Block(4))
    assert structure_of(Block(4)) != structure_of(Block(8))
    assert structure_of(nn.Linear(2, 2)) != structure_of(nn.Bilinear(2, 2, 2))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", "transformer.wte, transformer.wpe, transformer.drop, transformer.h.0-3, transformer.ln_f, lm_head"),
        ("bert", "bert.embeddings, bert.encoder.layer.0-3, qa_outputs"),
        ("llama", "model.embed_tokens, model.layers.0-3, model.norm, model.rotary_emb, lm_head"),
    ],
)
def test_hugging_face_models(name: str, expected: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    wide = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.device("meta"):
        model = {
            "gpt2": lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_layer=4, n_embd=16, n_head=2, **small)
            ),
            "bert": lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(**wide, **small)),
            "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**wide, **small)),
        }[name]()
    assert compact_names(units(model)) == expected
