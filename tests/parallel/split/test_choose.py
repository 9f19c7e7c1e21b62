"""The chooser: what is decided, what it costs, what is refused, and that nothing is touched."""

from __future__ import annotations

import logging
import pickle
import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epl.errors import SplitError
from epl.parallel.split.choose import choose, search
from epl.parallel.split.choose.units import find_units
from epl.plan.split.decisions import Choice
from epl.plan.split.splitplan import SplitPlan
from epl.report import log
from tests.parallel.split import cases
from tests.parallel.split.cases import MLP, in_double, make_case
from tests.parallel.split.parity import check, plans_of

REPEATED = 24
"""Layers of a model whose plan must not cost that many times one layer's."""


def plan_layer(name: str, ways: int = 2) -> SplitPlan:
    case = make_case(name)
    with in_double(case.model):
        return plans_of(case, ways)[0]


# ---- what is decided


def test_a_pair_of_linears_is_columns_then_rows() -> None:
    plan = choose(MLP(6, 10), 2, (torch.randn(4, 6, requires_grad=True),))
    assert plan.choices == {
        "a.weight": Choice(0, "a.weight"),
        "a.bias": Choice(0, "a.weight"),
        "b.weight": Choice(1, "a.weight"),
        "b.bias": None,
    }
    assert [event.what for event in plan.events] == ["backward all-reduce", "all-reduce"]


WRITTEN = {
    "linear": F.linear,
    "t": lambda x, w: x @ w.t(),
    "T": lambda x, w: x @ w.T,
    "mT": lambda x, w: x @ w.mT,
    "H": lambda x, w: x @ w.H,
    "transpose": lambda x, w: torch.matmul(x, w.transpose(0, 1)),
    "swapaxes": lambda x, w: torch.mm(x, w.swapaxes(-1, 0)),
    "inner": torch.inner,
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([-1], [-1])),
    "scaled": lambda x, w: F.linear(x, (w * 0.5).tanh()),
    "divided by norm": lambda x, w: x @ (w / w.norm(dim=1, keepdim=True)).T,
    "divided by torch.norm": lambda x, w: F.linear(x, w / torch.norm(w, dim=-1, keepdim=True)),
    "divided by linalg.norm": lambda x, w: F.linear(x, w / torch.linalg.norm(w, dim=1, keepdim=True)),
    "divided by root": lambda x, w: F.linear(x, w * w.pow(2).sum(1, keepdim=True).rsqrt()),
}


