"""Forwards of all kinds, written down and replayed exactly."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import random
import re
from collections import namedtuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from epl.errors import RecordingError
from epl.graph.record import Recordings
from epl.graph.record.steps import changed
from epl.plan.batch import Flat
from tests.graph.record.replaying import check, children_apart, in_parts, recordings_of

WIDTH = 6


class Two(nn.Module):
    """Two layers; subclasses say what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.between(self.first(x)))

    def between(self, x):
        return x


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rows(n: int = 5, *shape: int) -> torch.Tensor:
    return torch.randn(n, *(shape or (WIDTH,)))


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None
    name: str = "output"


@dataclasses.dataclass
class State:
    seen: torch.Tensor | None = None
    count: int = 0


class Bag:
    """An object that torch's trees know nothing of."""

    def __init__(self, value=None) -> None:
        self.value = value


class Nested(Two):
    def forward(self, batch, *, scale=None, names=("a",), flag=True, extra=None):
        x = self.first(batch["x"])
        if extra is not None:
            x = x + extra[0]
        y = self.second(x * (2 if flag else 1))
        if scale is not None:
            y = y * scale
        return {"y": y, "pair": Pair(x, None), "more": [y.sum(1), 3, None, names], "batch": (batch["x"], batch["k"])}


def test_nested_optional_and_plain_inputs_and_outputs():
    model = Nested()
    check(model, {"x": rows(), "k": 7})
    check(model, {"x": rows(), "k": 7}, scale=torch.tensor(3.0), flag=False, extra=(rows(), "text"))
    check(model, {"x": rows(), "k": torch.arange(5)}, scale=0.5, names=("b", 2.5))


class Structured(Two):
    def forward(self, x, labels=None):
        hidden = self.first(x)
        logits = self.second(hidden)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(logits, [x, hidden], loss)


def test_dataclasses_come_back_as_they_are():
    call = check(Structured(), rows(), torch.tensor([0, 1, 2, 0, 1]))
    assert [node.target for node in call.tail if node.op == "call_function"] == [F.cross_entropy]
    assert {node.name for node in call.frontier} == {"first", "second"}
    check(Structured(), rows())


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("positions", torch.randn(1, 5, 8))
        self.scale = torch.tensor(2.0)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, image):
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = x * self.scale + torch.arange(x.shape[1], device=x.device)[None, :, None]
        return self.head(self.block(x)[:, 0])


def test_parameters_buffers_and_constants_in_the_glue():
    model = Vision()
    call = check(model, rows(4, 1, 8, 8))
    attributes = {node.target for node in call.whole.nodes if node.op == "get_attr"}
    assert attributes == {"cls_token", "positions", "scale"}
    with torch.no_grad():
        model.cls_token.mul_(2)
        model.positions.add_(1)
    model.scale = torch.tensor(3.0)  # looked up when it is replayed
    check(model, rows(4, 1, 8, 8))
    assert [call.batch_dim(node) for node in call.whole.nodes if node.op == "call_module"] == [0, 0, 0]


OUTSIDE = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


class Constant(Two):
    def between(self, x):
        return x * OUTSIDE


def test_constants_from_outside_are_lifted():
    call = check(Constant(), rows())
    (node,) = [node for node in call.whole.nodes if node.op == "get_attr"]
    assert node.meta["value"] is OUTSIDE


class Twice(Two):
    def forward(self, x):
        return self.second(self.first(self.first(x)) + self.second(x))


def test_a_module_that_is_called_twice_is_two_nodes():
    call = check(Twice(), rows())
    assert [node.target for node in call.whole.nodes if node.op == "call_module"] == [
        "first",
        "first",
        "second",
        "second",
    ]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.right.append(self.left[0])
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.right(self.left(self.table(ids)))
        return self.head(x), F.linear(x, self.table.weight)


def test_modules_and_weights_that_are_shared():
    check(Shared(), torch.randint(0, 9, (4, 3)))


class InPlace(Two):
    def between(self, x):
        total = x.sum(1, keepdim=True)
        view = x[:, :2]
        x += 1
        view.mul_(2)
        x[:, 3] = 0
        F.relu(x, inplace=True)
        torch.add(x.detach(), 1, out=torch.zeros(x.shape))
        return x * total


