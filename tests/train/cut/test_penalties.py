"""Terms over parameters that other ranks have: what cannot be right is refused, with what to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epl.errors import LazyValueError
from tests.train.cut.threads import TurnNetwork, cut_in_memory

X, Y = torch.linspace(-1, 1, 48).view(8, 6).sin(), torch.arange(8) % 3


def penalty(module):
    return sum(p.pow(2).sum() for p in module.parameters())


def on_two_stages(loop):
    network = TurnNetwork(2)

    def body(rank):
        torch.manual_seed(0)
        return loop(cut_in_memory(network, rank, nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), 2))

    return network.run(body)


def test_a_term_that_is_read_after_its_parameters_have_changed_is_refused():
    """Other ranks' numbers are fetched when it is read: half of it would be of before the step, half of after."""

    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.no_grad():
            value = F.cross_entropy(model(X), Y) + penalty(model)
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        value.item()

    with pytest.raises(LazyValueError, match=r"after they were changed .* Read it before"):
        on_two_stages(loop)


def test_a_term_that_one_rank_computes_without_asking_is_not_waited_for():
    def loop(model):
        model(X)
        penalty(model[0]).item()

    with pytest.raises(LazyValueError, match="parameters of rank 0 alone, which has them all"):
        on_two_stages(loop)


def test_a_term_from_before_the_first_call_is_not_differentiated():
    """Its graph leads to parameters that have since lost their numbers."""

    def loop(model):
        before = penalty(model)
        (F.cross_entropy(model(X), Y) + before).backward()

    with pytest.raises(LazyValueError, match="write it after that call"):
        on_two_stages(loop)


def test_the_distance_of_two_models_weights_in_evaluation():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    expected = sum(((p + 1) - p.detach()).pow(2).sum() for p in plain.parameters()).item()
    network = TurnNetwork(2)

    def body(rank):
        models = []
        for shift in (0, 1):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
            with torch.no_grad():
                for p in model.parameters():
                    p += shift
            models.append(cut_in_memory(network, rank, model, 2))
        with torch.no_grad():
            outputs = [model(X) for model in models]
            pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
            distance = sum((a - b).pow(2).sum() for a, b in pairs)
            together = (outputs[0].sum() * 0 + distance).item()
            return distance.item(), together

    for found in network.run(body):
        assert found == pytest.approx((expected, expected))
