"""Dropout: the common stream for whole values, the rank's own for cut ones, one device's mask where that is asked for."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from epl.parallel.split.region import region
from epl.parallel.split.value import partial, shard, whole
from epl.plan.split.cut import Axis, Cut
from tests.parallel.split.threads import run_threads

CUT = Cut(Axis("features", 64, 2))
ONES = torch.ones(8, 64)


def _zeros(dim: int = 1, **options):
    def run(ranks):
        value = shard(CUT.take(ONES, dim, ranks.rank).clone(), dim, CUT, ranks)
        return F.dropout(value, **options).local

    return run_threads(run, 2)


def test_ranks_drop_other_elements_of_cut_values():
    first, second = _zeros(p=0.5)
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert 0.3 < (first == 0).float().mean() < 0.7


def test_the_common_stream_is_left_alone_by_cut_values():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    _zeros(p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_dropped_in_evaluation_and_everything_at_one():
    assert all(torch.equal(block, torch.ones(8, 32)) for block in _zeros(p=0.5, training=False))
    assert not any(block.any() for block in _zeros(p=1.0))


def test_exact_dropout_cuts_the_mask_of_one_device():
    torch.manual_seed(5)
    expected = F.dropout(ONES, 0.3)
    state = torch.get_rng_state()

    def run(ranks):
        region.exact_dropout = True
        value = shard(CUT.take(ONES, 1, ranks.rank).clone(), 1, CUT, ranks)
        if ranks.rank:  # ranks as threads share the stream of the process: one after the other
            ranks.board.barrier.wait()
        torch.manual_seed(5)
        out = F.dropout(value, 0.3)
        after = torch.get_rng_state()
        if not ranks.rank:
            ranks.board.barrier.wait()
        return whole(out), after

    for out, after in run_threads(run, 2):
        assert torch.equal(out, expected)
        assert torch.equal(after, state)


def test_a_partial_sum_is_dropped_as_the_whole_it_is():
    torch.manual_seed(7)
    expected = F.dropout(ONES * 2, 0.5)

    def run(ranks):
        value = partial(ONES.clone(), ranks)
        whole(value)
        if ranks.rank:
            ranks.board.barrier.wait()
        torch.manual_seed(7)
        out = F.dropout(value, 0.5)
        if not ranks.rank:
            ranks.board.barrier.wait()
        return out

    for out in run_threads(run, 2):
        assert torch.equal(out, expected)