def test_in_place_glue_keeps_its_order():
    call = check(InPlace(), rows())
    assert sum("effect" in node.meta for node in call.whole.nodes) == 5


class ReadBefore(Two):
    def forward(self, x):
        h = self.first(x).clone()
        before = h.sum()
        h += 1
        return self.second(h), before


def test_what_read_a_value_before_it_was_changed_stays_before():
    call = check(ReadBefore(), rows())
    assert not call.tail


class ViewThenSet(Two):
    """Views of what is changed: never used again, used before only, and used after."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x):
        x = x.clone()
        x[:, 0] = x[:, 1] * 2
        h = self.first(x)
        view = h[:, 1]
        before = view * 2
        h[:, 0] = before
        h[:, 1] = 3
        y = self.second(h)
        if self.kind == "tail":
            return y, view * 2
        return {"dead": y, "before": (y, before), "after": (y, view)}[self.kind]


@pytest.mark.parametrize("kind", ["dead", "before", "after", "tail"])
def test_a_view_of_what_is_changed_is_carried_on_only_if_it_is_used(kind: str):
    """The names of changed views that nothing used were left over, so they counted as tail, and `x[:, 0] = ...`, which has no
    value, as what the tail needs of the modules. A changed value belongs with what has changed it, used or not, and what has
    read a view before the change stays before it although the view itself is used no more."""
    call = check(ViewThenSet(kind), rows())
    assert all(call.spec(node) is not None for node in call.frontier)
    assert all(node.users for node in call.whole.nodes if node.target is changed)
    if kind != "tail":
        assert not call.tail


def test_a_change_after_the_last_module_of_one_of_two_views_that_modules_use_is_refused():
    """Values that modules make come to the tail joined from micro batches, each in memory of its own: the view kept its old
    numbers there, silently."""

    class Torn(Two):
        def forward(self, x):
            h = self.first(x)
            view = h[:, :WIDTH]
            y = self.second(h) + self.second(view)
            h += 1
            return y, view * 2

    with pytest.raises(
        RecordingError, match=r"the value of __getitem__ at .* shares memory with what the module first"
    ):
        recordings_of(Torn()).of((rows(),), {}, 2)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return checkpoint(lambda y: self.act(self.linear(y)), x, use_reentrant=False)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            Inner(),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)),
            nn.Linear(WIDTH, WIDTH),
        )
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint(self.b, self.a(x), use_reentrant=self.reentrant)
        return checkpoint(lambda y: self.c(y).sin() * 2, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_and_around_modules(reentrant: bool):
    call = check(Checkpointed(reentrant), rows())
    marked = {node.target: node.meta["checkpoint"] for node in call.whole.nodes if node.op == "call_module"}
    assert marked == {"a": False, "b": True, "c": True}


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


reverse = Reversal.apply


class Custom(Two):
    def between(self, x):
        return reverse(x, 5.0) + Reversal.apply(x, 2.0)


def test_autograd_functions_keep_their_own_backward():
    call = check(Custom(), rows())
    assert [node.name for node in call.whole.nodes if node.op == "call_function"] == ["apply", "apply_1", "add"]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(F.dropout(self.first(x), 0.2, self.training))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_batch_norm(training: bool):
    model = Normed().train(training)
    call = check(model, rows(8))
    assert [node.meta["random"] for node in call.whole.nodes if node.target is F.dropout] == [True] * training
    assert model.first[1].num_batches_tracked == 0


class Contexts(Two):
    def forward(self, x):
        with torch.no_grad():
            target = self.first(x) * 2
        with torch.autocast("cpu", torch.bfloat16):
            y = self.second(target) @ target.T.T.new_ones(WIDTH, 2)
        return y, target.detach(), self.second(x)


def test_contexts_are_kept_node_by_node():
    check(Contexts(), rows())
    with torch.autocast("cpu", torch.bfloat16):
        check(Contexts(), rows())
    with torch.no_grad():
        check(Contexts(), rows())


def test_inference_mode_records_without_gradients():
    model = Two()
    with torch.inference_mode():
        call = recordings_of(model).of((rows(),), {}, 2)
    assert not call.spec(call.frontier[0]).requires_grad


class Gain(Two):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def between(self, x):
        return x * self.gain


def test_a_changed_attribute_or_flag_is_recorded_anew():
    model = Gain()
    recordings = recordings_of(model)
    first = check(model, rows(), recordings=recordings)
    assert check(model, rows(), recordings=recordings) == first
    model.gain = 2.0
    second = check(model, rows(), recordings=recordings)
    assert second != first
    model.gain = 1.0
    assert check(model, rows(), recordings=recordings) == first
    model.second.weight.requires_grad_(False)
    assert check(model, rows(), recordings=recordings) not in (first, second)
    model.second.weight.requires_grad_(True)
    model.eval()
    assert check(model, rows(), recordings=recordings) not in (first, second)
    model.train()
    model.second = nn.Linear(WIDTH, WIDTH)
    assert check(model, rows(), stages={"a": ["first"], "b": ["second"]}) not in (first, second)


def test_a_model_on_the_meta_device_is_recorded_for_the_device_it_goes_to():
    with torch.device("meta"):
        model = Vision()
    call = recordings_of(model).of((rows(4, 1, 8, 8),), {}, 2)
    assert {call.spec(node).device.type for node in call.frontier} == {"cpu"}
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.scale = torch.tensor(2.0)
    model.positions.zero_()
    image = rows(4, 1, 8, 8)
    model.eval()
    call = recordings_of(model).of((image,), {}, 2)
    assert torch.equal(in_parts(call, [image]), model(image))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        x = self.first(x)
        scores = (x @ x.transpose(1, 2)).masked_fill(mask, -1e9)
        return self.second(scores.softmax(-1) @ x)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_square_mask_as_long_as_the_batch_is_not_cut(micro_batches: int):
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    call = check(Masked(), rows(4, 4, WIDTH), mask, micro_batches=micro_batches)
    if micro_batches > 1:
        assert call.is_cut == (True, False)
    assert call.batch_dim(call.frontier[0]) == 0


class Objects(Two):
    """An object that torch's trees do not know, made by the glue and by a module."""

    def forward(self, x, bag=None):
        made = Bag(self.first(x))
        y = self.second(made.value if bag is None else bag.value)
        return Bag([y, made.value]), Bag(3)


