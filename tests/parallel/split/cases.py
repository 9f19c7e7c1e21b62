"""Modules to split, unmodified: each case is a model, the modules in it that are split, how it is run, and an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Case(NamedTuple):
    model: nn.Module
    parts: list[nn.Module]
    run: Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, ...]]
    """Outputs; the loss is made of the first, or of all if there are more than two."""
    x: torch.Tensor


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def alone(model: nn.Module, x: torch.Tensor) -> Case:
    return Case(model, [model], lambda m, i: (m(i),), x)


class MLP(nn.Module):
    def __init__(self, d: int, h: int, bias: bool = True) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(d, h), nn.GELU(), nn.Linear(h, d, bias=bias)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.act(self.a(x)))


@case
def mlp_pair() -> Case:
    return alone(MLP(6, 10), torch.randn(4, 6))


@case
def mlp_three() -> Case:
    layers = nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 5)
    return alone(nn.Sequential(*layers), torch.randn(4, 6))


@case
def linear_norm_linear() -> Case:
    return alone(nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 7)), torch.randn(4, 6))


class Gated(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        if fused:
            self.both = nn.Linear(6, 20, bias=False)
        else:
            self.gate, self.up = nn.Linear(6, 10, bias=False), nn.Linear(6, 10, bias=False)
        self.fused, self.down = fused, nn.Linear(10, 6, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.both(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


@case
def gated_mlp() -> Case:
    return alone(Gated(False), torch.randn(2, 4, 6))


@case
def gated_fused() -> Case:
    return alone(Gated(True), torch.randn(2, 4, 6))


class ParallelBlock(nn.Module):
    """As in GPT-J: both branches are added, one all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(6), MLP(6, 10), MLP(6, 8)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.norm(x)
        return x + self.one(h) + self.two(h)


@case
def parallel_block() -> Case:
    return alone(ParallelBlock(), torch.randn(2, 4, 6))


