"""The scopes that a model opens inside its forward, read from its source: devices are dealt out before the first forward runs.

Only what the source says plainly can be known: `with epl.replicate(1, name="stage_0"):`, also with values of `self` or
of the module the class is defined in. A scope whose name is made while the forward runs (in a loop) stays unknown here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from epl.graph.taskgraph import Annotation


@dataclass(frozen=True)
class ForwardScopes:
    """What the source of a model says about scopes in its forward."""

    annotations: tuple[Annotation, ...] = ()
    """Each TaskGraph once, in the order of the source."""
    unknown: tuple[str, ...] = ()
    """`file.py:12` of scopes whose arguments only the running forward knows."""


def forward_scopes(model: nn.Module) -> ForwardScopes:
    """The scopes in the forward of this model and of every module in it."""
    found: dict[str | tuple[str, int], Annotation] = {}
    unknown: dict[str, None] = {}
    for module in model.modules():
        for call, function, line in _scope_calls(module):
            place = f"{inspect.getsourcefile(function)}:{line}"
            annotation = _evaluate(call, function, module)
            if annotation is None:
                unknown[place] = None
            else:
                named = annotation if annotation.name else _named(annotation, function.__qualname__, line)
                found.setdefault(named.name or (place, line), named)
    return ForwardScopes(tuple(found.values()), tuple(unknown))


def name_by_place(qualname: str, line: int) -> str:
    """The name of a scope in a forward that was given none: alike every time the forward runs."""
    return f"{qualname}:{line}"


def _named(annotation: Annotation, qualname: str, line: int) -> Annotation:
    return Annotation(annotation.kind, annotation.device_count, name_by_place(qualname, line))


_sources: dict[Any, list[tuple[ast.Call, int]]] = {}  # by code object: calls in `with` statements and their lines


def _scope_calls(module: nn.Module) -> Iterator[tuple[ast.Call, Any, int]]:
    function = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    code = getattr(function, "__code__", None)
    if code is None or not {"replicate", "split"} & {*code.co_names, *code.co_freevars}:
        return
    if code not in _sources:
        _sources[code] = list(_with_calls(function))
    for call, line in _sources[code]:
        if _is_strategy(_look_up(call.func, function, module)):
            yield call, function, line


def _with_calls(function: Any) -> Iterator[tuple[ast.Call, int]]:
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return  # built in a notebook or by exec: there is no source to read
    items = [item for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items]
    calls = [item.context_expr for item in items if isinstance(item.context_expr, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        yield call, start + call.lineno - 1


def _look_up(expression: ast.expr, function: Any, module: nn.Module) -> object:
    """The value of an expression over globals and `self`; None if only the running forward knows it."""
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals, "self": module}
    try:
        return eval(compile(ast.Expression(expression), "<scope>", "eval"), names)
    except Exception:  # any name or value of the running forward
        return None


def _is_strategy(function: object) -> bool:
    return getattr(function, "__module__", "") == "epl.strategy" and getattr(function, "__name__", "") in (
        "replicate",
        "split",
    )


def _evaluate(call: ast.Call, function: Any, module: nn.Module) -> Annotation | None:
    annotation = getattr(_look_up(call, function, module), "annotation", None)
    return annotation if isinstance(annotation, Annotation) else None