class Written(nn.Module):
    """A pair of layers, as people write them out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Parameter(torch.randn(10, 6)), nn.Parameter(torch.randn(6, 10)), how

    def forward(self, x: torch.Tensor) -> Any:
        return F.linear(WRITTEN[self.how](x, self.a).relu(), self.b)


@pytest.mark.parametrize("how", WRITTEN)
def test_a_linear_layer_however_it_is_written(how: str) -> None:
    # `.T` is an attribute and not a function: it once left all layers of Hugging Face's Falcon whole.
    x = torch.randn(4, 6, requires_grad=True)
    plan = choose(Written(how), 2, (x,))
    assert plan.choices == {"a": Choice(0, "a"), "b": Choice(1, "a")}
    assert [event.what for event in plan.events] == ["backward all-reduce", "all-reduce"]
    assert check(cases.alone(Written(how).double(), x.detach().double()), 2) == ["all-reduce", "all-reduce"]


@pytest.mark.parametrize("how", ["inner", "tensordot", "T"])
def test_rows_of_a_layer_however_it_is_written(how: str) -> None:
    class Second(Written):
        def forward(self, x: torch.Tensor) -> Any:
            return WRITTEN[self.how](F.linear(x, self.a).relu(), self.b)

    plan = choose(Second(how), 2, (torch.randn(4, 6, requires_grad=True),))
    assert plan.choices == {"a": Choice(0, "a"), "b": Choice(1, "a")}


@pytest.mark.parametrize("ways", [2, 3])
def test_a_parameter_that_goes_into_a_layer(ways: int) -> None:
    # It was cut as if it were the bias: by the outputs of the layer, "start (0) + length (35) exceeds dimension size (3)".
    class Generated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.layer = nn.Parameter(torch.randn(3)), nn.Linear(3, 40)
            self.left, self.right = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 8))
            self.last = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> Any:
            hidden = F.linear(x, self.layer(self.code).view(8, 5)) * (self.left @ self.right)
            return hidden @ self.last + (hidden.relu() @ self.right.T) @ self.left

    torch.manual_seed(0)
    check(cases.alone(Generated().double(), torch.randn(4, 5, dtype=torch.float64)), ways)


def test_fused_qkv_is_cut_by_heads() -> None:
    x = torch.randn(5, 2, 24, requires_grad=True)
    plan = choose(nn.MultiheadAttention(24, 6), 3, (x, x, x), {"need_weights": False})
    assert plan.choices["in_proj_weight"] == Choice(0, "in_proj_weight", (4, 4, 4))
    assert (plan.axes["in_proj_weight"], plan.heads) == (6, {"in_proj_weight"})


def test_grouped_heads_share_an_axis() -> None:
    plan = plan_layer("llama_layers")
    query, key = plan.choices["self_attn.q_proj.weight"], plan.choices["self_attn.k_proj.weight"]
    assert query is not None
    assert key is not None
    assert query.axis == key.axis
    assert (query.inners, key.inners, plan.axes[query.axis]) == ((8,), (4,), 6)


def test_uneven_sizes_are_dealt_out() -> None:
    layouts = choose(MLP(6, 10), 3, (torch.randn(4, 6),)).layouts()
    assert [tuple(layouts["a.weight"].block_shape(rank)) for rank in range(3)] == [(4, 6), (3, 6), (3, 6)]


def test_the_plan_can_be_printed_and_sent() -> None:
    plan = plan_layer("llama_layers")
    assert pickle.loads(pickle.dumps(plan)) == plan
    text = plan.summary().describe()
    assert "self_attn.q_proj.weight" in text
    assert "6 heads of 8" in text
    assert "modeling_llama.py" in text
    assert "all-reduce" in text
    assert plan.fraction_held() == pytest.approx(0.5, abs=0.01)


# ---- what it costs


@pytest.mark.parametrize(
    ("name", "most"),
    [("gpt2_layers", 4), ("llama_layers", 4), ("bert_layers", 4), ("qwen3_layers", 4), ("phi3_layers", 4), ("neox_layers", 3),
     ("falcon_layers", 4), ("mixtral_layers", 10)],
)  # fmt: skip
def test_collectives_of_a_transformer_layer(name: str, most: int) -> None:
    case = make_case(name)
    with in_double(case.model):
        plans = plans_of(case, 2)
        calls = check(case, 2, plans)
    assert len(calls) <= most * len(plans), Counter(calls)
    assert len(calls) == sum(len(plan.events) for plan in plans), "the plan says what is really sent"
    assert not plans[0].whole or all(len(plans[0].shapes[n]) == 1 or n == "mlp.gate.weight" for n in plans[0].whole)


@pytest.mark.parametrize(
    ("name", "most"), [("t5_whole", 26), ("gpt2_whole", 13), ("llama_whole", 12), ("bert_whole", 15)]
)
def test_collectives_of_whole_models(name: str, most: int) -> None:
    case = make_case(name)
    with in_double(case.model):
        assert len(check(case, 2)) <= most


@pytest.mark.parametrize(
    ("make", "run", "more"),
    [(cases.gpt2, cases.causal, 4), (cases.llama, cases.causal, 4), (cases.bert, cases.padded, 4), pytest.param(cases.t5, cases.causal, 10, marks=pytest.mark.full)],
    ids=["gpt2", "llama", "bert", "t5"],
)  # fmt: skip  # T5's are counted as a whole model's above
def test_collectives_of_one_more_layer(make: Any, run: Any, more: int) -> None:
    sent = []
    for layers in (1, 2):
        model = make(layers)
        sent.append(len(plans_of(cases.Case(model, [model], run, cases.ids()), 2)[0].events))
    assert sent[1] - sent[0] == more, "of T5: 4 for a layer of the encoder, 6 for one of the decoder"


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_heads_are_reached_beside_embedding_and_head(ways: int) -> None:
    # Cut along what is contracted, the weights around a whole attention send less, but then every rank computes all of its heads.
    plans = [choose(cases.Words(layers), ways, (cases.ids(vocabulary=23),)) for layers in (1, 2)]
    for layers, plan in enumerate(plans, 1):
        for n in range(layers):
            name = f"layers.{n}.self_attn.in_proj_weight"
            assert plan.choices[name] == Choice(0, name, (2, 2, 2))
            assert (plan.axes[name], name in plan.heads) == (12, True)
        assert plan.choices["words.weight"] == Choice(0, "words.weight")
        assert not [name for name in plan.whole if len(plan.shapes[name]) > 1]
    assert len(plans[1].events) - len(plans[0].events) == 4


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("heads", "ways", "nearest"), [(4, 3, "2 or 4"), (3, 2, "1 or 3"), (6, 4, "3 or 6")])
def test_heads_that_do_not_divide_beside_embedding_and_head(layers: int, heads: int, ways: int, nearest: str) -> None:
    with pytest.raises(SplitError, match=f"{heads} heads .* to {ways} ranks; .* {nearest}"):
        choose(cases.Words(layers, heads), ways, (cases.ids(vocabulary=23),))


def test_repeated_layers_are_planned_once() -> None:
    few, many = cases.llama(layers=REPEATED // 2), cases.llama(layers=REPEATED)
    ids = cases.ids()
    plans = [choose(model, 2, (), {"input_ids": ids, "labels": ids, "use_cache": False}) for model in (few, many)]
    assert plans[1].runs == plans[0].runs
    assert plans[1].choices[f"model.layers.{REPEATED - 1}.mlp.down_proj.weight"] is not None
    layer = (len(plans[1].events) - len(plans[0].events)) / (REPEATED // 2)
    assert layer == 4


# ---- nothing is touched


class Pairs(nn.Module):
    """Layers that are lists themselves, and are never called: their blocks were searched all at once, in the square of the time."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([MLP(6, 12), nn.LayerNorm(6), MLP(6, 10)]) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, norm, second in self.layers:
            x = x + second(norm(x + first(x)))
        return x


