"""`state_dict()` and `load_state_dict()` of a model with cut parameters.

state_dict()        its entries are this rank's blocks. They load back into this model; saving one raises, since a file of blocks
                    would look like a whole model: `epl.full_state_dict(model)` is the whole one
load_state_dict()   takes a whole model's state on every rank, and keeps this rank's block of each cut parameter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import nn

from epl import _torch
from epl.errors import StateError
from epl.graph.spec import leaves_of
from epl.parallel.hook import ModuleHook
from epl.parallel.split.cutparameter import CutParameter
from epl.plan.split.layout import layout_of


class BlockEntry(torch.Tensor):
    """An entry of a state dict that is one rank's block of a parameter: a tensor to all code but what saves it.

    So is what code makes of it in the same form (a clone, a running average): that is a block, too, can be loaded as one, and a file
    of it would look like a whole model just the same.
    """

    of_parameter: str
    """Its name in the model. Not `name`: that attribute is torch's own, and cannot be set."""
    whole_shape: tuple[int, ...]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = leaves_of((args, kwargs), torch.Tensor)
        entry = next(leaf for leaf in tensors if isinstance(leaf, BlockEntry))
        if func in _MEMORY:  # safetensors, and what saves with it, take the bytes
            entry.refuse()
        if not all(issubclass(kind, BlockEntry) or _is_block(kind) for kind in types):
            return NotImplemented
        with _torch.no_tensor_subclass():
            found = func(*args, **kwargs or {})
            made = type(found) is torch.Tensor and all(found is not tensor for tensor in tensors)
            if made and found.shape == entry.shape:
                found = _as_entry(found, entry.of_parameter, entry.whole_shape)
        return found

    def refuse(self) -> NoReturn:
        """Raise: it would be saved."""
        with _torch.no_tensor_subclass():
            shape = tuple(self.shape)
        raise StateError(
            f"{self.of_parameter} is this rank's block {shape} of a split parameter of shape {self.whole_shape}, and a file of blocks would "
            "look like a whole model: save epl.full_state_dict(model), which every rank calls"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockEntry:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return cast(BlockEntry, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse()


_MEMORY = frozenset((torch.Tensor.untyped_storage, torch.Tensor.storage))


def _is_block(kind: type) -> bool:
    """Whether tensors of this class show code their block now, as an entry does."""
    return issubclass(kind, CutParameter) and kind.is_block()


def _as_entry(tensor: torch.Tensor, name: str, whole_shape: tuple[int, ...]) -> BlockEntry:
    """The same memory, and the same place in the autograd graph."""
    entry = tensor.as_subclass(BlockEntry)
    entry.of_parameter, entry.whole_shape = name, whole_shape
    return entry


def mind_entries(model: nn.Module, rank: int) -> Callable[[], None]:
    """From now on state dicts of the model are as above; the undo. `rank`: this one's among those of the split."""

    def after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name, parameter in module._parameters.items():
            layout = layout_of(parameter) if parameter is not None else None
            found = state.get(prefix + name)
            if layout is not None and isinstance(found, torch.Tensor) and not isinstance(found, nn.Parameter):
                state[prefix + name] = _as_entry(found.detach(), prefix + name, tuple(layout.shape))

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
