"""Users' own rules: where the parameters of a module class are cut, and what to do with split values in a function of theirs.

@epl.split_rule(MyLayer)                             # where its parameters are cut; the rest is found as always
def cuts(module):
    return {"weight": 0, "bias": 0, "fused": epl.Sections(0, 3), "proj.weight": 1, "scale": None}

@epl.split_rule(MyLayer, forward=split_forward)      # its code cannot be followed: another one, inside a split part only
def cuts(module): ...

@epl.split_rule(MyFunction)                          # an autograd.Function, or a function of a module of one's own
def rule(function, x, weight):
    return NotImplemented                            # x is gathered, as without a rule
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from epl.errors import SplitError, UsageError, list_problems
from epl.graph.spec import leaves_of
from epl.parallel.split.fixed import Fixed
from epl.parallel.split.parameters import seats_of
from epl.parallel.split.rules.registry import RULES
from epl.parallel.split.value import SplitTensor

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Sections:
    """A dim that is several of equal size, one after another: q | k | v is `Sections(0, 3)`. Each of them is cut."""

    dim: int
    count: int


Cuts = Mapping[str, int | Sections | None]
"""By parameter: the dim along which it is cut; None: every rank has all of it."""


class _ModuleRule(NamedTuple):
    cuts: Callable[[Any], Cuts]
    forward: Callable[..., Any] | None


_modules: dict[type[nn.Module], _ModuleRule] = {}
_functions: dict[Any, Callable[..., Any]] = {}
"""Rules of autograd functions, by class."""


def split_rule(target: Any, *, forward: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """A decorator that makes a rule of a function: for a module class, an `autograd.Function`, or a function.

    For a module class (and those derived from it) it is given a module and says where its parameters are cut. `forward`, if given, is called
    instead of the module's own inside a split part, with the module first. For a function it is called as rule(function, *args,
    **kwargs) when one of the arguments is split; NotImplemented means that these are to be gathered.
    """
    if isinstance(target, type) and issubclass(target, nn.Module):
        return functools.partial(_for_modules, target, forward)
    if forward is not None:
        raise UsageError(f"epl.split_rule takes forward= for classes of modules; {target!r} is none")
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        return functools.partial(_for_function, _functions, target)
    if not callable(target):
        raise UsageError(f"epl.split_rule takes a module class, an autograd.Function or a function; found {target!r}")
    if isinstance(target, types.FunctionType) and not target.__module__.startswith("torch"):
        _intercept(target)
    return functools.partial(_for_function, RULES, target)


def _for_modules(target: type[nn.Module], forward: Callable[..., Any] | None, cuts: F) -> F:
    _modules[target] = _ModuleRule(cuts, forward)
    return cuts


def _for_function(table: dict[Any, Any], target: Any, rule: F) -> F:
    table[target] = rule
    return rule


def _intercept(target: types.FunctionType) -> None:
    """A Python function asks no tensor subclass: where its module holds it, something that does takes its place."""
    space = vars(sys.modules[target.__module__])
    if space.get(target.__name__) is not target:
        raise UsageError(
            f"epl.split_rule finds a function by the name that its module has for it, and {target.__module__} has no "
            f"{target.__qualname__}: define it at the top of a module, or make it a torch.autograd.Function"
        )

    @functools.wraps(target)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if target in RULES and leaves_of((args, kwargs), SplitTensor):
            out = RULES[target](target, *args, **kwargs)
            if out is not NotImplemented:
                return out
        return target(*args, **kwargs)

    space[target.__name__] = asking


def rule_of_function(function: Any) -> Callable[..., Any] | None:
    """The user's rule for an `autograd.Function`."""
    return _functions.get(function)


def _rule_of(module: nn.Module) -> _ModuleRule | None:
    if not _modules:
        return None
    return next((_modules[kind] for kind in type(module).__mro__ if kind in _modules), None)


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """What the user wants to be called instead of the module's forward inside a split part."""
    rule = _rule_of(module)
    return None if rule is None or rule.forward is None else types.MethodType(rule.forward, module)


@contextlib.contextmanager
def with_own_forwards(root: nn.Module) -> Iterator[None]:
    """Inside, modules have the forwards that users gave for them."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module in root.modules() if _modules else ():
            forward = forward_of(module)
            if forward is not None:
                before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def fixed_by_users(root: nn.Module) -> dict[str, Fixed]:
    """What users' rules say about the parameters of a module and of all in it; SplitError with everything wrong about them."""
    found: dict[str, Fixed] = {}
    problems: list[str] = []
    names: dict[int, str] = {}
    if not _modules:
        return found
    for name, parameter in seats_of(root)[1].items():
        names[id(parameter)] = name
    for path, module in root.named_modules():
        rule = _rule_of(module)
        if rule is None:
            continue
        where = f"{type(module).__name__}" + (f" ({path})" if path else "")
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for key, cut in rule.cuts(module).items():
            problem = _problem(key, cut, parameters)
            if problem is not None:
                problems.append(f"{where}: {problem}")
                continue
            source = f"split_rule of {type(module).__name__}"
            dim, sections = (cut.dim, cut.count) if isinstance(cut, Sections) else (cut, 1)
            if dim is not None:
                dim %= parameters[key].ndim
            found[names[id(parameters[key])]] = Fixed(dim, sections, source)
    if problems:
        raise SplitError(list_problems("epl.split_rule", problems))
    return found


def _problem(key: str, cut: Any, parameters: Mapping[str, nn.Parameter]) -> str | None:
    if key not in parameters:
        return f"there is no parameter {key!r}; it has {', '.join(sorted(parameters)) or 'none'}"
    shape = tuple(parameters[key].shape)
    if cut is None:
        return None
    dim = cut.dim if isinstance(cut, Sections) else cut
    if not isinstance(dim, int) or isinstance(dim, bool):
        return f"{key}: expected a dim, Sections(dim, count) or None, found {cut!r}"
    if not -len(shape) <= dim < len(shape):
        return f"{key} has the shape {shape}: there is no dim {dim}"
    if isinstance(cut, Sections) and (cut.count < 1 or shape[dim] % cut.count):
        return f"{key} has the shape {shape}: dim {dim} is not made of {cut.count} equal sections"
    return None
