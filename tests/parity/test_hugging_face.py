"""Hugging Face models as people use them, unmodified, over stages on real ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

import epl
from epl.errors import EplError
from tests.harness import preload, run_ranks
from tests.parity.compare import Run, assert_same
from tests.parity.hugging_face import KINDS, Case, Sentences, annotate, on_one_device, optimizer_of, under_epl

preload("tests.parity.hugging_face")
TOLERANCE = 1e-6  # losses are computed in float32, whatever the model's dtype

CASES = [
    Case("gpt2", 2, optimizer="adamw"),
    Case("gpt2", 3, count="tensor"),
    Case("gpt2", 2, automatic=True, count="number", micro_batches=3),
    Case("bert", 3, optimizer="adamw"),
    Case("bert", 2, automatic=True),
    Case("llama", 2, count="number"),
    Case("llama", 3, automatic=True, optimizer="adamw"),
    Case("t5", 3),
    Case("t5", 2, automatic=True, optimizer="adamw"),
]


def _name(case: Case) -> str:
    return f"{case.kind}-{case.stages}{'-auto' if case.automatic else ''}-{case.optimizer}-{case.count}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_stages_equal_one_device(case):
    expected = on_one_device(case)
    for found in run_ranks(under_epl, case.stages, case, timeout=90):
        assert_same(found, expected, TOLERANCE)


# --- scripts that run plainly (stages = 0) and over stages --------------------------------------------------------------


def begin(kind: str, stages: int, change: Callable[[Any], object] = lambda model: None) -> Any:
    """The model, annotated if there are stages."""
    if stages:
        epl.init(epl.Config({"communication.timeout": 60, "pipeline.num_micro_batch": 2}))
    torch.manual_seed(1)
    model = KINDS[kind].make().double()
    change(model)
    if stages:
        annotate(model, kind, stages)
    return model


def batch_of(kind: str, length: int = 9) -> dict[str, torch.Tensor]:
    rows = Sentences(kind, 4, length)
    return {name: torch.stack([rows[n][name] for n in range(4)]) for name in rows[0]}


def steps(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module, stages: int) -> dict[str, torch.Tensor]:
    return epl.full_state_dict(model) if stages else model.state_dict()


def assert_like(found: Any, expected: Any) -> None:
    """Numbers within the tolerance, everything else equal."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_like(found[name], expected[name])
    elif isinstance(expected, torch.Tensor | float):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    else:
        assert found == expected


def _trained(kind: str, stages: int, change: Callable[[Any], object], lengths: tuple[int, ...]) -> Run:
    model = begin(kind, stages, change)
    optimizer = optimizer_of("sgd", model)
    if stages:
        epl.parallelize(model, optimizer)
    losses = steps(model, optimizer, [batch_of(kind, length) for length in lengths])
    return Run(losses, whole(model, stages))


def check_trained(
    kind: str,
    change: Callable[[Any], object],
    lengths: tuple[int, ...] = (9, 9, 9),
    plainly: Callable[[Any], object] | None = None,
) -> None:
    """Training with a changed model is the same over stages as on one device, where it may be changed otherwise."""
    expected = _trained(kind, 0, plainly or change, lengths)
    for found in run_ranks(_trained, 2, kind, 2, change, lengths):
        assert_same(found, expected, TOLERANCE)


def nothing(model: Any) -> None:
    """As it is."""


# --- what a call returns ------------------------------------------------------------------------------------------------


