"""The user's hooks while a model is recorded, and when it is replayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from epl.errors import RecordingError
from tests.graph.record.replaying import check, in_parts, recordings_of

COUNT = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.pair = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.mixed = Mixed()

    def forward(self, x):
        return self.mixed(self.pair[1](self.pair[0](self.body(x))))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x))


STAGES = {"one": ["body", "pair.0", "mixed.a"], "two": ["pair.1", "mixed.b"]}


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def test_hooks_on_modules_that_run_as_a_whole_run_again_with_them(model):
    seen, kept = [], {}

    def watch(module, args, out):
        global COUNT
        COUNT += 1
        seen.append(out.shape)
        kept["last"] = out
        watch.calls = getattr(watch, "calls", 0) + 1

    model.body[0].register_forward_hook(watch)
    model.pair[0].register_forward_hook(lambda module, args, out: out * 2)
    model.pair[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.pair[0].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    call = recordings_of(model, STAGES).of((torch.randn(4, 4),), {}, 2)
    assert (seen, kept, COUNT) == ([], {}, 0)
    x = torch.randn(4, 4)
    in_parts(call, [x])
    assert (len(seen), COUNT) == (1, 1)
    check(model, torch.randn(4, 4), stages=STAGES)


def test_a_hook_that_changes_the_shape_is_believed(model):
    model.body.register_forward_hook(lambda module, args, out: torch.cat([out, out], 1))
    model.pair[0] = nn.Linear(8, 4)
    check(model, torch.randn(4, 4), stages=STAGES)


def test_a_hook_that_needs_numbers_is_left_out(model):
    seen = []
    model.body[0].register_forward_hook(lambda module, args, out: seen.append(out.sum().item()))
    call = recordings_of(model, STAGES).of((torch.randn(4, 4),), {}, 2)
    assert seen == []
    in_parts(call, [torch.randn(4, 4)])
    assert len(seen) == 1


def test_forward_hooks_on_a_module_between_stages_are_glue(model):
    model.mixed.register_forward_hook(lambda module, args, out: out.sin())
    model.mixed.register_forward_pre_hook(lambda module, args: (args[0].cos(),))
    call = check(model, torch.randn(4, 4), stages=STAGES)
    assert {"sin", "cos"} <= {node.name for node in call.whole.nodes}


def test_another_hook_on_a_module_between_stages_is_recorded_anew(model):
    recordings = recordings_of(model, STAGES)
    first = check(model, torch.randn(4, 4), recordings=recordings)
    handle = model.mixed.register_forward_hook(lambda module, args, out: out.sin())
    assert check(model, torch.randn(4, 4), recordings=recordings) != first
    handle.remove()
    assert check(model, torch.randn(4, 4), recordings=recordings) == first


def test_a_backward_hook_between_stages_is_refused(model):
    model.mixed.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    with pytest.raises(RecordingError, match="a backward hook is registered on a Mixed"):
        recordings_of(model, STAGES).of((torch.randn(4, 4),), {}, 2)


def test_the_models_own_hooks_are_not_recorded(model):
    """They run where the model is called, on what it returns in the end."""
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(out))
    model.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    recordings_of(model, STAGES).of((torch.randn(4, 4),), {}, 2)
    assert seen == []


class Tensors(nn.Module):
    def __init__(self, found) -> None:
        super().__init__()
        self.a, self.b, self.found = nn.Linear(4, 4), nn.Linear(4, 4), found

    def forward(self, x):
        h = self.a(x)
        h.register_hook(self.found.append)
        return self.b(h)


def test_hooks_on_tensors_between_stages_run_in_the_replay():
    found = []
    model, x = Tensors(found), torch.randn(4, 4)
    call = recordings_of(model).of((x,), {}, 2)
    in_parts(call, [x]).sum().backward()
    assert [tuple(gradient.shape) for gradient in found] == [(4, 4)]
    assert call.tail == ()


TAKEN: list[list[torch.Tensor]] = []


class Chosen(nn.Module):
    """Experts whose code looks at numbers: it runs on stand-ins, without hooks."""

    def forward(self, x, gates):
        chosen = (gates[:, 0] > 0).nonzero().flatten()
        return x.index_add(0, chosen, x[chosen]) * 0.5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.out = nn.Linear(4, 3), Chosen(), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.experts(x, self.gate(x)))


class Overheard(nn.Module):
    """As Hugging Face's models with router logits: hooks, put there once, take out what gates inside of layers say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.is_hooked = False

    def forward(self, x):
        if not self.is_hooked:
            for layer in self.layers:
                layer.gate.register_forward_hook(lambda module, args, out: TAKEN[-1].append(out) if TAKEN else None)
            self.is_hooked = True
        TAKEN.append([])
        for layer in self.layers:
            x = layer(x)
        gates = TAKEN.pop()
        return x, gates[0].softmax(-1) + gates[1].softmax(-1)


def test_what_hooks_take_out_of_a_module_that_runs_as_a_whole_is_seen():
    # Nothing was taken out: layers that need numbers run without hooks, and what others gave away belonged to nobody.
    torch.manual_seed(0)
    model = Overheard()
    recordings = recordings_of(model, {"one": ["layers.0"], "two": ["layers.1"]})
    for rows in (4, 6):  # the second recording found a note that hooks are there, and none
        x = torch.randn(rows, 4)
        call = recordings.of((x,), {}, 2)
        made = in_parts(call, [x])
        assert all(map(torch.equal, made, model(x)))


def test_a_forward_that_fails_whatever_hooks_there_are_says_its_own_error(model):
    model.body[0].register_forward_hook(lambda module, args, out: None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        recordings_of(model, STAGES).of((torch.randn(4, 3),), {}, 2)
