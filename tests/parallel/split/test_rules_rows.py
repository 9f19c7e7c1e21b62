"""What is sent: which rules stay local, which exchange, which gather."""

from __future__ import annotations

from functools import partial as fixed

import pytest
import torch
from torch.nn import functional as F

from epl.parallel.split.value import SplitTensor
from epl.plan.split.cut import Axis, Cut
from tests.parallel.split.compare import compare, even


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _rows(size: int) -> Cut:
    return Cut(Axis("rows", size, 3, (3, 1, size - 4)))


LOCAL = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(6, 4), (5, 4), (5,)]),
    "matmul": (lambda x, w: x @ w, [(6, 2, 4), (4, 5)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), [(6, 2, 4, 4), (3, 2, 3, 3)]),
    "layer norm": (lambda x, w: F.layer_norm(x, (4,), w), [(6, 4), (4,)]),
    "group norm": (lambda x, w: F.group_norm(x, 2, w), [(6, 4, 3), (4,)]),
    "instance norm": (lambda x: F.instance_norm(x), [(6, 4, 3)]),
    "pool": (lambda x: F.max_pool2d(x, 2), [(6, 2, 4, 4)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), [(6, 2, 3, 3)]),
    "softmax": (lambda x: x.softmax(-1), [(6, 4)]),
    "sort, roll, flip, cumsum, pad": (
        lambda x: F.pad(x.sort(1).values.roll(1, 1).flip(1).cumsum(1), (1, 0)),
        [(6, 4)],
    ),
    "mask": (lambda x: x.masked_fill(torch.arange(6)[:, None] > x, 0.0), [(6, 4)]),
    "rows of a table": (lambda x, w: F.embedding((x.detach() * 9).long().abs() % 5, w), [(6,), (5, 3)]),
    "gather": (lambda x: x.gather(1, (x.detach() > 0).long()), [(6, 4)]),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), [(6, 2, 3, 4)]),
}


@pytest.mark.parametrize("name", LOCAL)
def test_rows_stay_where_they_are(name):
    program, shapes = LOCAL[name]
    sent = []

    def watched(*inputs):
        out = program(*inputs)
        if isinstance(out, SplitTensor):
            assert not out.is_partial
            assert out.place == 0
            sent.append(list(out.ranks.calls))
        return out

    inputs = [_floats(*shape) for shape in shapes]
    compare(watched, inputs, [(0, _rows(6)), *[None] * (len(inputs) - 1)], 3)
    assert sent == [[], [], []]


def test_cross_entropy_of_rows_sends_the_count_only():
    target = torch.tensor([1, 0, 3, 2, 2, 1])
    cut = _rows(6)

    def program(x, t):
        loss = F.cross_entropy(x, t, ignore_index=2)
        if isinstance(loss, SplitTensor):
            assert loss.ranks.calls == ["all-reduce"]
        return loss

    compare(program, [_floats(6, 4), target], [(0, cut), (0, cut)], 3)


def test_cross_entropy_of_classes_never_gathers_logits():
    target = torch.tensor([1, 0, 3, 2, 2, 1])
    ranks = compare(
        fixed(F.cross_entropy, label_smoothing=0.1), [_floats(6, 7), target], [(1, even(7, 2)), (0, even(6, 2))], 2
    )
    assert ranks[0].calls.count("all-gather") == 1  # of the targets
    assert max(size for what, size, _ in ranks[0].notes if what == "all-gather") == 6 * 8


def test_experts_exchange_rows_for_experts():
    def program(x, w):
        return torch.einsum("gecm,emh->gech", x, w)

    ranks = compare(program, [_floats(4, 6, 2, 3), _floats(6, 3, 5)], [(0, even(4, 2)), (0, even(6, 2))], 2)
    assert ranks[0].calls.count("all-to-all") == 2  # there and, in backward, back
    assert [why for what, _, why in ranks[0].notes if what == "all-gather"] == [
        "a cut value becomes whole"
    ]  # the test's


def test_a_pair_of_layers_sums_once_in_each_direction():
    cut = even(7, 2)

    def program(x, first, second):
        return F.linear(F.linear(x * 1, first).relu(), second) + x

    ranks = compare(program, [_floats(3, 4), _floats(7, 4), _floats(4, 7)], [None, (0, cut), (1, cut)], 2)
    assert ranks[0].calls == ["all-reduce", "all-reduce"]


def test_attention_written_for_one_device_runs_by_heads():
    heads = Axis("heads", 3, 2)
    packed, out = Cut(heads, (4, 4, 4)), Cut(heads, (4,))

    def program(x, weight, bias, projection):
        found, _ = F.multi_head_attention_forward(
            x, x, x, 12, 3, weight, bias, None, None, False, 0.0, projection, None, need_weights=False
        )
        return found

    ranks = compare(
        program, [_floats(5, 2, 12), _floats(36, 12), _floats(36), _floats(12, 12)],
        [None, (0, packed), (0, packed), (1, out)], 2,
    )  # fmt: skip
    assert "all-gather" not in ranks[0].calls
    assert ranks[0].calls.count("all-reduce") == 2


def test_batch_norm_moves_its_buffers_alike_on_all_ranks():
    def program(x):
        mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        return F.batch_norm(x, mean, var, training=True), mean, var

    for layout in ((0, even(6, 2)), (1, even(4, 2)), (2, even(3, 2))):
        compare(program, [_floats(6, 4, 3)], [layout], 2)


def test_gathered_rows_get_their_part_of_the_sum_of_gradients():
    # Every rank was sent the whole sum, to keep its rows of it: twice what the plan says of a bridge.
    layouts = [(0, _rows(6)), (0, even(5, 3, "classes"))]
    for ranks in compare(lambda x, w: F.linear(x, w), [_floats(6, 4), _floats(5, 4)], layouts, 3):
        assert ranks.calls == ["all-gather", "all-gather", "all-to-all"]  # rows, for the comparison, backward
