"""Records a model, replays what was written down, and compares with the model itself, bit for bit."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import torch
from torch import nn

from epl.graph.record import MIXED, RecordedCall, Recordings
from epl.graph.record.standin import StaysOnStages
from epl.graph.record.tree import leaves_of

CONTAINERS = (list, dict, set)


def owners(model: nn.Module, stages: dict[str, list[str]]):
    """`taskgraph_of` for stages given as lists of module paths."""
    own = {}
    for name, paths in stages.items():
        for path in paths:
            for module in model.get_submodule(path).modules():
                own[module] = name

    def taskgraph_of(module: nn.Module):
        found = {own.get(each) for each in module.modules()} - {None}
        return MIXED if len(found) > 1 else next(iter(found), None)

    return taskgraph_of


def children_apart(model: nn.Module):
    """Every child of the model is a stage of its own."""
    return owners(model, {name: [name] for name, _ in model.named_children()})


def recordings_of(model: nn.Module, stages: dict[str, list[str]] | None = None) -> Recordings:
    return Recordings(model, children_apart(model) if stages is None else owners(model, stages))


def snapshot(model: nn.Module) -> list[Any]:
    states: list[Any] = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()]
    for module in model.modules():
        state = dict(module.__dict__)
        tensors = {**state.pop("_parameters"), **state.pop("_buffers")}
        states.append(
            {name: copy.copy(value) if isinstance(value, CONTAINERS) else value for name, value in state.items()}
        )
        states.append(
            {
                name: None if t is None else (id(t), t._version, t.detach().clone(), t.grad)
                for name, t in tensors.items()
            }
        )
    return states


def assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    """Equal trees of equal kinds; tensors bit for bit, or up to a tolerance. A stand-in is equal to what it stands for."""
    if isinstance(one, StaysOnStages):
        assert type(other).__name__ in repr(one)
        return
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.requires_grad == other.requires_grad
        difference = float((one.double() - other.double()).abs().max().detach()) if one.numel() else 0.0
        assert torch.equal(one, other) or difference <= tolerance * float(1 + other.abs().max()), difference
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key], tolerance)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b, tolerance)
    elif hasattr(one, "__dataclass_fields__"):
        assert_same(vars(one), vars(other), tolerance)
    elif not isinstance(one, nn.Module):
        assert repr(one) == repr(other)


def assert_unchanged(before: list[Any], after: list[Any]) -> None:
    for one, other in zip(before, after, strict=True):
        if isinstance(one, numpy.ndarray):
            assert (one == other).all()
        elif isinstance(one, dict):
            assert one.keys() == other.keys()
            for name in one:
                if isinstance(one[name], tuple) and len(one[name]) == 4 and isinstance(one[name][2], torch.Tensor):
                    assert one[name][:2] == other[name][:2], name
                    assert torch.allclose(one[name][2], other[name][2], 0, 0, equal_nan=True), name
                    assert one[name][3] is other[name][3]
                else:
                    assert one[name] is other[name] or repr(one[name]) == repr(other[name]), name
        elif isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def floats(tree: Any) -> list[torch.Tensor]:
    found = (leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in found if leaf.dtype.is_floating_point and leaf.requires_grad]


def gradients(model: nn.Module, result: Any) -> list[torch.Tensor | None]:
    model.zero_grad()
    parts = floats(result)
    if parts:
        sum((part * torch.arange(1.0, part.numel() + 1).view_as(part).sin()).sum() for part in parts).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def run(model: nn.Module, function: Any) -> tuple[Any, Any]:
    """What a function returns from a fixed random state, and the gradients; buffers are put back."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    torch.manual_seed(11)
    result = function()
    found = gradients(model, result) if torch.is_grad_enabled() else []
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return result, found


def replay(call: RecordedCall, size: int, tensors: list[torch.Tensor]) -> Any:
    recording = call.by_size[size]
    env = recording.feed(tensors, call.given)
    recording.replay(recording.nodes, env)
    return recording.rebuild_outputs(env)


def in_parts(call: RecordedCall, tensors: list[torch.Tensor]) -> Any:
    """The body, then the tail, as a cut model does it."""
    env = call.whole.feed(tensors, call.given)
    call.whole.replay(call.body, env)
    return call.finish(tensors, [env[node] for node in call.frontier])


def check(
    model: nn.Module,
    *args: Any,
    stages: dict[str, list[str]] | None = None,
    micro_batches: int = 2,
    recordings: Recordings | None = None,
    compare: bool = True,
    tolerance: float = 0.0,
    **kwargs: Any,
) -> RecordedCall:
    """Record, and compare every way of replaying with the model: whole, in parts, and each micro batch; bit for bit, or up to
    a tolerance."""
    recordings = recordings or recordings_of(model, stages)
    before = snapshot(model)
    call = recordings.of(args, kwargs, micro_batches)
    assert_unchanged(before, snapshot(model))
    tensors = call.input_tensors(args, kwargs)
    if compare:
        real, real_gradients = run(model, lambda: model(*args, **kwargs))
        for function in (lambda: replay(call, call.rows, tensors), lambda: in_parts(call, tensors)):
            made, made_gradients = run(model, function)
            assert_same(made, real, tolerance)
            assert_same(made_gradients, real_gradients, tolerance)
        start = 0
        for size in call.sizes:
            cut = [t[start : start + size] if is_cut else t for t, is_cut in zip(tensors, call.is_cut, strict=True)]
            sliced_args, sliced_kwargs = call.arguments(cut)
            real, real_gradients = run(model, lambda: model(*sliced_args, **sliced_kwargs))  # noqa: B023
            made, made_gradients = run(model, lambda: replay(call, size, cut))  # noqa: B023
            assert_same(made, real, tolerance)
            assert_same(made_gradients, real_gradients, tolerance)
            start += size
    return call