def test_objects_around_tensors_come_back_around_theirs():
    model = Objects()
    for args in ((rows(),), (rows(), Bag(rows()))):
        call = recordings_of(model).of(args, {}, 2)
        result, number = in_parts(call, call.input_tensors(args, {}))
        real = model(*args)[0]
        assert torch.equal(result.value[0], real.value[0])
        assert torch.equal(result.value[1], real.value[1])
        assert number.value == 3


class Filler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, state):
        x = self.linear(x) if state.seen is None else self.linear(x) + state.seen
        state.seen, state.count = x, state.count + 1
        return x


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Filler(), Filler()

    def forward(self, x):
        state = State()
        return self.second(self.first(x, state), state), state


def test_an_object_that_modules_fill_is_made_afresh_and_stays_where_it_is():
    model = Filled()
    call = recordings_of(model).of((rows(),), {}, 2)
    x = rows()
    for _ in range(2):  # afresh each time
        made, state = in_parts(call, [x])
        assert torch.equal(made, model(x)[0])
    first, second = [node for node in call.whole.nodes if node.op == "call_module"]
    (filled,) = [node for node in second.all_input_nodes if node.target is changed]
    assert filled.args[1] is first, "the second uses what the first has left there"
    for use in (lambda: state.seen, lambda: bool(state), lambda: list(state), lambda: state()):
        with pytest.raises(RecordingError, match="State among the model's outputs"):
            use()


class Offset(nn.Module):
    def __init__(self, change: bool) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x, state):
        if self.change:
            state.seen.add_(1)
        return self.linear(x) + state.seen


class Held(nn.Module):
    """The glue gives modules an object that holds a tensor from the start."""

    def __init__(self, change: bool) -> None:
        super().__init__()
        self.first, self.second = Offset(change), Offset(False)

    def forward(self, x):
        state = State()
        state.seen = torch.full((1,), 3.0)
        return self.second(self.first(x, state), state)


