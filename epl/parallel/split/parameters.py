"""A module's parameters while it is part of a split: by name, inside a split forward, the split value; else the plain tensor."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from epl.errors import SplitError
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, shard, take
from epl.plan.split.layout import ParameterLayout


class Parameters(dict[str, Any]):
    """A module's `_parameters`. `module.weight` looks up here by name; every listing (`parameters()`, `state_dict()`) sees plain tensors.

    So neither the class of the module changes, nor are parameters swapped in every step.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        super().__init__(plain)
        self.views: dict[str, Any] = {}
        """What is seen inside a split forward, by name."""

    def __getitem__(self, key: str) -> Any:
        if region.depth:
            view = self.views.get(key)
            if view is not None:
                return view
        return dict.__getitem__(self, key)

    def items(self) -> Any:
        """Listed inside a split forward (a penalty that a module returns), parameters are what they are by name."""
        return {key: self[key] for key in self}.items() if region.depth else super().items()

    def values(self) -> Any:
        return dict(self.items()).values() if region.depth else super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Seat(NamedTuple):
    """Where a module holds a parameter: tied ones have one name and several seats."""

    module: nn.Module
    key: str
    name: str


def seats_of(root: nn.Module) -> tuple[list[Seat], dict[str, nn.Parameter]]:
    """Every place that holds a parameter, and the parameters by their first names."""
    names: dict[nn.Parameter, str] = {}
    seats = []
    for prefix, module in root.named_modules():
        for key, parameter in module.__dict__["_parameters"].items():
            if parameter is not None:
                name = names.setdefault(parameter, f"{prefix}.{key}" if prefix else key)
                seats.append(Seat(module, key, name))
    return seats, {name: parameter for parameter, name in names.items()}


@contextlib.contextmanager
def showing(seats: list[Seat], views: Mapping[str, Any]) -> Iterator[None]:
    """Inside, by name, these views are seen instead of the parameters; the modules' dicts are put back afterwards."""
    before: dict[nn.Module, dict[str, Any]] = {}
    try:
        for module, key, name in seats:
            if module not in before:
                before[module] = module.__dict__["_parameters"]
                module.__dict__["_parameters"] = Parameters(before[module])
            module.__dict__["_parameters"].views[key] = views.get(name)
        yield
    finally:
        for module, plain in before.items():
            module.__dict__["_parameters"] = plain


class SplitParameters(Parameters):
    """The parameters of a module that has been cut; follows parameters that somebody replaces, and copies of the module."""

    def __init__(self, plain: Mapping[str, Any], ranks: SplitRanks) -> None:
        super().__init__(plain)
        self.ranks = ranks
        self.layouts: dict[str, ParameterLayout] = {}

    def cut(self, key: str, layout: ParameterLayout) -> None:
        """From now on what is held under `key` is this rank's block."""
        self.layouts[key] = layout
        self.views[key] = shard(dict.__getitem__(self, key), layout.dim, layout.cut, self.ranks)

    def __getitem__(self, key: str) -> Any:
        held = dict.__getitem__(self, key)
        if region.depth:
            view = self.views.get(key)
            if view is not None:
                return view if view.local is held else self._replaced(key, held)
        return held

    def _replaced(self, key: str, held: Any) -> Any:
        """Somebody has put another tensor in the place of the parameter: `functional_call`, or `module.weight = ...`."""
        if held is None:
            return None
        layout = self.layouts[key]
        if isinstance(held, SplitTensor):
            return held
        if held.shape == layout.block_shape(self.ranks.rank):
            view = shard(held, layout.dim, layout.cut, self.ranks)
        elif held.shape == layout.shape:
            return shard(take(held, layout.dim, layout.cut, self.ranks), layout.dim, layout.cut, self.ranks)
        else:
            raise SplitError(
                f"parameter {key!r} of a split module was replaced by a tensor of shape {tuple(held.shape)}; it must have the shape "
                f"of this rank's block, {tuple(layout.block_shape(self.ranks.rank))}, or of the whole, {tuple(layout.shape)}"
            )
        if isinstance(held, nn.Parameter):
            self.views[key] = view
        return view

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitParameters:
        new = SplitParameters({key: copy.deepcopy(held, memo) for key, held in self.items()}, self.ranks)
        for key, layout in self.layouts.items():
            new.cut(key, layout)
        return new


def whole_meta(parameter: nn.Parameter, layout: ParameterLayout) -> nn.Parameter:
    """A parameter of the whole shape, without memory."""
    found = torch.empty(layout.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(found, requires_grad=parameter.requires_grad)
