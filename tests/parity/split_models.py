"""Hugging Face models from small configurations, unmodified, with parts of them under split; plain and under epl."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import epl
from epl.parallel.split.ranks import GroupRanks
from tests.parity.compare import Run
from tests.parity.hugging_face import KINDS, LAYERS, WORDS, Sentences, optimizer_of

ROWS, STEPS = 4, 3
_SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": LAYERS - 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def _qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=8, **_SMALL))


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        num_local_experts=4,
        experts_implementation="eager",  # the other one has no float64
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.05,
        **_SMALL,
    )
    return transformers.MixtralForCausalLM(config)


@dataclass(frozen=True)
class Kind:
    """A model, and its layers."""

    make: Callable[[], nn.Module]
    layers: Callable[[Any], list[nn.Module]]


SPLIT_KINDS = {
    "llama": Kind(KINDS["llama"].make, lambda m: [m.model.layers]),
    "gpt2": Kind(KINDS["gpt2"].make, lambda m: [m.transformer.h]),
    "bert": Kind(KINDS["bert"].make, lambda m: [m.bert.encoder.layer]),
    "t5": Kind(KINDS["t5"].make, lambda m: [m.encoder.block, m.decoder.block]),
    "qwen3": Kind(_qwen3, lambda m: [m.model.layers]),
    "mixtral": Kind(_mixtral, lambda m: [m.model.layers]),
}


@dataclass(frozen=True)
class ModelCase:
    """One line of the table."""

    kind: str
    whole: bool = False
    """The whole model is under split, not only its layers."""
    optimizer: str = "sgd"
    ranks: int = 2
    stages: int = 1

    @property
    def replicas(self) -> int:
        return self.ranks // (2 * self.stages)

    @property
    def micro_batches(self) -> int:
        return 2 if self.stages > 1 else 1


def _annotate(case: ModelCase, model: nn.Module) -> None:
    kind = SPLIT_KINDS[case.kind]
    if case.stages > 1:
        pieces = KINDS[case.kind].pieces(model)
        half = len(pieces) // 2
        epl.annotate(epl.split(2, name="first"), *pieces[:half])
        epl.annotate(epl.split(2, name="second"), *pieces[half:])
    elif case.whole:
        epl.annotate(epl.split(2), model)
    else:
        epl.annotate(epl.split(2), *kind.layers(model))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], mean: Any) -> list[float]:
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(mean(loss).item())
    return losses


def _rows(case: ModelCase) -> list[dict[str, torch.Tensor]]:
    found = Sentences(case.kind, ROWS * case.replicas * case.micro_batches * STEPS)
    rows = [found[n] for n in range(len(found))]
    if case.replicas > 1:  # replicas take the mean over their own labels: with equal counts it is that of all
        for row in rows:
            row["labels"] = row["input_ids"]
    return rows


def _listing(name: str, plain: Callable[..., Any], sent: list[str]) -> Callable[..., Any]:
    def call(self: GroupRanks, *args: Any) -> Any:
        sent.append(name)
        return plain(self, *args)

    return call


@contextlib.contextmanager
def _counted() -> Iterator[list[str]]:
    """Inside, what split values send is listed."""
    sent: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in ("all_reduce_", "all_gather", "all_to_all"):
            stack.enter_context(mock.patch.object(GroupRanks, name, _listing(name, getattr(GroupRanks, name), sent)))
        yield sent


def under_epl(case: ModelCase) -> tuple[Run, list[str], float]:
    """The script with epl's lines; runs on every rank. Also what split values send in a step, and which part of the model is here."""
    epl.init(epl.Config({"communication.timeout": 60, "pipeline.num_micro_batch": case.micro_batches}))
    torch.manual_seed(1)
    model = SPLIT_KINDS[case.kind].make().double()
    _annotate(case, model)
    optimizer = optimizer_of(case.optimizer, model)
    loader = DataLoader(_rows(case), batch_size=ROWS)
    epl.parallelize(model, optimizer, loader)
    with _counted() as sent:
        losses = _train(model, optimizer, loader, epl.global_mean)
    here = sum(p.numel() for p in model.parameters() if p.grad is not None)
    state = epl.full_state_dict(model)
    assert len(sent) % STEPS == 0
    return Run(losses, state), sent[: len(sent) // STEPS], here / sum(p.numel() for p in state.values())


def all_under_epl(cases: list[ModelCase]) -> list[tuple[Run, list[str], float]]:
    """One after the other, in the same processes."""
    return [under_epl(case) for case in cases]


def on_one_device(case: ModelCase) -> Run:
    """The plain script."""
    torch.manual_seed(1)
    model = SPLIT_KINDS[case.kind].make().double()
    optimizer = optimizer_of(case.optimizer, model)
    loader = DataLoader(_rows(case), batch_size=ROWS * case.replicas * case.micro_batches)
    return Run(_train(model, optimizer, loader, lambda loss: loss), model.state_dict())