def test_blocks_in_lists_of_lists_are_planned_once() -> None:
    plans = [choose(Pairs(layers), 2, (torch.randn(2, 6, requires_grad=True),)) for layers in (2, 6)]
    assert plans[1].runs == plans[0].runs
    assert all(
        choice is not None for name, choice in plans[1].choices.items() if name.endswith("weight") and ".1." not in name
    )


def test_a_search_that_takes_too_long_ends_with_what_was_found(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST_CALLS", 30)  # a U-Net took a quarter of an hour on every rank, and said nothing
    monkeypatch.setattr(log.logger, "propagate", True)
    monkeypatch.setattr(log, "_said", set())
    layer, x = nn.TransformerEncoderLayer(8, 2, 12), torch.randn(3, 2, 8, requires_grad=True)
    with caplog.at_level(logging.INFO, "epl"):
        plan = choose(layer, 2, (x,))
    assert "stopped looking" in caplog.text
    assert plan.choices["linear1.weight"] is not None


class Moving(nn.Module):
    """A module that changes itself when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = MLP(6, 10), nn.BatchNorm1d(6)
        self.calls, self.seen = 0, list[Any]()
        self.register_buffer("kept", torch.zeros(1))
        # On fakes, what is computed of tensors with numbers alone is computed: `usage` moved as many times as there were runs.
        self.register_buffer("usage", torch.ones(5))
        self.loose, self.listed = torch.ones(3), [torch.ones(2)]

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.seen.append(x)
        self.last = x
        self.kept += 1
        self.usage.mul_(0.9).add_(1)
        self.loose.zero_()
        self.listed[0] += 1
        random.random()
        return F.dropout(self.norm(self.net(x)), 0.5)


@pytest.mark.parametrize("on_numbers", [False, True])
def test_nothing_is_left_behind(on_numbers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Moving(), torch.randn(4, 6)
    loose, listed = module.loose, module.listed[0]
    if on_numbers:
        monkeypatch.setattr(module.net, "forward", lambda x, own=module.net.forward: own(x) if x.sum() else x)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    inside, chance, numbers, given = set(module.__dict__), random.getstate(), torch.get_rng_state(), x.clone()
    choose(module, 2, (x,))
    assert (module.calls, module.seen, set(module.__dict__)) == (0, [], inside)
    assert module.loose is loose
    assert module.listed[0] is listed
    assert float(loose.sum() + listed.sum()) == 5
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert random.getstate() == chance
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.equal(x, given)
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_a_cache_among_the_arguments_is_not_changed() -> None:
    from transformers import DynamicCache

    model = cases.gpt2()
    cache = DynamicCache(config=model.config)
    choose(model, 2, (), {"input_ids": cases.ids(), "past_key_values": cache})
    assert cache.get_seq_length() == 0


def test_code_that_looks_at_values_is_planned_on_them() -> None:
    class Branch(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) if x.sum() > 0 else x

    module, x = Branch(6, 10), torch.ones(4, 6)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    assert choose(module, 2, (x,)).choices["b.weight"] == Choice(1, "a.weight")
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


class Counting(nn.Module):
    """Experts on rows that are counted and sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).topk(2).indices
        counts = chosen.new_zeros(len(x), 4).scatter_(1, chosen, 1).sum(0).tolist()
        pieces = x[chosen.flatten().argsort() // 2].split(counts)
        assert sum(counts) == 2 * len(x)
        return torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])


