"""What follows from other sizes, and what does not."""

from __future__ import annotations

import pytest
import torch

from epl.graph.record.shapes import Form, Rule
from epl.graph.spec import Spec


def spec(*shape: int) -> Spec:
    return Spec.of(torch.empty(shape))


def rule(function, *sizes: tuple[int, ...]) -> Rule:
    made = Rule(tuple(Form.of(spec(*shape)) for shape in function(*sizes[0])), None)
    for each in sizes:
        made.observe(each, [spec(*shape) for shape in function(*each)], None)
    return made


@pytest.mark.parametrize(
    "function",
    [
        lambda b, t: [(b, t, 8)],
        lambda b, t: [(t, b), (3,)],
        lambda b, t: [(b * t, 8)],
        lambda b, t: [(b, t + 1), (t - 2,)],
        lambda b, t: [(b, 4 * t)],
        lambda b, t: [()],
    ],
)
def test_sizes_that_follow(function):
    made = rule(function, (4, 8), (4, 12), (4, 20), (2, 8))
    assert made.predict((2, 16)) == [spec(*shape) for shape in function(2, 16)]


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ((4, 32), "longer than any before"),
        ((4, 4), "shorter than any before"),
        ((4, 13), "all before were multiples of 4"),
        ((3, 12), "two batch sizes are not enough to tell"),
    ],
)
def test_sizes_that_are_not_believed(inputs, why):
    made = rule(lambda b, t: [(b, t)], (4, 8), (4, 12), (4, 20), (2, 8))
    assert made.predict(inputs) is None, why


@pytest.mark.parametrize(
    "function",
    [
        lambda b, t: [(b, t // 2)],
        lambda b, t: [(b, min(t, 16))],
        lambda b, t: [(b, -(-t // 16) * 16)],
        lambda b, t: [(b, t**2 + t)],
    ],
)
def test_laws_that_are_none(function):
    assert rule(function, (4, 8), (4, 13), (4, 20), (2, 8)).predict((4, 11)) is None


def test_two_few_observations():
    assert rule(lambda b, t: [(b, t)], (4, 8), (4, 20)).predict((4, 12)) is None
    assert rule(lambda b, t: [(b, t)], (4, 8), (4, 20)).predict((4, 20)) == [spec(4, 20)]


def test_sizes_that_were_always_equal_are_one_size():
    made = rule(lambda a, b: [(a, b)], (8, 8), (12, 12), (20, 20))
    assert made.predict((16, 16)) == [spec(16, 16)]
    assert made.predict((12, 16)) is None


def test_another_form_ends_the_rule():
    made = rule(lambda t: [(t, 2)], (8,), (12,), (20,))
    made.observe((14,), [Spec.of(torch.empty(2, 14).T)], None)
    assert made.predict((12,)) is None
    made = rule(lambda t: [(t, 2)], (8,), (12,), (20,))
    made.observe((14,), [spec(14, 2)], "something else came out, too")
    assert made.predict((12,)) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, 4, 5),
        torch.empty(3, 4, 5).transpose(0, 2),
        torch.empty(3, 1, 5),
        torch.empty(4, 5).expand(3, 4, 5),
    ],
)
def test_strides_follow_the_order_in_memory(tensor):
    form = Form.of(Spec.of(tensor))
    assert form.at(tensor.shape).stride == tuple(
        stride if size != 1 else found
        for size, stride, found in zip(tensor.shape, tensor.stride(), form.at(tensor.shape).stride, strict=True)
    )


def test_dims_of_size_one_have_one_place():
    # Their strides are arbitrary. T5's position bias had two forms, one from a run and one foreseen, and layers ran for each.
    bias = torch.empty(5, 5, 2).permute(2, 0, 1).unsqueeze(0)
    form = Form.of(Spec.of(bias))
    assert Form.of(form.at(bias.shape)) == form
    assert Form.of(form.at((1, 2, 7, 7))) == form


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        (lambda t: torch.empty(4, t)[:, :-1], (4, 7)),
        (lambda t: torch.empty(4, t, 24)[..., 8:16], (4, 8, 8)),
        (lambda t: torch.empty(4, t, 24)[:, 1:, :8].transpose(0, 1), (7, 4, 8)),
    ],
)
def test_gaps_that_stay_the_same(cut, shape):
    form = Form.of(Spec.of(cut(5)))
    assert form == Form.of(Spec.of(cut(8)))
    assert form.at(shape) == Spec.of(cut(8))


def test_gaps_that_change_are_other_forms():
    assert Form.of(Spec.of(torch.empty(4, 6)[:, :3])) != Form.of(Spec.of(torch.empty(4, 9)[:, :3]))
    assert Form.of(Spec.of(torch.empty(4, 6)[:, ::2])).at((4, 3)) is None
