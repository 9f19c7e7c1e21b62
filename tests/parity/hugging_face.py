"""Hugging Face models from small configurations, as they are, and the script that trains them, plain and under epl."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset

import epl
from tests.parity.compare import Run

transformers.utils.logging.disable_progress_bar()  # it leaves a thread behind
LAYERS, WORDS, LENGTH, ROWS = 3, 48, 9, 14
MICRO_BATCH = 2

Pieces = Callable[[Any], list[nn.Module]]


def _gpt2() -> nn.Module:
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=64, bos_token_id=0, eos_token_id=1, **quiet
    )
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    return transformers.BertForQuestionAnswering(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=LAYERS,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=LAYERS + 3,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        dropout=0.0,
        layerdrop=0.4,
    )
    return transformers.OPTForCausalLM(config)


def _bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=WORDS,
        d_model=16,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        dropout=0.0,
        encoder_layerdrop=0.4,
        decoder_layerdrop=0.4,
    )
    return transformers.BartForConditionalGeneration(config)


@dataclass(frozen=True)
class Kind:
    """A model, and its parts in the order in which they run; the rest of it belongs to nobody."""

    make: Callable[[], nn.Module]
    pieces: Pieces
    causal: bool = True
    """Whether the loss leaves the first of the labels out."""


KINDS = {
    "gpt2": Kind(
        _gpt2, lambda m: [m.transformer.wte, m.transformer.wpe, *m.transformer.h, m.transformer.ln_f, m.lm_head]
    ),
    "bert": Kind(_bert, lambda m: [m.bert.embeddings, *m.bert.encoder.layer, m.qa_outputs]),
    "llama": Kind(_llama, lambda m: [m.model.embed_tokens, *m.model.layers, m.model.norm, m.lm_head]),
    "t5": Kind(_t5, lambda m: [m.encoder, *m.decoder.block, m.decoder.final_layer_norm, m.lm_head], causal=False),
    "opt": Kind(
        _opt,
        lambda m: [
            m.model.decoder.embed_tokens,
            m.model.decoder.embed_positions,
            *m.model.decoder.layers,
            m.model.decoder.final_layer_norm,
            m.lm_head,
        ],
    ),
    "bart": Kind(
        _bart,
        lambda m: [m.model.encoder.embed_tokens, *m.model.encoder.layers, *m.model.decoder.layers, m.lm_head],
        causal=False,
    ),
}


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Rows as a tokenizer gives them. Some rows have many labels that are ignored, some none."""

    def __init__(self, kind: str, rows: int = ROWS, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(3)
        words = torch.randint(2, WORDS, (rows, length), generator=generator)
        mask, labels = torch.ones_like(words), words.clone()
        for row in range(rows):
            labels[row, 1 : 1 + row % (length - 1)] = -100
            mask[row, length - row % 3 :] = 0
        self._columns = {"input_ids": words, "attention_mask": mask, "labels": labels}
        if kind == "bert":
            del self._columns["labels"]
            # A position behind the end is ignored, too.
            self._columns |= {
                "start_positions": torch.arange(rows) % (length + 3),
                "end_positions": torch.arange(rows) % 7,
            }

    def __len__(self) -> int:
        return len(self._columns["input_ids"])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: column[row] for name, column in self._columns.items()}


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    kind: str
    stages: int = 2
    automatic: bool = False
    micro_batches: int = 2
    optimizer: str = "sgd"
    count: Literal["none", "number", "tensor"] = "none"
    """Whether, and how, the script says by how many labels the loss is to be divided."""

    def settings(self) -> dict[str, object]:
        found: dict[str, object] = {"communication.timeout": 60, "pipeline.num_micro_batch": self.micro_batches}
        if self.automatic:
            found |= {"auto.auto_parallel": True, "pipeline.num_stages": self.stages}
        return found


def annotate(model: nn.Module, kind: str, stages: int) -> None:
    """Deal the pieces of a model out over stages."""
    pieces = KINDS[kind].pieces(model)
    for number in range(stages):
        own = pieces[len(pieces) * number // stages : len(pieces) * (number + 1) // stages]
        epl.annotate(epl.replicate(1, name=f"stage_{number}"), *own)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """One that trains what is to be trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(trained, lr=0.003, weight_decay=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], case: Case) -> list[float]:
    """The user's loop."""
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        if case.count != "none":
            labels = batch["labels"][:, 1 if KINDS[case.kind].causal else 0 :]
            count = (labels != -100).sum()
            batch["num_items_in_batch"] = count if case.count == "tensor" else int(count)
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def under_epl(case: Case) -> Run:
    """The script with epl's lines; runs on every rank."""
    epl.init(epl.Config(case.settings()))
    torch.manual_seed(1)
    model = KINDS[case.kind].make().double()
    if not case.automatic:
        annotate(model, case.kind, case.stages)
    optimizer = optimizer_of(case.optimizer, model)
    loader = DataLoader(Sentences(case.kind), batch_size=MICRO_BATCH)
    epl.parallelize(model, optimizer, loader)
    losses = train(model, optimizer, loader, case)
    return Run(losses, epl.full_state_dict(model))


def on_one_device(case: Case) -> Run:
    """The plain script."""
    torch.manual_seed(1)
    model = KINDS[case.kind].make().double()
    optimizer = optimizer_of(case.optimizer, model)
    loader = DataLoader(Sentences(case.kind), batch_size=MICRO_BATCH * case.micro_batches)
    return Run(train(model, optimizer, loader, case), model.state_dict())
