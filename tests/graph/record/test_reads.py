"""What the glue reads beside its own attributes decides a recording, too."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

from epl.graph.record.reads import Reads
from tests.graph.record.replaying import check, recordings_of

WIDTH = 6
SCALE = 1.0
SCALES = [1.0, 2.0]
NESTED = {"gains": [1.0, {"inner": 2.0}]}
PAIR = (1.0, 2.0)
CHOSEN = {1.0, 2.0}
SPACE = types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(scale=1.0))


class Settings:
    scale = 1.0


class Schedule:
    def __init__(self) -> None:
        self.step = 1

    def value(self) -> float:
        return self.step / 2


SCHEDULE = Schedule()


def scale() -> float:
    return _inner_scale()


def _inner_scale() -> float:
    return SCALE


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@wrapped
def decorated_scale() -> float:
    return SCALE


class Layer(nn.Linear):
    drop = 0.0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.gain = 1.0
        self.gains = (1.0, 2.0)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Base(nn.Module):
    gain = 1.0

    def __init__(self, read=None) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.read = read

    def forward(self, x):
        return self.second(self.first(x) * self.factor())

    def factor(self):
        return self.read(self)


class Model(Base):
    pass


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    """What the tests change is as before afterwards."""
    torch.manual_seed(0)
    for name, value in {
        "SCALE": 1.0,
        "SCALES": [1.0, 2.0],
        "NESTED": {"gains": [1.0, {"inner": 2.0}]},
        "PAIR": (1.0, 2.0),
        "CHOSEN": {1.0, 2.0},
        "SPACE": types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(scale=1.0)),
        "SCHEDULE": Schedule(),
    }.items():
        monkeypatch.setitem(globals(), name, value)
    yield
    Base.gain, Layer.drop, Settings.scale = 1.0, 0.0, 1.0
    if "gain" in vars(Model):
        del Model.gain


def _rebind(name, value):
    return lambda model: globals().__setitem__(name, value)


# Each was a silent wrong number: a recording held the first value, and nothing told that there was another one now.
CHANGES = {
    "attribute of a module recorded as a whole": (
        lambda m: m.first.gain,
        lambda m: setattr(m.first, "gain", 3.0),
    ),
    "its kind": (lambda m: 3 // m.first.gain, lambda m: setattr(m.first, "gain", 1)),
    "tuple of one": (lambda m: m.first.gains[0], lambda m: setattr(m.first, "gains", (3.0,))),
    "by getattr": (lambda m: getattr(m.first, "gain", 0.0), lambda m: setattr(m.first, "gain", 3.0)),
    "class of one": (lambda m: 1 - m.first.drop, lambda m: setattr(Layer, "drop", 0.5)),
    "instance in front of its class": (lambda m: 1 - m.first.drop, lambda m: setattr(m.first, "drop", 0.5)),
    "class attribute of a base": (lambda m: m.gain, lambda m: setattr(Base, "gain", 3.0)),
    "class attribute in front of a base's": (lambda m: m.gain, lambda m: setattr(Model, "gain", 3.0)),
    "global": (lambda m: SCALE, _rebind("SCALE", 3.0)),
    "global in a function": (lambda m: scale(), _rebind("SCALE", 3.0)),
    "global in a decorated function": (lambda m: decorated_scale(), _rebind("SCALE", 3.0)),
    "global in a comprehension": (lambda m: sum([SCALE for _ in range(2)]), _rebind("SCALE", 3.0)),
    "function": (lambda m: _inner_scale(), _rebind("_inner_scale", lambda: 3.0)),
    "list": (lambda m: SCALES[0], lambda m: SCALES.__setitem__(0, 3.0)),
    "longer list": (lambda m: len(SCALES), lambda m: SCALES.append(3.0)),
    "dict in a list in a dict": (
        lambda m: NESTED["gains"][1]["inner"],
        lambda m: NESTED["gains"][1].__setitem__("inner", 3.0),
    ),
    "tuple": (lambda m: PAIR[0], _rebind("PAIR", (3.0, 2.0))),
    "set": (lambda m: max(CHOSEN), lambda m: CHOSEN.add(3.0)),
    "object": (lambda m: SPACE.scale, lambda m: setattr(SPACE, "scale", 3.0)),
    "object in an object": (lambda m: SPACE.inner.scale, lambda m: setattr(SPACE.inner, "scale", 3.0)),
    "another object": (lambda m: SPACE.scale, _rebind("SPACE", types.SimpleNamespace(scale=3.0))),
    "method of an object": (lambda m: SCHEDULE.value(), lambda m: setattr(SCHEDULE, "step", 3)),
    "class as a namespace": (lambda m: Settings.scale, lambda m: setattr(Settings, "scale", 3.0)),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_the_glue_reads_is_recorded_anew_when_it_changes(case: str, monkeypatch):
    read, change = CHANGES[case]
    monkeypatch.setitem(globals(), "_inner_scale", _inner_scale)
    model = Model(read)
    recordings = recordings_of(model)
    x = torch.randn(5, WIDTH)
    first = check(model, x, recordings=recordings)
    assert recordings.of((x,), {}, 2) == first
    change(model)
    second = check(model, x, recordings=recordings)
    assert second != first
    assert recordings.of((x,), {}, 2) == second


def test_a_captured_variable_is_recorded_anew():
    factor, factors = 1.0, {"a": 1.0}
    model = Model(lambda m: factor * factors["a"])
    recordings = recordings_of(model)
    x = torch.randn(5, WIDTH)
    first = check(model, x, recordings=recordings)
    factor = 2.0
    second = check(model, x, recordings=recordings)
    factors["a"] = 3.0
    third = check(model, x, recordings=recordings)
    assert len({first, second, third}) == 3
    factor, factors["a"] = 1.0, 1.0
    assert recordings.of((x,), {}, 2) == first


def test_what_a_module_does_to_attributes_that_the_glue_does_not_name_is_its_own_affair():
    # A counter in a module that is recorded as a whole goes up with every call: that must not record anew at each.
    model = Model(lambda m: m.first.gain)
    recordings = recordings_of(model)
    x = torch.randn(5, WIDTH)
    first = recordings.of((x,), {}, 2)
    model.first.calls += 1
    model.first.last = "made by itself"
    assert recordings.of((x,), {}, 2) == first


def test_what_the_glue_only_sets_is_not_read():
    def read(model):
        global ONLY_SET
        ONLY_SET = 1
        model.first.calls = 7
        return 1.0

    model = Model(read)
    recordings = recordings_of(model)
    x = torch.randn(5, WIDTH)
    first = recordings.of((x,), {}, 2)
    globals()["ONLY_SET"] = 5
    model.first.calls = 8
    assert recordings.of((x,), {}, 2) == first


def test_an_equal_value_is_the_same():
    model = Model(lambda m: SCALES[0] * SCALE)
    recordings = recordings_of(model)
    x = torch.randn(5, WIDTH)
    first = recordings.of((x,), {}, 2)
    globals()["SCALE"] = float("1.0")
    SCALES[:] = [float("1.0"), float("2.0")]
    assert recordings.of((x,), {}, 2) == first


def test_what_torch_reads_is_not_looked_at():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(Reads({model}, list(model))) == []


# A tensor that no module holds by its name is in the recording itself. Another one in its place was not seen.
BANK = {"w": torch.ones(WIDTH)}


class Kept:
    def __init__(self) -> None:
        self.w = torch.ones(WIDTH)


def _kept(model):
    return model.kept.w


PLACES = {
    "list": (lambda m: m.kept[0], [torch.ones(WIDTH)], lambda m, t: m.kept.__setitem__(0, t)),
    "tuple": (lambda m: m.kept[0], (torch.ones(WIDTH),), lambda m, t: setattr(m, "kept", (t,))),
    "dict in a list": (
        lambda m: m.kept[0]["w"],
        [{"w": torch.ones(WIDTH)}],
        lambda m, t: m.kept[0].__setitem__("w", t),
    ),
    "object": (_kept, Kept(), lambda m, t: setattr(m.kept, "w", t)),
    "global dict": (lambda m: BANK["w"], None, lambda m, t: BANK.__setitem__("w", t)),
    "list of a module recorded as a whole": (
        lambda m: m.first.bank[0],
        None,
        lambda m, t: m.first.bank.__setitem__(0, t),
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_another_tensor_in_the_place_of_one_is_used(case: str):
    read, kept, replace = PLACES[case]
    model = Model(read)
    model.kept, model.first.bank = kept, [torch.ones(WIDTH)]
    recordings = recordings_of(model)
    x = torch.randn(5, WIDTH)
    replace(model, torch.full((WIDTH,), 2.0))
    first = check(model, x, recordings=recordings)
    replaced = torch.full((WIDTH,), 3.0)
    replace(model, replaced)
    second = check(model, x, recordings=recordings)
    assert second != first
    replaced.mul_(2)  # numbers are read when they are needed
    assert check(model, x, recordings=recordings) == second
    replace(model, torch.full((1,), 3.0))
    assert check(model, x, recordings=recordings) not in (first, second)


def test_a_captured_tensor_that_is_replaced_is_used():
    w = torch.ones(WIDTH)
    model = Model(lambda m: w)
    recordings = recordings_of(model)
    first = check(model, torch.randn(5, WIDTH), recordings=recordings)
    w = torch.full((WIDTH,), 2.0)
    assert check(model, torch.randn(5, WIDTH), recordings=recordings) != first


def test_two_names_of_one_tensor_may_part():
    # Which of them the forward has read cannot be told from the tensor.
    tensor = torch.ones(WIDTH)
    model = Model(lambda m: m.kept[1])
    model.kept = [tensor, tensor]
    recordings = recordings_of(model)
    first = check(model, torch.randn(5, WIDTH), recordings=recordings)
    model.kept[1] = torch.full((WIDTH,), 2.0)
    assert check(model, torch.randn(5, WIDTH), recordings=recordings) != first


class Fills(Base):
    """Keeps what it has seen in a list, which is another one after each call."""

    def forward(self, x):
        y = self.first(x)
        self.seen = [y]
        return self.second(y) + self.seen[0]


def test_a_list_that_the_glue_makes_itself_is_not_recorded_anew():
    model = Fills()
    recordings = recordings_of(model)
    x = torch.randn(5, WIDTH)
    calls = []
    for _ in range(4):
        calls.append(recordings.of((x,), {}, 2))
        model.seen = [torch.randn(5, WIDTH)]
    assert calls[1] == calls[2] == calls[3]
