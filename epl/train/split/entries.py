"""`state_dict()` and `load_state_dict()` of a model with cut parameters.

state_dict()        its entries are this rank's blocks. They load back into this model; saving one raises, since a file of blocks
                    would look like a whole model: `epl.full_state_dict(model)` is the whole one
load_state_dict()   takes a whole model's state on every rank, and keeps this rank's block of each cut parameter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from epl.errors import StateError
from epl.parallel.hook import ModuleHook
from epl.plan.split.layout import ParameterLayout, layout_of


class BlockEntry(torch.Tensor):
    """An entry of a state dict that is one rank's block of a parameter."""

    name: str
    whole_shape: tuple[int, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"{self.name} is this rank's block {tuple(self.shape)} of a split parameter of shape {self.whole_shape}, and a file of blocks would "
            "look like a whole model: save epl.full_state_dict(model), which every rank calls"
        )


def _as_entry(tensor: torch.Tensor, name: str, layout: ParameterLayout) -> BlockEntry:
    entry = tensor.detach().as_subclass(BlockEntry)
    entry.name, entry.whole_shape = name, tuple(layout.shape)
    return entry


def mind_entries(model: nn.Module, rank: int) -> Callable[[], None]:
    """From now on state dicts of the model are as above; the undo. `rank`: this one's among those of the split."""

    def after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name, parameter in module._parameters.items():
            layout = layout_of(parameter) if parameter is not None else None
            found = state.get(prefix + name)
            if layout is not None and isinstance(found, torch.Tensor) and not isinstance(found, nn.Parameter):
                state[prefix + name] = _as_entry(found, prefix + name, layout)

    def before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in module._parameters.items():
            layout = layout_of(parameter) if parameter is not None else None
            found = state.get(prefix + name)
            if layout is None or not isinstance(found, torch.Tensor) or isinstance(found, BlockEntry):
                continue
            if found.shape == layout.shape:
                state[prefix + name] = layout.cut.take(found, layout.dim, rank)
            elif found.shape == layout.block_shape(rank):
                raise StateError(
                    f"{prefix + name} must have its whole shape {tuple(layout.shape)}; found {tuple(found.shape)}, which is that of one rank's "
                    "block, and nobody can tell of which. Load a state that epl.full_state_dict(model) gave"
                )

    handles = []
    for module in model.modules():
        if any(p is not None and layout_of(p) is not None for p in module._parameters.values()):
            handles.append(module.register_state_dict_post_hook(ModuleHook(after_state_dict)))
            handles.append(module.register_load_state_dict_pre_hook(ModuleHook(before_load)))  # type: ignore[no-untyped-call]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