def _outputs(kind: str, stages: int) -> dict[str, Any]:
    model = begin(kind, stages)
    if stages:
        epl.parallelize(model)
    batch = batch_of(kind)
    logits = "start_logits" if kind == "bert" else "logits"
    out = model(**batch)
    found = {"type": type(out).__name__, "keys": list(out)}
    out.loss.backward()
    found |= {"loss": out.loss.item(), "logits": getattr(out, logits).detach().clone()}
    found |= {"by name": torch.equal(out[logits], getattr(out, logits)), "by number": out[0].item()}
    as_tuple = model(**batch, return_dict=False)
    found |= {"tuple": (type(as_tuple).__name__, len(as_tuple)), "its logits": as_tuple[1].detach().clone()}
    states = model(**batch, output_hidden_states=True)
    states = states.decoder_hidden_states if kind == "t5" else states.hidden_states
    found |= {f"state {n}": state.detach().clone() for n, state in enumerate(states)}
    labels = {"labels", "start_positions", "end_positions"}
    with torch.inference_mode():
        unlabelled = {name: t for name, t in batch.items() if name not in labels}
        if kind == "t5":
            unlabelled["decoder_input_ids"] = batch["input_ids"]
        found["predicted"] = model(**unlabelled)[logits].argmax(-1).tolist()
    return found


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_outputs_are_read_on_every_rank(kind):
    expected = _outputs(kind, 0)
    for found in run_ranks(_outputs, 2, kind, 2):
        assert_like(found, expected)


def _touched_cache() -> list[str]:
    model = begin("llama", 2)
    epl.parallelize(model)
    found = model(**batch_of("llama"))
    texts = [repr(found.past_key_values)]
    for use in (lambda cache: cache.get_seq_length(), lambda cache: model(**batch_of("llama"), past_key_values=cache)):
        with pytest.raises(EplError) as error:
            use(found.past_key_values)
        texts.append(str(error.value))
    found.loss.backward()
    return texts


def test_the_cache_among_the_outputs_says_what_it_is_when_touched():
    for shown, *errors in run_ranks(_touched_cache, 2):
        assert "stay on the stages" in shown
        assert all("use_cache=False" in text for text in errors)


# --- models from elsewhere ----------------------------------------------------------------------------------------------