@pytest.mark.parametrize("change", [False, True])
def test_what_an_object_holds_from_the_start_is_no_modules_unless_it_changes_it(change: bool):
    """Every tensor in the object after the first module counted as put there by it, so that whoever read one later had to be
    on its stage; a key-value cache with a sliding window holds one from the start."""
    call = check(Held(change), rows())
    assert any(node.target is changed for node in call.whole.nodes) == change


class Reads(Two):
    def __init__(self, read) -> None:
        super().__init__()
        self.read = read

    def between(self, x):
        return x * 2 if self.read(x) else x


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item() > 0,
        lambda x: x.sum() > 0,
        lambda x: float(x.mean()),
        lambda x: x.tolist(),
        lambda x: x.detach().numpy(),
        lambda x: x[x > 0].shape,
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.autograd.grad(x.sum(), x),
        lambda x: random.random() < 0.5,
        lambda x: numpy.random.rand() < 0.5,
    ],
)
def test_what_depends_on_values_in_the_glue_is_refused_with_its_line(read):
    model = Reads(read)
    drawn = random.getstate(), numpy.random.get_state()[1].copy()
    with pytest.raises(RecordingError) as caught:
        recordings_of(model).of((rows(),), {}, 2)
    assert "test_own_models.py:" in str(caught.value)
    assert "move that code into a module" in str(caught.value)
    assert "epl.forward_backward" in str(caught.value)
    assert random.getstate() == drawn[0]
    assert (numpy.random.get_state()[1] == drawn[1]).all()


def _flip() -> bool:
    number = random.randint(0, 9)  # the line of the draw
    return number > 4


class Draws(Two):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.noisy = Noisy()

    def between(self, x):
        x = self.noisy(x)
        if self.kind == "python":
            return x * 2 if random.uniform(0, 1) > 0.5 else x  # the line of the draw
        if self.kind == "in a function":
            return x * 2 if _flip() else x
        if self.kind == "last":
            return self.noisy(x) * random.random()  # the line of the draw
        return x * numpy.random.rand()  # the line of the draw


class Noisy(nn.Module):
    def forward(self, x):
        return x + random.random() * numpy.random.rand()


@pytest.mark.parametrize("kind", ["python", "in a function", "last", "numpy"])
def test_a_draw_that_torch_does_not_see_is_refused_with_the_line_that_draws(kind: str):
    """It is only noticed when the forward has ended, and the line that called the model was named."""
    with pytest.raises(RecordingError) as caught:
        recordings_of(Draws(kind)).of((rows(),), {}, 2)
    whose = "NumPy's numpy.random" if kind == "numpy" else "Python's random"
    assert f"the forward draws from {whose} between its modules" in str(caught.value)
    (file, number), *_ = re.findall(r" at (\S+):(\d+)", str(caught.value))
    line = linecache.getline(file, int(number))
    assert "# the line of the draw" in line
    assert {"python": "uniform", "in a function": "randint", "last": "random.random", "numpy": "numpy"}[kind] in line


class Caught(Two):
    def between(self, x):
        try:
            return x * x.max().item()
        except RuntimeError:
            return x


def test_a_refusal_that_the_forward_catches_is_still_one():
    with pytest.raises(RecordingError, match="reads the value"):
        recordings_of(Caught()).of((rows(),), {}, 2)


class ValueDriven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        chosen = (x[:, 0] > 0).nonzero().flatten()
        out = self.linear(x).index_add(0, chosen, x[chosen])
        return out * (2 if out.sum().item() > 0 else 1) * random.random()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ValueDriven(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x))


def test_a_module_that_needs_values_runs_once_on_stand_ins():
    model = Experts()
    with torch.no_grad():
        model.first.linear.weight.fill_(float("nan"))  # its own numbers are not looked at
    call = check(model, rows(), compare=False)
    assert call.spec(call.frontier[0]).shape == (5, WIDTH)
    assert call.batch_dim(call.frontier[0]) == 0