@pytest.mark.parametrize("ways", [2, 3])
def test_behind_a_cut_gate_the_best_of_a_row_are_different_ones(ways: int) -> None:
    # What other ranks would say of theirs came out as zeros in a plan on numbers: a row had the first expert twice.
    plan = choose(Counting(), ways, (torch.randn(8, 6),), fixed={"gate.weight": 0})
    assert plan.choices["gate.weight"] == Choice(0, "gate.weight")


class ToldApart(MLP):
    """In training it needs labels, and evaluates without: as detectors do. Or it sorts its features first."""

    needs_labels = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training and self.needs_labels and labels is None:
            raise ValueError("where are the labels?")
        hidden = self.a(x)
        return self.b(hidden.sort(-1).values if self.training else hidden.relu())


def test_a_module_that_evaluates_is_planned_as_in_training() -> None:
    # A teacher that is called under eval() was cut differently from its student, and could not take over its weights.
    module = ToldApart(6, 10)
    expected = choose(module, 2, (torch.randn(4, 6),))
    assert choose(module.eval(), 2, (torch.randn(4, 6),)) == expected
    assert not module.a.training
    module.needs_labels = True
    assert choose(module, 2, (torch.randn(4, 6),)).choices["b.weight"] == Choice(1, "a.weight")


def test_parameters_without_memory() -> None:
    with torch.device("meta"):
        module = MLP(6, 10)
    assert choose(module, 2, (torch.randn(4, 6),)).choices["b.weight"] == Choice(1, "a.weight")


# ---- what is given beforehand


def test_a_parameter_can_be_kept_whole_or_cut_elsewhere() -> None:
    plan = choose(MLP(6, 10), 2, (torch.randn(4, 6),), fixed={"b.weight": 0, "a.weight": None})
    assert plan.choices["a.weight"] is None
    assert plan.choices["b.weight"] == Choice(0, "b.weight")


def test_the_plan_of_hugging_face_is_used_and_named() -> None:
    plan = plan_layer("llama_layers")
    assert plan.reasons["self_attn.q_proj.weight"].startswith("Hugging Face's tp_plan: columns")
    assert plan_layer("gpt2_layers").reasons["mlp.c_fc.weight"].startswith("columns"), "GPT-2 has none"


def test_a_bad_plan_of_hugging_face_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case("llama_layers")
    plan = {"layers.*.self_attn.q_proj": "rowwise", "layers.*.self_attn.o_proj": "colwise"}
    monkeypatch.setattr(type(case.model.config), "base_model_tp_plan", plan)
    monkeypatch.setattr(log.logger, "propagate", True)
    monkeypatch.setattr(log, "_said", set())
    with in_double(case.model), caplog.at_level(logging.INFO, "epl"):
        found = plans_of(case, 2)[0]
    assert found.choices["self_attn.q_proj.weight"] == Choice(0, found.choices["self_attn.q_proj.weight"].axis, (8,))  # type: ignore[union-attr]
    assert any("Hugging Face's tp_plan leaves more whole or sends more" in r.message for r in caplog.records)


