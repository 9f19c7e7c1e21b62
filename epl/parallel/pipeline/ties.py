"""Weights that several stages hold (a tied embedding and output layer): one weight for the user, one copy for each holder.

All copies start from the first holder's numbers, their gradients are added up over the holders, and so they take the same
steps. In norms a tied weight counts once, with its first holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from epl.errors import UsageError

_keys = WeakIdKeyDictionary()  # parameter → key; tensors cannot be keys of an ordinary weak dictionary


def tie(key: str, parameter: nn.Parameter) -> None:
    """Say that this parameter is the same weight as every other one, on whatever stage, that is tied under the same key.

    epl.parallel.tie("words", stage.embedding.weight)      # on the first stage
    epl.parallel.tie("words", stage.head.weight)           # on the last one
    """
    if not isinstance(parameter, nn.Parameter) or not isinstance(key, str):
        raise UsageError(
            f"epl.parallel.tie(key, parameter) takes a str and an nn.Parameter, found {key!r}, {type(parameter).__name__}"
        )
    _keys[parameter] = key


def tied_parameters(modules: Iterable[nn.Module]) -> dict[str, list[nn.Parameter]]:
    """The tied parameters of these modules, by key; one device may hold several under one key (first and last stage)."""
    found: dict[str, list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(p for module in modules for p in module.parameters()):
        if parameter in _keys:
            found.setdefault(_keys[parameter], []).append(parameter)
    return found


def describe(parameters: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tied weight of this device, for the others to compare."""
    for key, alike in parameters.items():
        forms = {(tuple(p.shape), str(p.dtype)) for p in alike}
        if len(forms) > 1:
            raise UsageError(f"weights tied under {key!r} must have one shape and dtype; found {sorted(forms)}")
    return {key: (tuple(alike[0].shape), str(alike[0].dtype)) for key, alike in parameters.items()}


class Adder(Protocol):
    """Adds tensors up over the holders of a weight, and copies the first holder's."""

    def add_up(self, key: str, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over the holders."""

    def copy_first(self, key: str, tensor: torch.Tensor) -> None:
        """Replace the tensor by the first holder's."""


class Ties:
    """The tied weights of this device: copies here are kept in step with each other and with those of other devices."""

    def __init__(
        self,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        holders: Mapping[str, Sequence[int]],
        own: int,
        adder: Adder,
    ) -> None:
        self._parameters, self._holders, self._adder = dict(sorted(parameters.items())), holders, adder
        self._aside: dict[str, torch.Tensor | None] = {}
        self.counted_elsewhere = {
            id(p)
            for key, alike in self._parameters.items()
            for number, p in enumerate(alike)
            if number or holders[key][0] != own
        }
        """By id: parameters that count in norms with another one."""
        with torch.no_grad():
            for key, (first, *others) in self._parameters.items():
                if len(holders[key]) > 1:
                    adder.copy_first(key, first)
                for parameter in others:
                    parameter.copy_(first)

    def set_aside(self) -> None:
        """Before the first backward of a step: gradients left by earlier steps are totals already, not to be added up again."""
        self._aside = {key: alike[0].grad for key, alike in self._parameters.items()}
        for alike in self._parameters.values():
            for parameter in alike:
                parameter.grad = None

    @torch.no_grad()
    def add_up_gradients(self) -> None:
        """After the last backward of a step, on every holder."""
        for key, alike in self._parameters.items():
            total = torch.zeros_like(alike[0])
            for parameter in alike:
                if parameter.grad is not None:
                    total += parameter.grad
            if len(self._holders[key]) > 1:
                self._adder.add_up(key, total)
            before = self._aside.pop(key, None)
            if before is not None:
                total += before
            for parameter in alike:
                parameter.grad = total if parameter is alike[0] else total.clone()


def check_holders(told: Sequence[Mapping[str, tuple[tuple[int, ...], str]]]) -> dict[str, list[int]]:
    """Which devices hold each key, from what every device told (shape and dtype); they must be alike."""
    holders: dict[str, list[int]] = {}
    problems = []
    for device, own in enumerate(told):
        for key, form in own.items():
            holders.setdefault(key, []).append(device)
            first = told[holders[key][0]][key]
            if form != first:
                problems.append(f"{key!r}: {first} on pipeline device {holders[key][0]}, {form} on {device}")
    if problems:
        raise UsageError("weights tied under one key must have one shape and dtype; found " + "; ".join(problems))
    return holders