class Counting(nn.Module):
    """Sorts rows by expert, and counts on a row's experts being different ones."""

    def forward(self, x, experts):
        counts = torch.zeros(len(x), 3, dtype=torch.long).scatter_(1, experts, 1).sum(0)
        pieces = x[experts.flatten().argsort() // 2].split(counts.tolist())
        return torch.cat(pieces).reshape(*experts.shape, WIDTH).sum(1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), Counting()

    def forward(self, x):
        return self.experts(x, self.gate(x).topk(2).indices)


def test_a_module_that_fails_on_equal_indices_is_given_different_ones():
    # Stand-ins for integers are zeros: each row went to one expert twice.
    call = check(Gated(), rows(), compare=False)
    assert call.spec(call.frontier[0]).shape == (5, WIDTH)


def test_a_wrong_model_says_what_is_wrong_itself():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        recordings_of(Two()).of((rows(5, 3),), {}, 2)


class Folding(Two):
    def forward(self, x):
        y = self.first(x).reshape(-1, 2)
        return self.second(y.reshape(-1, WIDTH)), y


def test_what_carries_the_batch_says_so_when_asked():
    call = recordings_of(Folding()).of((rows(4),), {}, 2)
    dims = {}
    for node in call.frontier:
        try:
            dims[node.name] = call.batch_dim(node)
        except RecordingError as error:
            dims[node.name] = str(error)
    assert dims["second"] == 0
    assert dims["reshape"] == Flat(0, 3)


class Merging(nn.Module):
    """Rows and positions in one dim, by `merge`."""

    def __init__(self, merge) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.merge = merge

    def forward(self, x):
        return self.second(self.merge(self.first(x)))


IN_ORDER = {
    "flatten": lambda h: h.flatten(0, 1),
    "view": lambda h: h.view(-1, WIDTH),
    "reshape": lambda h: h.reshape(h.shape[0] * h.shape[1], WIDTH),
    "then element by element": lambda h: torch.relu(h.flatten(0, 1)) * torch.ones(WIDTH) + h.view(-1, WIDTH),
    "then normalised": lambda h: F.layer_norm(h.flatten(0, 1), (WIDTH,)).softmax(-1),
    "windows": lambda h: h.view(-1, 3, 2, 3).permute(0, 2, 1, 3).reshape(-1, WIDTH),
    "every row again": lambda h: h.mean(1).repeat_interleave(3, dim=0),
    "a part of it": lambda h: torch.cat([h, h], -1).flatten(0, 1).chunk(2, -1)[1],
    "there and back and there": lambda h: h.flatten(0, 1).view(h.shape).flatten(0, 1),
    "moved and moved back": lambda h: h.flatten(0, 1).t().t(),
}
OUT_OF_ORDER = {
    "positions first": lambda h: h.transpose(0, 1).flatten(0, 1),
    "positions first, later": lambda h: torch.relu(h.transpose(0, 1).flatten(0, 1)) + 1,
    "the batch again": lambda h: h.mean(1).repeat(3, 1),
    "joined": lambda h: torch.cat([h.mean(1), h.sum(1), h.std(1)]),
    "joined flat": lambda h: torch.cat([h.flatten(0, 1), h.flatten(0, 1)]),
    "turned round": lambda h: h.flatten(0, 1).flip(0),
}


@pytest.mark.parametrize("how", IN_ORDER)
def test_rows_merged_with_what_comes_after_them_are_known(how):
    call = recordings_of(Merging(IN_ORDER[how])).of((rows(5, 3, WIDTH),), {}, 2)
    assert call.batch_dim(call.frontier[0]) == Flat(0, 3)


@pytest.mark.parametrize("how", OUT_OF_ORDER)
def test_rows_that_do_not_lie_one_after_the_other_are_not_joined(how):
    """As long as what is in order: sizes do not tell them apart."""
    call = recordings_of(Merging(OUT_OF_ORDER[how])).of((rows(5, 3, WIDTH),), {}, 2)
    assert call.is_flat(call.frontier[0])
    with pytest.raises(RecordingError, match="whether they lie there row by row is not known"):
        call.batch_dim(call.frontier[0])


class BySize(Two):
    def between(self, x):
        return x.sin() if len(x) > 3 else x.cos()


def test_other_operations_at_another_size_are_refused_with_both_lines():
    with pytest.raises(RecordingError, match=r"sin \(.*there, cos \(.*here"):
        recordings_of(BySize()).of((rows(4),), {}, 2)


class Assigns(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.last, self.times = None, 0

    def between(self, x):
        self.average = self.average * 0.5 + x.detach().mean(0)
        self.calls += 1
        self.last, self.times = x.mean(), self.times + 1
        return x + self.average


def test_what_the_glue_sets_is_set_by_the_replay():
    model, x = Assigns(), rows()
    recordings = recordings_of(model)
    real = Assigns()
    real.load_state_dict(model.state_dict())
    for _ in range(3):
        call = recordings.of((x,), {}, 2)
        assert torch.equal(in_parts(call, [x]), real(x))
        assert torch.equal(model.average, real.average)
        assert torch.equal(model.last, real.last)
        assert (model.times, model.calls) == (real.times, real.calls)


def test_several_sizes_and_widths():
    call = recordings_of(Two()).of((rows(7),), {}, 3, widths=(1, 2))
    assert call.sizes == (3, 2, 2)
    assert set(call.by_size) == {7, 3, 2, 1}


def test_no_batch_at_all():
    class Free(Two):
        def forward(self, n):
            return self.second(self.first(torch.ones(n, WIDTH)))

    call = check(Free(), 3, micro_batches=1)
    assert not call.depends_on_batch(call.frontier[0])
    with pytest.raises(RecordingError, match="2 micro batches"):
        recordings_of(Free()).of((3,), {}, 2)


class Loss(nn.Module):
    def forward(self, logits, labels):
        keep = labels != -100
        return (F.cross_entropy(logits, labels, reduction="none") * keep).sum() / keep.sum()


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss, Loss])
def test_a_loss_module_is_part_of_the_tail(criterion):
    class WithLoss(Two):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = criterion()

        def forward(self, x, y):
            return self.criterion(super().forward(x), y)

    call = check(WithLoss(), rows(), torch.tensor([1, -100, 2, 3, -100]))
    assert [node.name for node in call.frontier] == ["second"]


