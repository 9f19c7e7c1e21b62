"""The table of rules: for each torch function, what to call on the local blocks and how the result is cut."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from epl import _torch

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""By torch function. A rule is called as rule(func, *args, **kwargs); NotImplemented: it cannot keep the cut, gather."""

_SPACES: tuple[Any, ...] = (torch, torch.Tensor, functional, _torch.nn_functions(), torch.special)


def rule(*names: str, spaces: Sequence[Any] = _SPACES) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of every torch function with one of these names."""

    def register(function: Rule) -> Rule:
        for found in functions_named(*names, spaces=spaces):
            RULES[found] = function
        return function

    return register


def functions_named(*names: str, spaces: Sequence[Any] = _SPACES) -> list[Any]:
    """The torch functions and tensor methods with these names."""
    found = (getattr(space, name, None) for name in names for space in spaces)
    return [function for function in found if function is not None]


_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""Torch takes these names too."""


def named_alike(function: Rule, func: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Keyword arguments of torch's `func` in the names of its rule; None where one matters that the rule does not know."""
    known = _known(function)
    if known is None or given.keys() <= known:
        return dict(given)
    found = {name if name in known else _NUMPY.get(name, name): value for name, value in given.items()}
    # Torch's own Python functions hand on all that they have: F.normalize(x) arrives with out=None.
    strange = found.keys() - known
    if not all(_is_default(func, name, found[name]) for name in strange):
        return None
    return {name: value for name, value in found.items() if name in known}


def _is_default(func: Any, name: str, value: Any) -> bool:
    """Whether a torch function would do the same without this argument."""
    default = _defaults(func).get(name)
    return value is default or (isinstance(value, (bool, int, float, str)) and value == default)


@functools.cache
def _defaults(func: Any) -> Mapping[str, Any]:
    """What a torch function takes for arguments that are not given, as far as it says; of the others it is None."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # written in C
        return {}
    return {each.name: each.default for each in parameters if each.default is not each.empty}


@functools.cache
def _known(function: Rule) -> frozenset[str] | None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
