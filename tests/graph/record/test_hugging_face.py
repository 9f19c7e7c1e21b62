"""Unmodified Hugging Face models, called as people call them, written down and replayed exactly."""

from __future__ import annotations

import pytest
import torch

from epl.errors import RecordingError
from epl.graph.record import Recordings
from epl.graph.record.standin import StaysOnStages
from epl.graph.record.steps import changed
from tests.graph.record.replaying import assert_same, check, in_parts, owners, recordings_of, run

hf = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50, "num_hidden_layers": 2}
MASKED = 1e-5
"""Tolerance for a Llama without cache: to a fake tensor transformers always gives its causal mask, to a real one sometimes only
the word `is_causal`, and which kernel that is, and so the last bits of the gradients, depends on the processor."""
SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}


def gpt2():
    config = hf.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config), "transformer.h"


def llama(**more):
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=1, **{**SMALL, **more})), "model.layers"


def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(num_key_value_heads=1, num_local_experts=3, **SMALL)), "model.layers"


def mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(num_key_value_heads=1, **SMALL)), "model.layers"


def gemma2():
    config = hf.Gemma2Config(num_key_value_heads=1, head_dim=8, sliding_window=4, **SMALL)
    return hf.Gemma2ForCausalLM(config), "model.layers"


def opt(drop: float):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "ffn_dim": 32, "vocab_size": 50, "num_hidden_layers": 4}
    config = hf.OPTConfig(word_embed_proj_dim=16, layerdrop=drop, max_position_embeddings=32, **sizes)
    return hf.OPTForCausalLM(config), "model.decoder.layers"


def bert():
    return hf.BertForQuestionAnswering(hf.BertConfig(max_position_embeddings=32, **SMALL)), "bert.encoder.layer"


def halves(model, layers: str) -> dict[str, list[str]]:
    count = len(model.get_submodule(layers))
    names = [f"{layers}.{i}" for i in range(count)]
    return {"first": names[: count // 2], "second": names[count // 2 :]}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 50, shape)


def padding(*shape: int) -> torch.Tensor:
    mask = torch.ones(*shape, dtype=torch.long)
    mask[-1, -2:] = 0
    mask[0, -1:] = 0
    return mask


@pytest.mark.parametrize("make", [gpt2, llama, mixtral])
@pytest.mark.parametrize("training", [True, False])
def test_causal_models_with_their_loss_and_cache(make, training):
    model, layers = make()
    ids = tokens(4, 6)
    call = check(model.train(training), ids, labels=ids, attention_mask=padding(4, 6), stages=halves(model, layers))
    assert [node.name for node in call.frontier] == ["lm_head"]
    assert call.batch_dim(call.frontier[0]) == 0
    cache = in_parts(call, call.input_tensors((ids,), {"labels": ids, "attention_mask": padding(4, 6)})).past_key_values
    assert isinstance(cache, StaysOnStages)
    assert not any(node.target is changed for node in call.whole.nodes), "every layer uses its own part of the cache"
    with pytest.raises(RecordingError, match="use_cache=False"):
        cache.get_seq_length()


@pytest.mark.parametrize("make", [mistral, gemma2])
def test_a_cache_with_a_sliding_window(make):
    """Its layers hold a tensor from the start, which counted as filled by the first module that was given the cache."""
    model, layers = make()
    ids = tokens(4, 6)
    call = check(model, ids, labels=ids, attention_mask=padding(4, 6), stages=halves(model, layers), tolerance=MASKED)
    assert [node.name for node in call.frontier] == ["lm_head"]
    assert not any(node.target is changed for node in call.whole.nodes), "every layer uses its own part of the cache"


def test_without_cache_and_with_hidden_states():
    model, layers = llama()
    check(model, tokens(4, 6), use_cache=False, stages=halves(model, layers), tolerance=MASKED)
    call = check(model, tokens(4, 6), output_hidden_states=True, stages=halves(model, layers))
    assert len(call.whole.outputs.nodes) == 4
    check(model, tokens(4, 6), return_dict=False, stages=halves(model, layers))
    check(model, inputs_embeds=torch.randn(4, 6, 16), stages=halves(model, layers))


def test_attentions_from_inside_a_layer_are_refused():
    model, layers = llama(attn_implementation="eager")
    with pytest.raises(RecordingError, match="not returned by it"):
        recordings_of(model, halves(model, layers)).of((tokens(4, 6),), {"output_attentions": True}, 2)


def test_question_answering():
    model, layers = bert()
    ends = {"start_positions": torch.tensor([1, 2, 9, 0]), "end_positions": torch.tensor([2, 2, 3, 5])}
    arguments = dict(attention_mask=padding(4, 6), token_type_ids=torch.zeros(4, 6, dtype=torch.long), **ends)
    check(model, tokens(4, 6), stages=halves(model, layers), **arguments)
    check(model.eval(), tokens(5, 6), stages=halves(model, layers), micro_batches=3)


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("cut", ["towers", "layers"])
def test_encoder_and_decoder(kind, cut):
    if kind == "t5":
        sizes = {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": 50,
            "decoder_start_token_id": 0,
        }
        model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes))
        first, second, layers = "encoder", "decoder", "block"
    else:
        sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        more = {
            "d_model": 16,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "vocab_size": 50,
            "max_position_embeddings": 32,
        }
        config = hf.BartConfig(decoder_start_token_id=2, forced_eos_token_id=2, **sizes, **more, **SPECIAL)
        model = hf.BartForConditionalGeneration(config)
        first, second, layers = "model.encoder", "model.decoder", "layers"
    stages = {"one": [first], "two": [second]}
    if cut == "layers":
        stages = {"one": [f"{first}.{layers}"], "two": [f"{second}.{layers}.0"], "three": [f"{second}.{layers}.1"]}
    labels = tokens(4, 5)
    call = check(model, tokens(4, 6), attention_mask=padding(4, 6), labels=labels, stages=stages)
    assert {call.batch_dim(node) for node in call.frontier} == {0}


