"""Hugging Face models as they are, their layers under split beside ranks with rows of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import epl
from tests.harness import run_ranks
from tests.parity.compare import Run, assert_same

WORDS, LENGTH, ROWS, RANKS = 24, 7, 4, 2


def _llama(attention: str) -> tuple[Any, list[Any]]:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    return model, [model.model.layers]


def _bart(attention: str) -> tuple[Any, list[Any]]:
    config = transformers.BartConfig(
        vocab_size=WORDS,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        attn_implementation=attention,
    )
    model: Any = transformers.BartForConditionalGeneration(config)
    return model, [model.model.encoder.layers, model.model.decoder.layers]


MODELS = {"llama": _llama, "bart": _bart}


def _train(kind: str, attention: str, mask: str, how: dict[str, Any], annotated: bool) -> Run:
    torch.manual_seed(1)
    model, layers = MODELS[kind](attention)
    model.double()
    own = slice(None)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if annotated:
        epl.annotate(epl.split(2), *layers)
        model, optimizer = epl.parallelize(model, optimizer)
        rank = epl.Env.get().cluster.rank
        own = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
    losses = []
    for _ in range(2):
        ids = torch.randint(3, WORDS, (ROWS, LENGTH))
        given = {"attention_mask": torch.ones_like(ids)}
        if mask == "padded":
            given["attention_mask"][-1, -2:] = 0  # of the last rank's rows only
        elif mask == "none":
            given = {}
        given = {name: value[own] for name, value in given.items()}
        optimizer.zero_grad()
        loss = model(input_ids=ids[own], labels=ids[own], **given, **how).loss
        loss.backward()
        optimizer.step()
        losses.append(epl.global_mean(loss).item() if annotated else loss.item())
    return Run(losses, epl.full_state_dict(model) if annotated else model.state_dict())


def _on_a_rank(micro_batches: int, *case: Any) -> Run:
    settings = {
        "cluster.colocate_split_and_replicate": True,
        "communication.timeout": 60,
        "pipeline.num_micro_batch": micro_batches,
    }
    epl.init(epl.Config(settings))
    epl.set_default_strategy(epl.replicate(2))
    return _train(*case, annotated=True)


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.full)])
def test_the_cache_that_a_model_makes_for_itself(attention: str) -> None:
    # Layers are given a key-value cache, an object: in the example of a call that the chooser runs, it stayed a node of the recording.
    case = "llama", attention, "padded", {}
    expected = _train(*case, annotated=False)
    for found in run_ranks(_on_a_rank, 2, 1, *case):
        assert_same(found, expected, 1e-5)  # parts of them compute in float32


@pytest.mark.parametrize(
    ("kind", "attention", "mask", "micro_batches"),
    [
        ("llama", "sdpa", "padded", 2),
        ("bart", "sdpa", "none", 1),
        pytest.param("bart", "eager", "padded", 1, marks=pytest.mark.full),
    ],
)
def test_a_mask_that_the_running_forward_leaves_out(kind: str, attention: str, mask: str, micro_batches: int) -> None:
    # Masks of ones are not built, but while a forward is recorded nobody knows that they are ones: layers were called otherwise than
    # recorded, on all ranks or, where some have no padding, on some.
    case = kind, attention, mask, {"use_cache": False}
    expected = _train(*case, annotated=False)
    for found in run_ranks(_on_a_rank, 2, micro_batches, *case):
        assert_same(found, expected, 1e-5)  # parts of them compute in float32