# ---- what cannot be


@pytest.mark.parametrize(("heads", "ways", "nearest"), [(4, 3, "2 or 4"), (3, 2, "1 or 3"), (2, 3, "1 or 2")])
def test_heads_that_do_not_divide(heads: int, ways: int, nearest: str) -> None:
    with pytest.raises(SplitError, match=f"{heads} heads .* to {ways} ranks; .* {nearest}"):
        choose(nn.TransformerEncoderLayer(24, heads, 48, 0.0, batch_first=True), ways, (torch.randn(2, 5, 24),))


def test_heads_that_do_not_divide_behind_one_projection() -> None:
    # q | k | v as one wish, heads as another: of the counts that both came to the first was told, "1 heads".
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> Any:
            q, k, v = self.qkv(x).unflatten(-1, (3, 6, -1)).transpose(1, 3).unbind(2)
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    with pytest.raises(SplitError, match=r"6 heads .* to 4 ranks; .* 3 or 6"):
        choose(Fused(), 4, (torch.randn(2, 5, 24),))


class Rotary(nn.Module):
    """Attention with rotary positions as complex numbers, as Meta's Llama has it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4 * heads, 4 * heads, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> Any:
        shape = (*x.shape[:2], self.heads, -1)
        turns = torch.polar(torch.ones(x.shape[1], 1, 2), torch.arange(2.0 * x.shape[1]).view(-1, 1, 2))
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.view(*shape, 2)) * turns).flatten(3).transpose(1, 2)
            for t in (self.q(x), self.k(x))
        )
        scores = (q @ k.mT).softmax(-1)
        return self.o((scores @ self.v(x).view(shape).transpose(1, 2)).transpose(1, 2).flatten(2))


def test_the_heads_that_are_named_are_heads() -> None:
    # The pairs in each head were named, "2 heads", and the two weights k | v that are one: "2 heads", too.
    with pytest.raises(SplitError) as rotary:
        choose(Rotary(6), 4, (torch.randn(2, 5, 24, requires_grad=True),))
    assert str(rotary.value).count("6 heads") == 3
    assert "2 heads" not in str(rotary.value)
    cross, x, y = nn.MultiheadAttention(24, 6), torch.randn(5, 2, 24, requires_grad=True), torch.randn(3, 2, 24)
    with pytest.raises(SplitError, match=r"6 heads .* 3 or 6"):
        choose(cross, 4, (x, y, y))


def test_groups_that_are_no_heads_need_not_divide() -> None:
    # Any softmax over three dims was taken for an attention, and a program without one refused for its "heads".
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 42), nn.Linear(42, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.b(self.a(x).view(-1, 6, 7).softmax(-1).flatten(1))

    torch.manual_seed(0)
    check(cases.alone(Latents().double(), torch.randn(3, 8, dtype=torch.float64)), 4)


def test_rotary_positions_as_complex_numbers_leave_the_heads_cut() -> None:
    plan = choose(Rotary(6), 3, (torch.randn(2, 5, 24, requires_grad=True),))
    assert [event.what for event in plan.events] == ["backward all-reduce", "all-reduce"]


def test_sections_that_cannot_be_dealt_out_are_gathered() -> None:
    # A wish for sections of two features was an error for three ranks, though nobody had asked for sections.
    class Chunks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 24), nn.Linear(24, 6)

        def forward(self, x: torch.Tensor) -> Any:
            return self.b(torch.cat([chunk.softmax(-1) for chunk in self.a(x).chunk(12, -1)], -1))

    assert choose(Chunks(), 3, (torch.randn(4, 6),)).choices["a.weight"] == Choice(0, "a.weight")
    check(cases.alone(Chunks().double(), torch.randn(4, 6, dtype=torch.float64)), 3)


@pytest.mark.parametrize(("groups", "ways", "axis"), [(1, 2, 96), (8, 3, 96), (32, 3, 32)])
def test_groups_of_channels_need_not_divide(groups: int, ways: int, axis: int) -> None:
    # They were taken for heads: one group was refused whatever the split, "the nearest splits that can be: 1".
    model = nn.Sequential(nn.Conv2d(3, 96, 3), nn.GroupNorm(groups, 96), nn.SiLU(), nn.Conv2d(96, 4, 1))
    plan = choose(model, ways, (torch.randn(2, 3, 20, 20),))
    assert (plan.axes, plan.choices["3.weight"]) == ({"0.weight": axis}, Choice(1, "0.weight", (96 // axis,)))
    gathered = [event.nbytes for event in plan.events if event.what == "all-gather"]
    assert gathered == ([2 * 96 * 4] * 2 if axis == 96 else [])  # numbers of channels, never the channels


def test_groups_of_heads_that_do_not_divide() -> None:
    case = cases.llama(key_values=3)
    x = torch.randn(2, 7, 48)
    rotary = case.model.rotary_emb(x, torch.arange(7)[None])
    with pytest.raises(SplitError, match=r"3 heads \(or groups of heads\) .* to 2 ranks; .* 1 or 3"):
        choose(case.model.layers[0], 2, (x,), {"position_embeddings": rotary})


def test_all_problems_at_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.MultiheadAttention(28, 7, batch_first=True)
            self.two = nn.MultiheadAttention(20, 5, batch_first=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.one(x, x, x)[0], self.two(y, y, y)[0]

    with pytest.raises(SplitError) as caught:
        choose(Two(), 2, (torch.randn(2, 5, 28), torch.randn(2, 5, 20)))
    assert "one.in_proj_weight: 7 heads" in str(caught.value)
    assert "two.in_proj_weight: 5 heads" in str(caught.value)


def test_fewer_columns_than_ranks_are_cut_along_the_rows() -> None:
    plan = choose(nn.Linear(4, 2), 3, (torch.randn(5, 4),))
    assert plan.choices == {"weight": Choice(1, "weight"), "bias": None}
    assert plan.reasons["weight"] == "too few for 3 ranks the other way: columns"
    check(cases.alone(nn.Linear(4, 2).double(), torch.randn(5, 4, dtype=torch.float64)), 3)


def test_a_small_weight_with_fewer_of_everything_than_ranks_stays_whole() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64))
    plan = choose(module, 3, (torch.randn(5, 2),))
    assert plan.choices["0.weight"] is None
    assert plan.choices["4.weight"] == Choice(1, "2.weight")


def test_fewer_features_than_ranks() -> None:
    with pytest.raises(SplitError, match=r"3 features .*experts.* cannot be divided over 4 ranks"):
        choose(nn.Linear(3, 2), 4, (torch.randn(5, 3),))


def test_what_stays_whole_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.mlp = nn.LSTM(8, 8, batch_first=True), MLP(8, 16)

        def forward(self, x: torch.Tensor) -> Any:
            return self.mlp(self.lstm(x)[0])

    monkeypatch.setattr(log.logger, "propagate", True)
    monkeypatch.setattr(log, "_said", set())
    with caplog.at_level(logging.WARNING, "epl"):
        plan = choose(Recurrent(), 2, (torch.randn(2, 5, 8),))
    assert [name for name in plan.layouts() if "lstm" in name] == []
    assert "mlp.a.weight" in plan.layouts()
    (text,) = [r.message for r in caplog.records]
    assert "lstm (LSTM: lstm needs it" in text
    assert "epl.split_rule" in text


class OneLayer(nn.Module):
    """As large models are written, with a single layer: a smoke test, a small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)])
        self.head = nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](self.words(ids)))


def test_an_only_layer_is_planned_by_itself() -> None:
    # Searched together with all around it, T5 with one layer each took four times as long as with four.
    model = OneLayer()
    assert [unit.path for unit in find_units(model)] == ["layers.0"]
    plan = choose(model, 2, (torch.zeros(2, 3, dtype=torch.long),))
    assert plan.choices["layers.0.linear1.weight"] == Choice(0, "layers.0.linear1.weight")
