"""What the modules of a recorded forward would cost: time and memory, estimated by replaying them on fake tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from epl import _torch
from epl.graph.blocks import structure_of
from epl.graph.record import RecordedCall, hooks, steps
from epl.graph.record.chance import PythonStreams, torch_streams_kept
from epl.graph.record.fakes import FakeModel
from epl.graph.record.recording import Recording
from epl.graph.record.tree import tensors_of
from epl.graph.spec import Spec

OPERATIONS_PER_BYTE = 20
"""How many floating point operations take as long as moving one byte, roughly, on today's devices: what only moves data
(embeddings, norms) takes time too."""


@dataclass(frozen=True)
class Cost:
    """Of one call of a module with one micro batch."""

    time: float
    """In floating point operations of the forward; what is moved counts by `OPERATIONS_PER_BYTE`."""
    activations: int = 0
    """Bytes kept for the backward; not known, 0, if the module could not be replayed on fakes."""


def leaf_costs(
    recorded: RecordedCall, model: nn.Module, micro_batches: int, device: torch.device
) -> dict[fx.Node, Cost]:
    """The cost of every call of a leaf, the recorded batch being so many micro batches.

    If one of them cannot be replayed without numbers, all go by the number of their parameters.
    """
    try:
        found = dict(_measured(recorded.whole, model, device))
    except Exception:  # whatever user code raises when its tensors have no numbers
        leaves = (node for node in recorded.whole.nodes if node.op == "call_module")
        found = {node: Cost(float(_numel(recorded.whole.modules[str(node.target)]))) for node in leaves}
    return {node: Cost(cost.time / micro_batches, cost.activations // micro_batches) for node, cost in found.items()}


def _measured(recording: Recording, model: nn.Module, device: torch.device) -> Iterator[tuple[fx.Node, Cost]]:
    streams = PythonStreams()
    fake = FakeModel(model, device)
    try:
        with (
            torch_streams_kept(),
            hooks.left_out(model),
            torch.inference_mode(False),
            _torch.fake_mode(),
            fake.entered(()),
        ):
            weights = {_torch.memory_of(parameter) for parameter in model.parameters()}
            fed = [node.meta["spec"].empty() for node in (*recording.placeholders, *recording.draws)]
            env: dict[fx.Node, Any] = dict(zip((*recording.placeholders, *recording.draws), fed, strict=True))
            known: dict[Hashable, Cost] = {}
            for node in recording.nodes:
                if node in env:
                    continue
                if node.op != "call_module":
                    recording.program([node], keep=[node])(env)
                    continue
                given = tensors_of([env[each] for each in node.all_input_nodes])
                key = _kind(recording.modules[str(node.target)], node, given)
                result = _like_before(node) if key in known else None
                if result is not None:
                    env[node] = result
                else:
                    with FlopCounterMode(display=False) as counter, _saved(weights) as saved:
                        recording.program([node], keep=[node])(env)
                    moved = sum(t.nbytes for t in (*given, *tensors_of(env[node])))
                    time = counter.get_total_flops() + OPERATIONS_PER_BYTE * moved
                    known[key] = Cost(time, sum(saved.values()))
                yield node, known[key]
    finally:
        streams.restore()


def _kind(module: nn.Module, node: fx.Node, given: Sequence[torch.Tensor]) -> Hashable:
    """What is equal for calls that cost the same: blocks of a family that are given the same sizes."""
    flags = tuple(parameter.requires_grad for parameter in module.parameters())
    specs = tuple(Spec.of(tensor) for tensor in given)
    return structure_of(module), module.training, flags, bool(node.meta.get("checkpoint")), specs


def _like_before(node: fx.Node) -> Any:
    """What a call of a known kind returns, without calling again; None if that is not known."""
    if any(user.target is steps.part_of_object for user in node.users):
        return None
    specs: tuple[Spec, ...] | None = node.meta.get("specs")
    if specs is None:
        specs = (node.meta["spec"],) if "spec" in node.meta else None
    if specs is None:
        return None
    made = [spec.empty().clone() for spec in specs]  # clones: no leaves of autograd, which may not be changed in place
    return made if "specs" in node.meta else made[0]


@contextmanager
def _saved(weights: set[int]) -> Iterator[dict[int, int]]:
    """The memory that autograd keeps of what is computed inside, parameters apart: bytes by memory."""
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memory = _torch.memory_of(tensor)
        if memory not in weights:
            found[memory] = max(found.get(memory, 0), tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield found


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