class Reuse(nn.Module):
    """One partial value used many times, before and after its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.m = MLP(6, 10, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.m(x)
        z = y + x
        w = y.view(-1)
        a = z * 2 + torch.relu(y)
        b = a + w.view_as(x) + y + z.flatten(1).view(x.shape) + (y * 3).neg().sum(1, keepdim=True)
        return b + torch.cat([y, y], -1)[..., :6] + (y + y)


@case
def partial_reuse() -> Case:
    return alone(Reuse(), torch.randn(2, 4, 6))


class EinsumMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(6, 10)), nn.Parameter(torch.randn(10, 6))
        self.scale = nn.Parameter(torch.randn(10))

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.relu(torch.einsum("bsd,dh->bsh", x, self.w1) * self.scale)
        return torch.einsum("bsh,hd->bsd", h, self.w2) + (x @ self.w1).sigmoid() @ self.w2


@case
def einsum_params() -> Case:
    return alone(EinsumMLP(), torch.randn(2, 4, 6))


# ---- torch's transformers


class Words(nn.Module):
    """Embedding, layers of attention and head, all in one part."""

    def __init__(self, layers: int = 2, heads: int = 12) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(23, 24), nn.Linear(24, 23)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(24, heads, 38, 0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, i: torch.Tensor) -> Any:
        x = self.words(i)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@case
def words_one_layer() -> Case:
    return alone(Words(1), ids(vocabulary=23))


@case
def words_two_layers() -> Case:
    return alone(Words(2), ids(vocabulary=23))


@case
def encoder_layer() -> Case:
    return alone(nn.TransformerEncoderLayer(24, 6, 50, 0.0, batch_first=True), torch.randn(2, 5, 24))


@case
def encoder_layer_mask() -> Case:
    model = nn.TransformerEncoderLayer(24, 6, 50, 0.0, batch_first=False, norm_first=True, activation="gelu")
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    run = lambda m, i: (m(i, src_mask=causal, src_key_padding_mask=padding.double().masked_fill(padding, -torch.inf)),)  # noqa: E731
    return Case(model, [model], run, torch.randn(5, 2, 24))


@case
def encoder_stack() -> Case:
    layer = nn.TransformerEncoderLayer(24, 6, 50, 0.0, batch_first=True)
    return alone(nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 24))


@case
def decoder_layer() -> Case:
    model = nn.TransformerDecoderLayer(24, 6, 50, 0.0, batch_first=True)
    memory = torch.randn(2, 7, 24, dtype=torch.float64)
    return Case(model, [model], lambda m, i: (m(i, memory),), torch.randn(2, 5, 24))


@case
def mha_weights() -> Case:
    model = nn.MultiheadAttention(24, 6, batch_first=True)
    return Case(model, [model], lambda m, i: m(i, i, i), torch.randn(2, 5, 24))


@case
def mha_cross_kdim() -> Case:
    model = nn.MultiheadAttention(24, 6, kdim=10, vdim=12, batch_first=True)
    k, v = torch.randn(2, 7, 10, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    return Case(model, [model], lambda m, i: (m(i, k, v, need_weights=False)[0],), torch.randn(2, 5, 24))


# ---- Hugging Face


def ids(rows: int = 2, length: int = 7, vocabulary: int = 50) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length))


def causal(m: Any, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = m(input_ids=i, labels=i, use_cache=False)
    return out.loss, out.logits


def causal_cached(m: Any, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = m(input_ids=i, labels=i)
    return out.loss, out.logits


def padded(m: Any, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mask = torch.ones_like(i)
    mask[0, 4:] = 0
    out = m(input_ids=i, labels=i, attention_mask=mask)
    return out.loss, out.logits


def gpt2(layers: int = 2, heads: int = 6, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    dropout = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
    sizes = {"n_embd": 24, "n_head": heads, "n_layer": layers, "vocab_size": 50, "n_positions": 32}
    return AutoModelForCausalLM.from_config(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, **more))


def llama(layers: int = 2, key_values: int = 6, kind: str = "Llama", **more: Any) -> Any:
    import transformers

    sizes = {
        "hidden_size": 48,
        "num_attention_heads": 12,
        "num_key_value_heads": key_values,
        "num_hidden_layers": layers,
    }
    settings = {
        "intermediate_size": 40,
        "vocab_size": 50,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        **sizes,
        **more,
    }
    config = getattr(transformers, f"{kind}Config")(**settings)
    return transformers.AutoModelForCausalLM.from_config(config)


def bert(layers: int = 2, heads: int = 6) -> Any:
    from transformers import AutoModelForMaskedLM, BertConfig

    sizes = {"hidden_size": 24, "num_attention_heads": heads, "num_hidden_layers": layers, "intermediate_size": 42}
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return AutoModelForMaskedLM.from_config(BertConfig(**sizes, **dropout, vocab_size=50, max_position_embeddings=32))


def mixtral(layers: int = 2, key_values: int = 6) -> Any:
    return llama(
        layers,
        key_values,
        kind="Mixtral",
        intermediate_size=22,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
    )


def t5(layers: int = 2, heads: int = 6) -> Any:
    from transformers import AutoModelForSeq2SeqLM, T5Config

    sizes = {"d_model": 24, "d_kv": 4, "num_heads": heads, "d_ff": 42, "num_layers": layers, "vocab_size": 50}
    return AutoModelForSeq2SeqLM.from_config(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


@case
def gpt2_layers() -> Case:
    m = gpt2()
    return Case(m, list(m.transformer.h), causal, ids())


@case
def gpt2_eager_cache() -> Case:
    m = gpt2(attn_implementation="eager")
    return Case(m, list(m.transformer.h), causal_cached, ids())


@case
def gpt2_whole() -> Case:
    m = gpt2()
    return Case(m, [m], causal, ids())


@case
def llama_layers() -> Case:
    m = llama()
    return Case(m, list(m.model.layers), causal, ids())


@case
def llama_eager() -> Case:
    m = llama(attn_implementation="eager")
    return Case(m, list(m.model.layers), causal, ids())


@case
def llama_padded() -> Case:
    m = llama()
    return Case(m, list(m.model.layers), padded, ids())


@case
def llama_whole() -> Case:
    m = llama()
    return Case(m, [m], causal, ids())


@case
def llama_tied() -> Case:
    m = llama(tie_word_embeddings=True)
    return Case(m, [m], causal, ids())


@case
def bert_layers() -> Case:
    m = bert()
    return Case(m, list(m.bert.encoder.layer), padded, ids())


@case
def bert_whole() -> Case:
    m = bert()
    return Case(m, [m], padded, ids())


@case
def mixtral_layers() -> Case:
    m = mixtral()
    return Case(m, list(m.model.layers), causal, ids())


@case
def phi3_layers() -> Case:
    m = llama(kind="Phi3")
    return Case(m, list(m.model.layers), causal, ids())


@case
def qwen3_layers() -> Case:
    m = llama(kind="Qwen3", head_dim=4)
    return Case(m, list(m.model.layers), causal, ids())


@case
def neox_layers() -> Case:
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 40}
    m = AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes, vocab_size=50, max_position_embeddings=32))
    return Case(m, list(m.gpt_neox.layers), causal, ids())


@case
def falcon_layers() -> Case:
    from transformers import AutoModelForCausalLM, FalconConfig

    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_kv_heads": 6,
        "num_hidden_layers": 2,
        "ffn_hidden_size": 40,
    }
    m = AutoModelForCausalLM.from_config(
        FalconConfig(**sizes, vocab_size=50, new_decoder_architecture=True, max_position_embeddings=32)
    )
    return Case(m, list(m.transformer.h), causal, ids())


@case
def t5_whole() -> Case:
    m = t5()
    return Case(m, [m], causal, ids())


@case
def vit_whole() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 40}
    m = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=10, hidden_dropout_prob=0))

    def run(m: Any, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = m(pixel_values=i, labels=torch.arange(2))
        return out.loss, out.logits

    return Case(m, [m], run, torch.randn(2, 3, 8, 8))


@case
def vit_layers() -> Case:
    made = vit_whole()
    return made._replace(
        parts=list(made.model.vit.layers if hasattr(made.model.vit, "layers") else made.model.vit.encoder.layer)
    )  # type: ignore[union-attr,arg-type]


# ---- heads that divide by 4; the widths and the vocabulary do not


FOUR: dict[str, Callable[[], Case]] = {}


def four(name: str, make: Callable[[], Any], layers: Callable[[Any], Any], run: Any = causal) -> None:
    def made() -> Case:
        m = make()
        return Case(m, list(layers(m)), run, ids())

    FOUR[name] = made


four("gpt2", lambda: gpt2(1, 4), lambda m: m.transformer.h)
four("gpt2_whole", lambda: gpt2(1, 4), lambda m: [m])
four("llama", lambda: llama(1, 4, intermediate_size=42), lambda m: m.model.layers)
four("llama_whole", lambda: llama(1, 4, intermediate_size=42), lambda m: [m])
four("bert", lambda: bert(1, 4), lambda m: m.bert.encoder.layer, padded)
four("t5_whole", lambda: t5(1, 4), lambda m: [m])
four("qwen3", lambda: llama(1, 4, kind="Qwen3", head_dim=4, intermediate_size=42), lambda m: m.model.layers)
four("mixtral", lambda: mixtral(1, 4), lambda m: m.model.layers)


# ---- classes spread over ranks


class Head(nn.Module):
    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.relu(self.body(x)))


@case
def accuracy() -> Case:
    m, y = Head(), torch.randint(0, 100, (12,))

    def run(m: nn.Module, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o = m(i)
        guess, (values, top), most = o.argmax(1), o.topk(5, 1), o.max(1)
        hits = (guess == y).double().mean(), (top == y[:, None]).any(1).double().mean()
        first = (o == o.max(1, keepdim=True).values).sum().double()
        spread = o.softmax(-1), o.log_softmax(1), o.logsumexp(1), o.mean()
        return F.cross_entropy(o, y), guess.double(), top.double(), values, *hits, first, most.values, *spread

    return Case(m, [m.head], run, torch.randn(12, 8))


def loss_case(**options: Any) -> Callable[[], Case]:
    def make() -> Case:
        m, y = Head(), torch.randint(0, 100, (12,))
        given = dict(options)
        if "ignore_index" in given:
            y[::3] = given["ignore_index"]
        if given.pop("weighted", False):
            given["weight"] = torch.rand(100, dtype=torch.float64) + 0.1
        target = torch.softmax(torch.randn(12, 100, dtype=torch.float64), 1) if given.pop("soft", False) else y

        def run(m: nn.Module, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
            o = m(i)
            loss = F.cross_entropy(o, target, **given)
            return ((loss * torch.arange(loss.numel(), dtype=loss.dtype)).sum() if loss.ndim else loss), o

        return Case(m, [m.head], run, torch.randn(12, 8))

    return make


CASES["ce_mean"] = loss_case()
CASES["ce_sum_ignore"] = loss_case(reduction="sum", ignore_index=-1)
CASES["ce_none_smooth"] = loss_case(reduction="none", label_smoothing=0.1)
CASES["ce_all"] = loss_case(label_smoothing=0.2, ignore_index=5, weighted=True)
CASES["ce_none_all"] = loss_case(reduction="none", label_smoothing=0.2, ignore_index=-100, weighted=True)
CASES["ce_soft"] = loss_case(soft=True, label_smoothing=0.1, weighted=True)


@case
def ce_pixels() -> Case:
    m, y = nn.Conv2d(3, 10, 3, padding=1), torch.randint(0, 10, (2, 4, 4))

    def run(m: nn.Module, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o = m(i)
        return F.cross_entropy(o, y, label_smoothing=0.1), o

    return Case(m, [m], run, torch.randn(2, 3, 4, 4))


class Arc(nn.Module):
    """A margin head, as people write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.w, self.how = nn.Linear(8, 16), nn.Parameter(torch.randn(100, 16)), how

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        cos = F.linear(F.normalize(self.body(x)), F.normalize(self.w))
        if self.how == "onehot":
            moved = torch.cos(torch.acos(cos.clamp(-1 + 1e-07, 1 - 1e-07)) + 0.5)
            one = F.one_hot(y, 100).to(cos.dtype)
            return 16 * (one * moved + (1 - one) * cos)
        if self.how == "scatter":
            sine = torch.sqrt((1.0 - torch.pow(cos, 2)).clamp(0, 1))
            moved = torch.where(cos > 0.0, cos * 0.87 - sine * 0.47, cos - 0.1)
            one, other = torch.zeros(cos.size(), dtype=cos.dtype), torch.zeros_like(cos)
            one.scatter_(1, y.view(-1, 1).long(), 1)
            other.scatter_(1, y.view(-1, 1), 1)
            return (one * moved + (1.0 - other) * cos) * 16
        if self.how == "gather":
            return 16 * cos.scatter(1, y[:, None], torch.cos(torch.acos(cos.gather(1, y[:, None])) + 0.5))
        rows = torch.arange(len(y))
        out = cos.clone()
        out[rows, y] = torch.cos(torch.acos(cos[rows, y]) + 0.5)
        return out * 16