def _from_directory(folder: str, stages: int) -> Run:
    if stages:
        epl.init(epl.Config({"communication.timeout": 60, "pipeline.num_micro_batch": 2}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if stages:
        annotate(model, "gpt2", stages)
    optimizer = optimizer_of("adamw", model)
    if stages:
        epl.parallelize(model, optimizer)
    return Run(steps(model, optimizer, [batch_of("gpt2")] * 2), whole(model, stages))


def test_from_pretrained_of_a_directory(tmp_path):
    torch.manual_seed(4)
    KINDS["gpt2"].make().double().save_pretrained(tmp_path)
    expected = _from_directory(str(tmp_path), 0)
    for found in run_ranks(_from_directory, 2, str(tmp_path), 2):
        assert_same(found, expected, TOLERANCE)


def _built_on_meta(kind: str, stages: int, when: str, everywhere: bool) -> tuple[Run, dict[str, torch.Tensor], int]:
    settings: dict[str, object] = {"communication.timeout": 60, "pipeline.num_micro_batch": 2 if stages else 1}
    epl.init(epl.Config(settings))
    torch.manual_seed(1)
    with torch.device("meta"):
        model = KINDS[kind].make().double()
    if stages:
        annotate(model, kind, stages)
    optimizer = optimizer_of("adamw", model)
    epl.parallelize(model, optimizer)
    batch, state = batch_of(kind), None
    if everywhere or epl.Env.get().cluster.is_first_rank:
        state = {
            name: t for name, t in begin(kind, 0).state_dict().items() if name != "lm_head.weight" or kind != "gpt2"
        }
    if when == "after":
        with torch.no_grad():
            model(**batch).loss.item()
    if when != "never":
        epl.load_full_state_dict(model, state)
    losses = steps(model, optimizer, [batch, batch])
    here = sum(p.nbytes for name, p in model.named_parameters() if p.grad is not None)
    return Run(losses, epl.full_state_dict(model)), dict(model.named_buffers()), here


@pytest.mark.parametrize(
    ("kind", "stages", "when", "everywhere"),
    [
        ("llama", 2, "before", False),
        ("gpt2", 2, "after", True),
        ("bert", 2, "before", True),
        ("llama", 0, "after", False),
    ],
)
def test_a_model_on_meta_is_loaded_part_by_part(kind, stages, when, everywhere):
    plain = begin(kind, 0)
    expected = Run(steps(plain, optimizer_of("adamw", plain), [batch_of(kind)] * 2), plain.state_dict())
    size = sum(p.nbytes for p in plain.parameters())
    for found, buffers, here in run_ranks(_built_on_meta, 2, kind, stages, when, everywhere):
        assert_same(found, expected, TOLERANCE)
        assert_like(buffers, dict(plain.named_buffers()))
        assert here < 0.8 * size if stages else here == size


def test_a_model_on_meta_that_nobody_loads_is_initialised_alike_whatever_its_stages():
    runs = [run_ranks(_built_on_meta, 2, "t5", stages, "never", False) for stages in (2, 0)]
    expected = runs[1][0][0]
    for found, _, _ in runs[0] + runs[1]:
        assert_same(found, expected, TOLERANCE)
    trained = begin("t5", 0)
    for name, parameter in trained.named_parameters():  # the numbers are of the kind that the model's own code makes
        drawn = expected.state[name].std().item() + 0.05
        assert 0.5 < drawn / (parameter.std().item() + 0.05) < 2, name


# --- ways of training ---------------------------------------------------------------------------------------------------


def _checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable()


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_gradient_checkpointing(kind):
    check_trained(kind, _checkpointed, plainly=nothing)


def _evaluating(model: Any) -> None:
    model.eval()


def test_training_in_evaluation_mode_and_over_many_lengths():
    check_trained("bert", _evaluating, lengths=(9, 5, 12, 7, 9, 3))


def _only_the_last_layer(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".h.2." in name)


def _only_the_first_layer(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".h.0." in name)


class Adapted(nn.Module):
    """A frozen linear layer and two small matrices that are trained."""

    def __init__(self, base: nn.Module, features: tuple[int, int]) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(features[0], 2, dtype=torch.float64) * 0.1)
        self.up = nn.Parameter(torch.randn(2, features[1], dtype=torch.float64) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + x @ self.down @ self.up
        return y


def _adapted(model: Any) -> None:
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapted(block.attn.c_attn, (16, 48))


@pytest.mark.parametrize("change", [_only_the_last_layer, _only_the_first_layer, _adapted])
def test_a_frozen_base(change):
    check_trained("gpt2", change)


def _dropped_out(seeds: tuple[int, ...]) -> list[list[float]]:
    return [_dropped_out_once(seed) for seed in seeds]


def _dropped_out_once(seed: int) -> list[float]:
    epl.init(epl.Config({"communication.timeout": 60, "pipeline.num_micro_batch": 2}))
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**begin("llama", 0).config.to_dict(), "attention_dropout": 0.5})
    model = transformers.LlamaForCausalLM(config)
    annotate(model, "llama", 2)
    optimizer = optimizer_of("sgd", model)
    epl.parallelize(model, optimizer)
    torch.manual_seed(seed)
    return steps(model, optimizer, [batch_of("llama")] * 3)


def test_dropout_differs_from_step_to_step_and_is_repeated_with_its_seed():
    one, other = run_ranks(_dropped_out, 2, (3, 3, 4))
    assert one == other
    assert one[0] == one[1] != one[2]
    assert len(set(one[0])) == 3


# --- layer drop ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def drawn_as_by_epl(call: int) -> Iterator[None]:
    """Inside, single random numbers are those that a model under epl draws in its n-th call."""
    generator, rand = torch.Generator().manual_seed(call), torch.rand
    with mock.patch("torch.rand", lambda *shape: rand(*shape, generator=generator)):
        yield


