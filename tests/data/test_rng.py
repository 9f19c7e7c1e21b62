from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from epl.data.rng import RngState, RngStream, running, share_seed


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    before = RngState.capture()
    yield
    before.restore()


def draw() -> tuple[float, float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand()), float(np.random.randn())


def test_a_state_restored_draws_the_same_again() -> None:
    draw()  # leaves half of a pair of gaussians in numpy's generator
    state = RngState.capture()
    first = draw()
    assert draw() != first
    state.restore()
    assert RngState.capture() == state
    assert draw() == first


def test_a_seeded_state_is_that_of_the_seed() -> None:
    torch.manual_seed(1 << 40)
    expected = float(torch.rand(()))
    RngState.seeded(1 << 40).restore()
    assert float(torch.rand(())) == expected
    assert RngState.seeded(3) == RngState.seeded(3)
    assert RngState.seeded(3).numpy != RngState.seeded(3 + (1 << 32)).numpy


def test_a_stream_goes_on_where_it_stopped_and_leaves_the_process_alone() -> None:
    stream = RngStream(RngState.seeded(1))
    RngState.seeded(2).restore()
    before = RngState.capture()
    with stream.running():
        first = draw()
    second = None
    try:
        with stream.running():
            second = draw()
            raise KeyError
    except KeyError:
        pass
    assert RngState.capture() == before
    RngState.seeded(1).restore()
    assert (draw(), draw()) == (first, second)


def test_a_stream_in_step_with_the_process_takes_it_along() -> None:
    RngState.seeded(1).restore()
    stream = RngStream(RngState.capture())
    with stream.running():
        draw()
    assert RngState.capture() == stream.state
    draw()
    after = RngState.capture()
    with stream.running():  # no longer in step
        draw()
    assert RngState.capture() == after


def test_each_generator_is_in_step_by_itself() -> None:
    # The three were compared as one: where Python's was not seeded alike, torch's was put back too, on all ranks but the first.
    # Their streams parted, and with them the dropout masks of a split.
    RngState.seeded(1).restore()
    stream = RngStream(RngState.capture())
    random.seed(2)
    own = random.getstate()
    with stream.running():
        draw()
    after = RngState.capture()
    assert (after.torch, after.numpy) == (stream.state.torch, stream.state.numpy)
    assert after.python == own != stream.state.python


def test_no_stream_is_the_process_itself() -> None:
    before = RngState.capture()
    with running(None):
        draw()
    assert RngState.capture() != before


def test_seeds_of_shares_differ_and_repeat() -> None:
    seeds = {share_seed(base, r, j) for base in (5, 6) for r in range(3) for j in range(2)}
    assert len(seeds) == 12
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert share_seed(5, 1, 0) == share_seed(5, 1, 0)