def test_gradient_checkpointing():
    model, layers = llama()
    model.activation_checkpointing_enable()
    check(model, tokens(4, 6), use_cache=False, stages=halves(model, layers), tolerance=MASKED)


def test_a_frozen_base():
    model, layers = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.1.mlp" in name)
    call = check(model, tokens(4, 6), labels=tokens(4, 6), stages=halves(model, layers))
    first = next(node for node in call.whole.nodes if node.target == "transformer.h.0")
    assert not call.spec(first).requires_grad


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model, layers = llama()
    call = recordings_of(model, halves(model, layers)).of((tokens(4, 6),), {}, 2)
    assert call.spec(call.frontier[0]).device.type == "cpu"
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


class TestLayerDrop:
    """Layers that are left out at random, alike on all ranks, and others in every call."""

    def test_is_drawn_for_every_call_and_replayed(self):
        model, layers = opt(0.5)
        ids = tokens(4, 6)
        recordings = recordings_of(model, halves(model, layers))
        kept = set()
        for seed in range(6):
            call = recordings.of((ids,), {}, 2, draw_seed=seed)
            again = recordings.of((ids,), {}, 2, draw_seed=seed)
            assert again == call
            assert_same(list(again.given), list(call.given))
            assert len(call.given) == 4
            drawn = [float(number) >= 0.5 for number in call.given]
            names = [f"{layers}.{i}" for i, keep in enumerate(drawn) if keep]
            assert [n.target for n in call.whole.nodes if n.op == "call_module" and layers in n.target] == names
            kept.add(tuple(names))
            made, _ = run(model, lambda: in_parts(call, [ids]))  # noqa: B023
            real, _ = run(model, lambda: self.without(model, drawn, ids))  # noqa: B023
            assert torch.equal(made.logits, real.logits)
        assert len(kept) > 2

    def without(self, model, keep, ids):
        decoder = model.model.decoder
        layers, drop = decoder.layers, decoder.layerdrop
        try:
            decoder.layers = torch.nn.ModuleList([each for each, kept in zip(layers, keep, strict=True) if kept])
            decoder.layerdrop = 0.0
            return model(ids, use_cache=False)
        finally:
            decoder.layers, decoder.layerdrop = layers, drop

    def test_is_off_in_evaluation(self):
        model, layers = opt(0.5)
        call = check(model.eval(), tokens(4, 6), stages=halves(model, layers))
        assert call.given == ()


def test_changing_lengths_are_foreseen():
    """Few of many lengths are worked out, and what is foreseen is what is worked out."""
    model, layers = gpt2()
    runs = []
    forward = type(model.transformer.h[0]).forward
    lengths = [5, 30, 12, 7, 20, 25, 9, 16, 28, 6, 22, 11, 18, 27, 14, 8, 23, 29, 10, 19]
    recordings = recordings_of(model, halves(model, layers))

    def counted(self, *args, **kwargs):
        runs.append(args[0].shape)
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.transformer.h[0]), "forward", counted)
        calls = [recordings.of((tokens(4, n),), {"labels": tokens(4, n)}, 2) for n in lengths]
    assert len(runs) <= 10
    for length, call in zip(lengths[::6], calls[::6], strict=True):
        fresh = Recordings(model, owners(model, halves(model, layers)))
        worked_out = fresh.of((tokens(4, length),), {"labels": tokens(4, length)}, 2)
        for size in (4, 2):
            pairs = list(zip(call.by_size[size].nodes, worked_out.by_size[size].nodes, strict=True))
            assert [(a.op, a.target, a.meta.get("spec")) for a, _ in pairs] == [
                (b.op, b.target, b.meta.get("spec")) for _, b in pairs
            ]
    check(model, tokens(4, 13), labels=tokens(4, 13), recordings=recordings)


def test_changing_lengths_of_an_encoder_and_decoder_are_foreseen():
    """T5 hands a position bias from layer to layer, and shifts its labels in place."""
    config = hf.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = hf.T5ForConditionalGeneration(config)
    stages = {"first": ["encoder"], "second": ["decoder.block.0", "decoder.block.1"]}
    recordings, runs = recordings_of(model, stages), []
    forward = type(model.decoder.block[0]).forward

    def counted(self, hidden, *args, **kwargs):
        runs.append(hidden.shape[1])
        return forward(self, hidden, *args, **kwargs)

    lengths = [5, 30, 12, 7, 20, 25, 9, 16, 28, 6, 22, 11, 31, 18, 27, 14]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.decoder.block[0]), "forward", counted)
        for length in lengths:
            recordings.of((tokens(4, length),), {"labels": tokens(4, length)}, 2)
    assert set(runs) == {5, 30, 12, 62}  # and where 31 is beyond the others, twice as far
    for length in (7, 31):
        check(model, tokens(4, length), labels=tokens(4, length), recordings=recordings)