def _layers_dropped(kind: str, stages: int, count: int) -> Run:
    model = begin(kind, stages)
    optimizer = optimizer_of("sgd", model)
    if stages:
        epl.parallelize(model, optimizer)
    losses = []
    for call in range(1, count + 1):
        with contextlib.nullcontext() if stages else drawn_as_by_epl(call):
            losses += steps(model, optimizer, [batch_of(kind)])
    return Run(losses, whole(model, stages))


@pytest.mark.parametrize("kind", ["opt", "bart"])
def test_layer_drop_drops_the_same_layers_on_every_rank(kind):
    expected = _layers_dropped(kind, 0, 6)
    for found in run_ranks(_layers_dropped, 2, kind, 2, 6, timeout=90):
        assert_same(found, expected, TOLERANCE)


# --- generating, saving, loading ----------------------------------------------------------------------------------------


def _generated(kind: str, stages: int, when: str) -> Any:
    model = begin(kind, stages)
    if not stages:
        epl.init(epl.Config({"communication.timeout": 60, "pipeline.num_micro_batch": 2}))
    epl.parallelize(model)
    words = torch.arange(2, 12).reshape(2, 5)
    if when == "after":
        model(**batch_of(kind)).loss.backward()
    if not stages:
        text = model.generate(words, max_new_tokens=3, do_sample=False, pad_token_id=0)
        copied = copy.deepcopy(model)
        nn.init.zeros_(copied.transformer.ln_f.weight)
        return text, copied.generate(words, max_new_tokens=3, do_sample=False, pad_token_id=0)
    with pytest.raises(EplError) as error:
        model.generate(words, max_new_tokens=3)
    state = epl.full_state_dict(model)
    one = type(model)(model.config).double()
    one.load_state_dict(state)
    return str(error.value), one.generate(words, max_new_tokens=3, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(("kind", "when"), [("gpt2", "before"), ("t5", "after")])
def test_generate_is_refused_with_what_to_do_instead(kind, when):
    words = torch.arange(2, 12).reshape(2, 5)
    expected = begin(kind, 0).generate(words, max_new_tokens=3, do_sample=False, pad_token_id=0)
    for text, generated in run_ranks(_generated, 2, kind, 2, when):
        assert "one.load_state_dict(state); one.generate(...)" in text
        assert torch.equal(generated, expected)


def test_generate_works_where_every_rank_has_the_whole_model():
    words = torch.arange(2, 12).reshape(2, 5)
    expected = begin("gpt2", 0).generate(words, max_new_tokens=3, do_sample=False, pad_token_id=0)
    for generated, by_the_copy in run_ranks(_generated, 2, "gpt2", 0, "after"):
        assert torch.equal(generated, expected)
        assert by_the_copy[:, 5:].tolist() == [[0] * 3] * 2  # all words are alike to it


def _saved(folder: str) -> dict[str, Any]:
    model = begin("gpt2", 2)
    optimizer = optimizer_of("sgd", model)
    epl.parallelize(model, optimizer)
    batch = batch_of("gpt2")
    steps(model, optimizer, [batch])
    state = epl.full_state_dict(model)
    if epl.Env.get().cluster.is_first_rank:
        model.save_pretrained(folder, state_dict=dict(state))
    errors = []
    for save in (
        lambda: torch.save(model.state_dict(), Path(folder) / "part.pt"),
        lambda: model.save_pretrained(folder),
    ):
        with pytest.raises(EplError) as error:
            save()
        errors.append(str(error.value))
    before = model(**batch).loss.item()
    steps(model, optimizer, [batch])
    model.load_state_dict(state)
    return {"state": state, "errors": errors, "losses": (before, model(**batch).loss.item())}


def test_the_whole_model_is_saved_and_loaded(tmp_path):
    for found in run_ranks(_saved, 2, str(tmp_path)):
        assert all("epl.full_state_dict(model)" in text for text in found["errors"])
        assert found["losses"][0] == found["losses"][1]
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        assert_like(dict(again.state_dict()), found["state"])
