"""What people do with a parameter between its construction and the first call is right, or refused; never lost."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import epl
from epl import _torch
from epl.errors import StateError
from epl.graph.deferred import deferred_block, is_deferred, materialise_whole, settle_block
from epl.plan.split.cut import Cut
from epl.plan.split.layout import ParameterLayout
from tests.graph.deferred.compare import build_both, check_blocks, check_same, is_unbuilt

ROWS = ParameterLayout(torch.Size((120, 37)), 0, Cut.even("rows", 120, 2))


def linear() -> nn.Linear:
    return nn.Linear(37, 120)


def under_split(build: Callable[[], nn.Module] = linear) -> nn.Module:
    torch.manual_seed(5)
    with epl.split(2):
        return build()


def no_grad(change: Callable[[nn.Module], object]) -> Callable[[nn.Module], object]:
    def act(module: nn.Module) -> None:
        with torch.no_grad():
            change(module)

    return act


def set_item(key: object, value: object) -> Callable[[nn.Module], object]:
    return no_grad(lambda module: module.weight.__setitem__(key, value))


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


STATE = {"weight": torch.arange(120 * 37.0).view(120, 37), "bias": torch.ones(120)}

ACTIONS = {
    "normal_": lambda m: nn.init.normal_(m.weight, std=0.02),
    "apply": lambda m: m.apply(init_weights),
    "reset_parameters": lambda m: m.reset_parameters(),
    "data": lambda m: m.weight.data.normal_(),
    "data is set": lambda m: setattr(m.weight, "data", m.weight.data * 2),
    "mul_": no_grad(lambda m: m.weight.mul_(2)),
    "row": set_item(0, 0),
    "row from a tensor": set_item(3, torch.arange(37.0)),
    "rows from a tensor": set_item(slice(2, 5), torch.arange(111.0).view(3, 37)),
    "column": set_item((slice(None), 1), 0.5),
    "element": set_item((3, 4), 7),
    "scalar tensor": no_grad(lambda m: m.weight.mul_(torch.tensor(0.5))),
    "double": lambda m: m.double(),
    "bfloat16 and back": lambda m: m.bfloat16().float(),
    "to": lambda m: m.to("cpu", torch.float64),
    "half, then normal_": lambda m: nn.init.normal_(m.half().weight),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "weight.requires_grad": lambda m: setattr(m.weight, "requires_grad", False),
    "load_state_dict": lambda m: m.load_state_dict(STATE),
    "load, then change": no_grad(lambda m: (m.load_state_dict(STATE), m.weight[2:].mul_(3))),
    "zero_grad": lambda m: m.zero_grad(),
    "train": lambda m: m.eval().train(),
    "questions": lambda m: (torch.isnan(m.weight).any(), torch.isfinite(m.weight).all(), m.weight[0].sum().item()),
    "printed": lambda m: (str(m), repr(m.weight), repr(m.state_dict())),
}


@pytest.mark.parametrize("act", ACTIONS.values(), ids=ACTIONS)
def test_actions_that_are_written_down(act: Callable[[nn.Module], object]) -> None:
    check_same(*build_both(linear, act))


WHOLE = {
    "orthogonal": lambda m: nn.init.orthogonal_(m.weight),
    "norm": no_grad(lambda m: m.weight.div_(m.weight.norm())),
    "mask": no_grad(lambda m: m.weight.masked_fill_(m.weight > 0.1, 0)),
    "index": set_item(torch.tensor([2, 5]), 0),
    "numpy": lambda m: m.weight.detach().numpy().fill(3),
    "other tensor": no_grad(lambda m: m.weight.add_(torch.ones(120, 37))),
    "broadcast": no_grad(lambda m: m.weight.copy_(torch.arange(37.0))),
    "transposed draw": lambda m: m.weight.data.t().normal_(),
    "channels": lambda m: m.weight.data.t().copy_(torch.ones(37, 120)),
    "exp": no_grad(lambda m: m.weight.exp_()),
    "out": no_grad(lambda m: torch.mul(m.bias[:, None], 2, out=m.weight[:, :1])),
    "foreach": no_grad(lambda m: torch._foreach_mul_([m.weight, m.bias], 2.0)),
    "view as integers": lambda m: m.weight.data.view(torch.int32).fill_(0),
    "call": lambda m: m(torch.ones(2, 37)).sum().backward(),
}


@pytest.mark.parametrize("act", WHOLE.values(), ids=WHOLE)
def test_actions_that_build_the_whole_are_right_all_the_same(act: Callable[[nn.Module], object]) -> None:
    plain, deferred = build_both(linear, act)
    if plain.weight.grad is not None:
        assert torch.equal(plain.weight.grad, deferred.weight.grad)
    check_blocks(plain.weight, deferred.weight)
    settle_block(deferred.weight, ROWS, 1)
    assert torch.equal(deferred.weight, plain.weight[60:])
    if plain.weight.grad is not None:
        assert torch.equal(plain.weight.grad[60:], deferred.weight.grad)


def test_a_wide_orthogonal_weight(caplog: pytest.LogCaptureFixture) -> None:
    # What is drawn for one that has fewer rows than columns is transposed in place, which was refused.
    caplog.set_level(logging.INFO, "epl")

    def wide() -> nn.Module:
        layer = nn.Linear(120, 37)
        nn.init.orthogonal_(layer.weight)
        return layer

    plain, deferred = build_both(wide)
    assert "was built whole on every rank" in caplog.text
    check_blocks(plain.weight, deferred.weight)


TURNS = {
    "t_": (),
    "transpose_": (0, 1),
    "swapaxes_": (0, 1),
    "unsqueeze_": (1,),
    "squeeze_": (),
    "as_strided_": ((37, 60), (120, 2), 1),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_view_that_is_turned_in_place(name: str) -> None:
    def act(module: nn.Module) -> None:
        view = module.weight.data
        before = view.shape
        assert getattr(view, name)(*TURNS[name]) is view
        assert (view.shape == before) is (name == "squeeze_")
        view[0, 0].mul_(3)
        view.mul_(0.5)

    check_same(*build_both(linear, act))


def test_building_a_whole_parameter_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "epl")
    module = under_split()
    with torch.no_grad():
        module.weight.exp_()
        module.weight.exp_()
    assert [record.message[:48] for record in caplog.records] == ["a parameter of shape (120, 37) under epl.split w"]
    assert "exp_" in caplog.text


def test_drawing_in_parts_is_not_worth_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "epl")
    deferred_block(under_split().weight, ROWS, 0)
    assert caplog.records == []


# ---- identity --------------------------------------------------------------------------------------------------------


def test_the_parameter_stays_the_same_object_for_optimizers() -> None:
    torch.manual_seed(5)
    plain, module = linear(), under_split()
    weight, mark = module.weight, object()
    weight.mark = mark
    calls: list[str] = []
    weight.register_hook(lambda gradient: calls.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(module.parameters())]
    settle_block(weight, ROWS, 1)
    assert module.weight is weight is optimizers[0].param_groups[0]["params"][0]
    assert type(weight) is nn.Parameter
    assert weight.mark is mark
    assert (weight.is_leaf, weight.requires_grad, weight.shape) == (True, True, (60, 37))
    assert "epl_cell" not in vars(weight)
    plain.weight.data = plain.weight.data[60:]
    for each in (plain, module):
        (each.weight**2).sum().backward()
    assert calls == ["hook", "after"]
    torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9).step()
    optimizers[0].step()
    assert torch.equal(plain.weight, weight)
    optimizers[1].step()


def test_state_that_an_optimizer_makes_at_once_is_cut_alike() -> None:
    module = under_split()
    optimizer = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=0.5)
    state = optimizer.state[module.weight]["sum"]
    assert is_deferred(state)
    assert torch.equal(deferred_block(state, ROWS, 0), torch.full((60, 37), 0.5))


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(120, 37), nn.Linear(37, 120, bias=False)
            self.head.weight = self.embed.weight

    check_same(*build_both(Tied))
    module = under_split(Tied)
    copied = copy.deepcopy(module)
    module.double()
    assert module.head.weight is module.embed.weight
    assert copied.head.weight is copied.embed.weight
    settle_block(module.head.weight, ROWS, 0)
    assert module.embed.weight.shape == (60, 37)
    assert is_deferred(copied.embed.weight)


def test_conversion_keeps_the_object() -> None:
    module = under_split()
    weight = module.weight
    module.double()
    assert module.weight is weight
    assert (weight.dtype, weight.data.dtype, is_unbuilt(weight)) == (torch.float64, torch.float64, True)
    module.to("meta")
    assert module.weight.is_meta
    assert not is_deferred(module.weight)


def test_copies_are_independent() -> None:
    plain, module = build_both(linear)
    other = copy.deepcopy(module)
    with torch.no_grad():
        module.weight.zero_()
    check_same(plain, other)
    assert not deferred_block(module.weight, ROWS, 0).any()


def test_whole_parameters_keep_their_views() -> None:
    module = under_split()
    row, state = module.weight.detach()[3], module.state_dict()
    materialise_whole(module.weight)
    with torch.no_grad():
        module.weight.fill_(4)
    assert row.tolist() == [4.0] * 37
    assert torch.equal(state["weight"] + 0, torch.full((120, 37), 4.0))


def test_plain_numbers_may_be_put_in() -> None:
    module = under_split()
    weight = module.weight
    weight.data = torch.ones(120, 37)
    assert type(module.weight) is nn.Parameter
    assert module.weight is weight
    assert weight.requires_grad
    assert weight.sum() == 120 * 37


# ---- states ----------------------------------------------------------------------------------------------------------


def test_a_loaded_tensor_is_not_copied_and_must_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from epl.graph.deferred import operations

    monkeypatch.setattr(operations, "KEPT", 0)
    for change in (lambda t: t.zero_(), lambda t: t.data.zero_()):
        module, state = under_split(), {key: value.clone() for key, value in STATE.items()}
        module.load_state_dict(state)
        assert torch.equal(deferred_block(module.weight, ROWS, 1), STATE["weight"][60:])
        change(state["weight"])
        with pytest.raises(StateError, match=r"was changed since then.*load a copy"):
            deferred_block(module.weight, ROWS, 1)


def test_a_small_source_may_be_used_again() -> None:
    module, row = under_split(), torch.zeros(37)
    with torch.no_grad():
        for number in range(3):
            module.weight[number] = row.fill_(number)
    assert module.weight[:3, 0].tolist() == [0, 1, 2]
    assert is_unbuilt(module.weight)


def test_states_of_deferred_models_may_be_loaded() -> None:
    plain, module = build_both(linear)
    target = under_split()
    nn.init.zeros_(target.weight)
    target.load_state_dict(module.state_dict())
    with torch.no_grad():
        module.weight.zero_()
    check_same(plain, target)


def test_an_assigned_state_is_ordinary() -> None:
    module = under_split()
    module.load_state_dict({key: value.clone() for key, value in STATE.items()}, assign=True)
    assert type(module.weight) is nn.Parameter
    assert torch.equal(module.weight, STATE["weight"])


def test_saving_is_refused_with_the_remedy() -> None:
    module = under_split()
    for what in (module, module.state_dict(), module.weight):
        with pytest.raises(StateError, match=r"epl\.full_state_dict\(model\)"):
            torch.save(what, io.BytesIO())
    with pytest.raises(StateError, match="cannot be saved"):
        copy.copy(module.weight)


def test_views_of_a_parameter_that_was_cut_are_refused() -> None:
    module = under_split()
    state, alias = module.state_dict(), nn.Parameter(module.weight.data)
    settle_block(module.weight, ROWS, 0)
    for use in (lambda: state["weight"].sum(), lambda: alias.mul(2), lambda: deferred_block(alias, ROWS, 0)):
        with pytest.raises(StateError, match=r"has been cut since: take it anew"):
            use()
    with pytest.raises(StateError, match="has been cut since"):
        state["weight"].tolist()


def test_another_size_in_place_is_refused() -> None:
    weight = under_split().weight
    with torch.no_grad(), pytest.raises(StateError, match=r"resize_.*under epl\.split"):
        weight.detach().resize_(3, 3)


def test_sharing_memory_is_refused() -> None:
    with pytest.raises(StateError, match="share_memory_"):
        under_split().share_memory()


# ---- torch's own machinery -------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(
    "parametrise",
    [
        lambda m: parametrize.register_parametrization(m, "weight", Doubled()),
        lambda m: parametrizations.weight_norm(m),
        lambda m: parametrizations.spectral_norm(m),
    ],
    ids=["own", "weight_norm", "spectral_norm"],
)
def test_parametrizations(parametrise: Callable[[nn.Module], object]) -> None:
    plain, module = build_both(linear, parametrise)
    x = torch.ones(2, 37)
    assert torch.equal(module.eval()(x), plain.eval()(x))
    for expected, found in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(found + 0, expected)


def test_recordings_see_shapes_only() -> None:
    module = under_split()
    mode = _torch.fake_mode()
    with mode:
        out = module(torch.ones(2, 37))
        norm = module.weight.norm()
    assert _torch.is_fake(out)
    assert _torch.is_fake(norm)
    assert is_unbuilt(module.weight)


def test_printing_shows_numbers_where_there_are_any() -> None:
    torch.manual_seed(5)
    plain, module = linear(), under_split()
    assert repr(module.weight).startswith("Parameter containing:\ntensor(..., size=(120, 37)")
    assert repr(module.weight.detach()[0, :3]) == repr(plain.weight.detach()[0, :3])
    module.weight.detach().numpy()
    assert repr(module.weight) == repr(plain.weight)


def test_moving_to_a_mode_of_inference() -> None:
    module = under_split()
    torch.manual_seed(5)
    plain = linear()
    with torch.inference_mode():
        assert torch.equal(module(torch.ones(2, 37)), plain(torch.ones(2, 37)))
