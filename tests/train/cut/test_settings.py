"""A cut model runs later than it is called: what its modules are set to meanwhile is noticed, what they set themselves is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from epl.errors import NotBuiltError, UsageError
from epl.train.cut.settings import Settings
from tests.train.cut.threads import TurnNetwork, cut_in_memory

X = torch.linspace(-1, 1, 24).view(6, 4)


class Block(nn.Module):
    power = 1

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.0)
        self.scale, self.calls, self.loss = 1.0, 0, None
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        return self.scale * self.dropout(self.linear(x)) ** self.power + self.shift


def in_two_stages(loop):
    """`loop(model)` on two ranks, each with a stage of a model of two blocks; what it returns, by rank."""
    network = TurnNetwork(2)

    def on_rank(rank):
        torch.manual_seed(0)
        return loop(cut_in_memory(network, rank, nn.Sequential(Block(), Block()), 2))

    return network.run(on_rank)


CHANGES = {
    "Block.scale": lambda model: setattr(model[0], "scale", 2.0),
    "Block.power": lambda model: setattr(model[1], "power", 2),
    "Dropout.p": lambda model: setattr(model[1].dropout, "p", 0.5),
    "Block.dropout": lambda model: setattr(model[0], "dropout", nn.Identity()),
    "Block.linear": lambda model: setattr(model[0], "linear", nn.Linear(4, 4)),
    "Block.shift": lambda model: model[1].shift.add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_call_and_backward_is_refused(name):
    def loop(model):
        model(X).sum().backward()
        loss = model(X).sum()
        CHANGES[name](model)
        loss.backward()

    with pytest.raises(UsageError, match=f"{name} was set to something else between"):
        in_two_stages(loop)


@pytest.mark.parametrize("name", ["Block.scale", "Block.power", "Block.shift"])
def test_changes_between_steps_are_followed(name):
    def loop(model):
        losses = [model(X).sum()]
        losses[0].backward()
        CHANGES[name](model)
        losses.append(model(X).sum())
        losses[1].backward()
        return [loss.item() for loss in losses]

    torch.manual_seed(0)
    assert in_two_stages(loop) == [pytest.approx(loop(nn.Sequential(Block(), Block())))] * 2


def test_what_forwards_change_themselves_is_theirs():
    # Two calls are made before the first of them runs: the second sees what the first has counted.
    def loop(model):
        first, second = model(X), model(2 * X)
        total = first.sum().item()
        second.sum().backward()
        model(X).sum().backward()
        return total

    in_two_stages(loop)


def test_a_module_that_grows_between_two_calls_does_not_forget_what_is_theirs():
    def loop(model):
        first = model(X)
        model.later = None
        model.register_buffer("steps", torch.zeros(()))  # everything is looked up anew
        second = model(X)
        first.sum().item()
        second.sum().backward()

    in_two_stages(loop)


def test_the_loss_may_be_kept_in_the_model():
    def loop(model):
        model[1].loss = model(X).sum()
        model[1].loss.backward()
        return float(model[1].loss.detach())

    torch.manual_seed(0)
    assert in_two_stages(loop) == [pytest.approx(loop(nn.Sequential(Block(), Block())))] * 2


@pytest.mark.parametrize("steps", [0, 1])
def test_a_functional_call_is_refused_with_the_remedy(steps):
    # The first call of a model places it, with whatever is in it then.
    def loop(model):
        own = copy.deepcopy(model)
        other = {name: torch.zeros_like(p) for name, p in own.named_parameters()}
        for _ in range(steps):
            model(X).sum().backward()
        expected = torch.func.functional_call(own, other, (X,))
        assert expected.abs().max() == 0
        torch.func.functional_call(model, other, (X,))

    with pytest.raises(NotBuiltError, match=r"copy\.deepcopy\(model\) made before"):
        in_two_stages(loop)


def test_parameters_that_are_replaced_for_good_are_no_functional_call():
    def loop(model):
        model[0].linear.weight = nn.Parameter(torch.ones(4, 4))
        model(X).sum().backward()
        return model[0].linear.weight.grad

    found = in_two_stages(loop)[0]
    torch.manual_seed(0)
    torch.testing.assert_close(found, loop(nn.Sequential(Block(), Block())))


def test_equal_values_are_no_change():
    module = Block()
    settings = Settings([module], set())
    before = settings.now()
    module.scale = float("1.0")
    module.dropout.p = 0.9  # of another module
    assert settings.changed_since(before) == ""
    module.scale = 1  # an int: another dtype may follow
    assert settings.changed_since(before) == "Block.scale"