def arc_case(how: str) -> Callable[[], Case]:
    def make() -> Case:
        m, y = Arc(how), torch.randint(0, 100, (12,))
        return Case(m, [m], lambda m, i: (F.cross_entropy(m(i, y), y), m(i, y)), torch.randn(12, 8))

    return make


for _how in ("onehot", "scatter", "gather", "index"):
    CASES[f"arcface_{_how}"] = arc_case(_how)


# ---- embeddings and convolutions


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.p, self.m = nn.Embedding(50, 6, padding_idx=3), nn.Embedding(7, 6), MLP(6, 10, bias=False)

    def forward(self, i: torch.Tensor) -> Any:
        return self.m(self.e(i) + self.p(torch.arange(i.shape[1])))


@case
def embedding_vocab() -> Case:
    return alone(Embedded(), ids())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 10, 3, padding=1), nn.Conv2d(10, 6, 3)
        self.f = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.f(F.relu(self.b(F.max_pool2d(F.relu(self.a(x)), 2))).flatten(1))


@case
def conv_pair() -> Case:
    return alone(Convolutions(), torch.randn(2, 3, 8, 8))


@case
def conv_bn() -> Case:
    layers = nn.Conv2d(3, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 6, 3)
    return alone(nn.Sequential(*layers), torch.randn(2, 3, 8, 8))


# ---- float64 throughout


def _norm(self: Any, h: torch.Tensor) -> Any:
    return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


@contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """Hugging Face casts to float32 here and there (norms, router, loss): inside, to float64."""
    classes = {
        type(m) for m in model.modules() if type(m).__name__.endswith("RMSNorm") and hasattr(m, "variance_epsilon")
    }
    before = [(kind, kind.forward) for kind in classes]
    plain, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    for kind in classes:
        kind.forward = _norm  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = plain
        for kind, forward in before:
            kind.forward = forward  # type: ignore[method-assign]


def make_case(name: str, made_by: dict[str, Callable[[], Case]] | None = None) -> Case:
    """The case in float64, in training mode, with the same numbers every time."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        made = (made_by or CASES)[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    made.model.double().train()
    return made._replace(x=made.x.double() if made.x.is_floating_point() else made.x)
