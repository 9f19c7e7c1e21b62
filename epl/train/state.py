"""The whole model's state under the user's own names, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from epl import _torch
from epl.env import Env
from epl.errors import StateError, list_problems
from epl.parallel import copy_from_first
from epl.plan.split.layout import whole_shape
from epl.train.replicas import Replicas

if TYPE_CHECKING:
    from epl.train.cut.state import WholeState
    from epl.train.split.whole import SplitState


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state of the whole model under the user's names, on every rank: it stays as it is while the model trains on.

    Data parallel every rank holds the whole model, so nothing is sent and `if rank == 0:` around it is fine. Of a model in
    stages the parts come from their ranks: there every rank calls it.
    """
    inner = _torch.module_without_compile(model)
    parts, replicas = _parts(inner), Replicas.of(inner)
    if parts is None and replicas is not None and replicas.meta.waits:
        raise StateError(
            f"{type(inner).__name__} was built on the meta device, and its numbers come with its first call: call epl.full_state_dict "
            "after that"
        )
    return parts.gather() if parts is not None else _copies(inner)


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor] | None) -> None:
    """Load a whole model's state; afterwards all ranks hold rank 0's. Ranks other than 0 may pass None.

    Of tied weights one is enough. A model on the meta device that is to be cut into stages takes it at its first call, when it
    is known what is here: until then rank 0 keeps the state.
    """
    inner = _torch.module_without_compile(model)
    replicas = Replicas.of(inner)
    alone = replicas is None or replicas.plan.world_size == 1
    state = None if state is None else _with_tied(inner, state)
    problems = _problems(inner, state) if state is not None else []
    if alone and state is None:
        problems = ["expected a state dict, found None (only ranks other than 0 may leave it out)"]
    if not alone:
        job = Env.get().job("epl.load_full_state_dict")
        everyone = job.gather("epl.load_full_state_dict", (problems, state is None))
        problems = next((said for said, _ in everyone if said), problems)  # type: ignore[misc,has-type]
        if everyone[0][1]:  # type: ignore[index]
            problems = ["rank 0 passed None; expected the state dict there"]
    if problems:
        raise StateError(
            list_problems(f"this state dict does not fit {type(inner).__name__}; nothing was loaded", problems)
        )
    parts = _parts(inner)
    if parts is not None:
        parts.load(state)
        return
    if replicas is not None and replicas.meta.waits:
        replicas.meta.state = state or {}
        return
    if state is not None:
        inner.load_state_dict(state)
    if replicas is not None:
        replicas.meta.loaded()
    if not alone:
        assert dist.group.WORLD is not None
        copy_from_first([*inner.parameters(), *inner.buffers()], dist.group.WORLD)


def _copies(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state that this rank holds, copied, since a gathered one is a copy too: else the same script would keep its best
    weights in one layout, and whatever they have become in another. Tied weights stay one tensor."""
    known: dict[int, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, entry in model.state_dict(keep_vars=True).items():
        if isinstance(entry, torch.Tensor):
            if id(entry) not in known:
                known[id(entry)] = entry.detach().clone()
            entry = known[id(entry)]
        whole[name] = entry
    return whole


def _parts(model: nn.Module) -> WholeState | SplitState | None:
    """Where the parts of the model are, if they are on different ranks by now."""
    replicas = Replicas.of(model)
    if replicas is None:
        return None
    if replicas.split is not None:
        return replicas.split.whole_state()
    return replicas.cut.whole_state() if replicas.cut is not None else None


def _with_tied(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with all names of tied weights; Hugging Face saves them under one."""
    given = {id(tensor): state[name] for name, tensor in model.state_dict(keep_vars=True).items() if name in state}
    tied = {name: given[id(t)] for name, t in model.state_dict(keep_vars=True).items() if id(t) in given}
    return {**tied, **state}


def _problems(model: nn.Module, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Everything that does not fit, before anything is changed."""
    own = model.state_dict(keep_vars=True)
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is not in the model" for name in state if name not in own]
    for name in own:
        expected, found = own[name], state.get(name)
        if (
            isinstance(expected, torch.Tensor)
            and isinstance(found, torch.Tensor)
            and whole_shape(expected) != found.shape
        ):
            problems.append(f"{name}: expected shape {tuple(whole_shape(expected))}, found {tuple(found.shape)}")
    return problems