class Captures(Two):
    def forward(self, x):
        factor = x.sum(1, keepdim=True)
        return (
            self.second(x, functools.partial(lambda y, f: y * f, f=factor))
            if False
            else self.apply_to(x, lambda y: y * factor)
        )

    def apply_to(self, x, function):
        return self.caller(self.first(x), function)


def test_a_function_that_has_captured_a_value_is_refused():
    class Caller(nn.Module):
        def forward(self, x, function):
            return function(x)

    model = Captures()
    model.caller = Caller()
    with pytest.raises(RecordingError, match="captured a tensor"):
        recordings_of(model).of((rows(),), {}, 2)


def test_a_list_that_a_module_fills_is_refused():
    class Appends(nn.Module):
        def forward(self, x, found):
            found.append(x.sum())
            return x

    class Collects(Two):
        def __init__(self) -> None:
            super().__init__()
            self.appends = Appends()

        def forward(self, x):
            found = []
            return self.second(self.appends(self.first(x), found)) + sum(found)

    with pytest.raises(RecordingError, match="changes a list or dict that it is given"):
        recordings_of(Collects()).of((rows(),), {}, 2)


def test_a_value_that_a_module_keeps_to_itself_is_refused():
    class Keeps(nn.Module):
        def forward(self, x):
            self.kept = x * 2
            return x + 1

    class Peeks(Two):
        def __init__(self) -> None:
            super().__init__()
            self.keeps = Keeps()

        def forward(self, x):
            return self.second(self.keeps(self.first(x))) + self.keeps.kept

    model = Peeks()
    with pytest.raises(RecordingError, match=r"not returned by it .keeps keeps it as its attribute kept"):
        recordings_of(model).of((rows(),), {}, 2)
    assert not hasattr(model.keeps, "kept")


def test_arrays_are_refused():
    with pytest.raises(RecordingError, match="numpy array"):
        Recordings(Two(), children_apart(Two())).of((numpy.zeros((4, WIDTH), dtype="float32"),), {}, 2)


def test_lazy_modules_are_refused():
    class Lazy(Two):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LazyLinear(WIDTH)

    with pytest.raises(RecordingError, match=r"first\.weight has no shape yet"):
        recordings_of(Lazy()).of((rows(),), {}, 2)
