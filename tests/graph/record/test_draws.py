"""Single random numbers in the glue: drawn for every call, with a recording for every way the forward goes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from epl.errors import RecordingError
from tests.graph.record.replaying import in_parts, recordings_of


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        number = torch.rand(1)
        noise = torch.randn([]) * 2
        if number * 2 < 1:
            x = self.b(x)
        return x + noise, number


def test_drawn_numbers_are_the_same_for_a_seed_and_used_in_the_replay():
    model, x = Drawing(), torch.randn(5, 4)
    recordings = recordings_of(model)
    state = torch.get_rng_state()
    calls = [recordings.of((x,), {}, 2, draw_seed=seed) for seed in range(12)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(calls)) == 2, "one recording for each outcome"
    for seed, call in enumerate(calls):
        number, noise = call.given
        assert noise.shape == ()
        with_b = number.item() * 2 < 1
        assert ("b" in [node.target for node in call.whole.nodes]) is with_b
        expected = model.a(x)
        expected = (model.b(expected) if with_b else expected) + noise * 2
        value, same = in_parts(call, [x])
        assert torch.equal(value, expected)
        assert torch.equal(same, number)
        again = recordings_of(model).of((x,), {}, 2, draw_seed=seed)
        assert torch.equal(again.given[0], number)
    assert len({call.given[0].item() for call in calls}) == 12


class PerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        keep = torch.rand(x.shape[0], 1) < 0.5
        return self.b(self.a(x) * keep)


def test_one_number_per_sample_is_no_draw_in_micro_batches_of_one():
    call = recordings_of(PerSample()).of((torch.randn(3, 4),), {}, 3)
    assert call.sizes == (1, 1, 1)
    assert call.given == ()
    assert [node.meta.get("random") for node in call.whole.nodes if node.name == "rand"] == [True]


class ReadsNumber(Drawing):
    def forward(self, x):
        share = torch.rand(()).item()
        return self.b(self.a(x) * share)


def test_a_number_that_is_read_is_right_every_time():
    model, x = ReadsNumber(), torch.randn(4, 4)
    recordings = recordings_of(model)
    for seed in range(3):
        call = recordings.of((x,), {}, 2, draw_seed=seed)
        assert torch.equal(in_parts(call, [x]), model.b(model.a(x) * call.given[0].item()))


class MixesBoth(Drawing):
    def forward(self, x):
        x = self.a(x)
        return self.b(x) if torch.rand([]) < x.mean() else x


def test_a_branch_on_more_than_draws_is_refused():
    with pytest.raises(RecordingError, match="reads the value"):
        recordings_of(MixesBoth()).of((torch.randn(4, 4),), {}, 2)


class Own(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return self.b(self.a(x) * torch.rand(1, generator=self.generator))


def test_the_users_own_generator_is_used_when_the_forward_runs():
    model, x = Own(), torch.randn(4, 4)
    call = recordings_of(model).of((x,), {}, 2)
    assert call.given == ()
    model.generator.manual_seed(3)
    made = in_parts(call, [x])
    model.generator.manual_seed(3)
    assert torch.equal(made, model(x))
