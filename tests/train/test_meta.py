"""Models built on the meta device get memory and numbers, as their modules would make them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import epl
from epl.errors import RanksDisagreeError, StateError
from epl.train.meta import materialise
from tests.harness import rank_errors, run_ranks

CPU = torch.device("cpu")


class Block(nn.Module):
    """Fills its scale in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4), persistent=False)
        self.register_buffer("open", torch.ones(4, dtype=torch.bool))


class Net(nn.Module):
    """Initialises its parts from outside, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Block(), Block(), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.first.linear.weight
        self.attention = nn.MultiheadAttention(4, 1)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Block):
            nn.init.constant_(module.scale, 3.0)
            module.linear.bias.data.fill_(5.0)
            module.table = torch.arange(4)
            module.open.fill_(True)


def on_meta(make=Net):
    with torch.device("meta"):
        return make()


def test_every_tensor_has_memory_and_numbers_under_the_same_object():
    model = on_meta()
    before = dict(model.named_parameters())
    assert materialise(model, model.parameters(), CPU, 0) == {}
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert not any(t.is_meta or t.isnan().any() for t in [*model.parameters(), *model.buffers()])
    assert model.head.weight is model.first.linear.weight
    assert model.first.scale.tolist() == [3.0] * 4
    assert model.second.linear.bias.tolist() == [5.0] * 4
    assert model.first.table.tolist() == [0, 1, 2, 3]
    assert model.norm.running_var.tolist() == [1.0] * 4


def test_numbers_do_not_depend_on_what_else_is_here():
    whole, part = on_meta(), on_meta()
    torch.manual_seed(5)
    materialise(whole, whole.parameters(), CPU, 11)
    drawn = torch.rand(())
    own = [*part.second.parameters(), *part.head.parameters()]
    materialise(part, own, CPU, 11)
    held = set(map(id, own))
    for name, parameter in part.named_parameters():
        assert parameter.is_meta == (id(parameter) not in held), name
        assert parameter.is_meta or torch.equal(parameter, whole.get_parameter(name)), name
    assert not any(buffer.is_meta for buffer in part.buffers())
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(())), "the user's random numbers are as without"


def test_numbers_that_are_there_already_are_kept():
    model = on_meta()
    model.first.scale = nn.Parameter(torch.full((4,), 7.0))
    model.second.table = torch.zeros(4, dtype=torch.int64)
    materialise(model, model.parameters(), CPU, 0)
    assert model.first.scale.tolist() == [7.0] * 4
    assert model.second.scale.tolist() == [3.0] * 4


def test_what_nothing_fills_is_named():
    model = on_meta(Block)
    assert set(materialise(model, model.parameters(), CPU, 0)) == {"scale", "table", "open"}


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_refused():
    model = on_meta(Block)
    model.linear.slopes = torch.empty(3, device="meta")
    with pytest.raises(StateError, match=r"linear\.slopes.*register_buffer"):
        materialise(model, model.parameters(), CPU, 0)


# --- through parallelize ----------------------------------------------------------------------------------------------


class Staged(nn.Module):
    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x) * self.scale + self.table)
        return y


def parallelized(stages: int, *, persistent: bool = True) -> Staged:
    epl.init(epl.Config({"communication.timeout": 30, "pipeline.num_micro_batch": 2 if stages else 1}))
    with torch.device("meta"):
        model = Staged(persistent=persistent)
    if stages:
        epl.annotate(epl.replicate(1, name="a"), model.first)
        epl.annotate(epl.replicate(1, name="b"), model.second)
    epl.parallelize(model)
    return model


def _whole_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return dict(Staged().state_dict())


def _refused_until_loaded(stages: int) -> list[object]:
    model, found = parallelized(stages), []
    x = torch.ones(4, 4)
    for attempt in range(2):
        try:
            found.append(model(x).sum().item())
        except StateError as error:
            found.append(str(error))
        if attempt == 0:
            first = epl.Env.get().cluster.is_first_rank
            epl.load_full_state_dict(model, _whole_state() if first else None)
    return found


@pytest.mark.parametrize("stages", [0, 2])
def test_a_call_is_refused_on_every_rank_until_the_state_is_loaded(stages):
    plain = Staged()
    plain.load_state_dict(_whole_state())
    expected = plain(torch.ones(4, 4)).sum().item()
    for refusal, value in run_ranks(_refused_until_loaded, 2, stages):
        assert "scale: load it with epl.load_full_state_dict" in refusal
        assert "table" in refusal
        assert value == pytest.approx(expected, rel=1e-6)


def _not_in_the_state() -> None:
    model = parallelized(2, persistent=False)
    epl.load_full_state_dict(model, {k: v for k, v in _whole_state().items() if k != "table"})
    model(torch.ones(4, 4))


def test_a_buffer_that_no_state_holds_is_refused_on_every_rank():
    for error in rank_errors(_not_in_the_state, 2):
        assert error is not None
        assert error[0] == "StateError"
        assert "table, which no state dict holds" in error[1]


def _uses_before_the_first_call(doing: str) -> None:
    model = parallelized(2)
    if doing == "load":
        model.load_state_dict(_whole_state())
    elif doing == "state":
        epl.full_state_dict(model)
    else:
        epl.load_full_state_dict(model, _whole_state())
        model(torch.ones(4, 4, device=model.scale.device))


@pytest.mark.parametrize(
    ("doing", "kind", "text"),
    [
        ("load", "StateError", "load_state_dict would load nothing: use epl.load_full_state_dict"),
        ("state", "StateError", "its numbers come with its first call"),
        ("call", "UsageError", "do not move inputs to model.device"),
    ],
)
def test_what_cannot_be_before_the_first_call_says_so(doing, kind, text):
    for error in rank_errors(_uses_before_the_first_call, 2, doing):
        assert error is not None
        assert error[0] == kind
        assert text in error[1]


def _meta_on_one_rank() -> None:
    epl.init(epl.Config({"communication.timeout": 30}))
    with torch.device("cpu" if epl.Env.get().cluster.is_first_rank else "meta"):
        model = nn.Linear(2, 2)
    epl.parallelize(model)


def test_a_model_on_meta_on_some_ranks_only_is_refused():
    for error in rank_errors(_meta_on_one_rank, 2):
        assert error is not None
        assert error[0] == RanksDisagreeError.__name__
        assert "'meta'" in error[1]
