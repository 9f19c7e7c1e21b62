"""The scopes that a model opens inside its forward, read from its source: devices are dealt out before the first forward runs.

Only what the source says plainly can be known: `with epl.replicate(1, name="stage_0"):`, also with values of `self` or
of the module the class is defined in. A scope whose name is made while the forward runs (in a loop) stays unknown here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from epl.graph.taskgraph import Annotation


@dataclass(frozen=True)
class ForwardScopes:
    """What the source of a model says about scopes in its forward."""

    annotations: tuple[Annotation, ...] = ()
    """Each TaskGraph once, in the order of the source."""
    unknown: tuple[str, ...] = ()
    """`file.py:12` of scopes whose arguments only the running forward knows."""


@dataclass(frozen=True)
class Scope:
    """One `with` statement in a forward."""

    annotation: Annotation | None
    """None: only the running forward knows its arguments."""
    place: str
    """`file.py:12`"""
    body: Sequence[ast.AST]
    function: Any
    module: nn.Module

    @property
    def code(self) -> CodeType:
        """Of the forward that it is in."""
        found: CodeType = self.function.__code__
        return found


def forward_scopes(model: nn.Module) -> ForwardScopes:
    """The scopes in the forward of this model and of every module in it."""
    found: dict[str, Annotation] = {}
    unknown: dict[str, None] = {}
    for scope in scopes_in(model):
        if scope.annotation is None:
            unknown[scope.place] = None
        else:
            found.setdefault(scope.annotation.name or scope.place, scope.annotation)
    return ForwardScopes(tuple(found.values()), tuple(unknown))


def scopes_in(model: nn.Module) -> Iterator[Scope]:
    """The scopes in the forward of this model and of every module in it, one by one, by name or place."""
    for module in model.modules():
        for statement, function, line in _scope_statements(module):
            place = f"{inspect.getsourcefile(function)}:{line}"
            annotation = _evaluate(statement.call, function, module)
            if annotation is not None and annotation.name is None:
                annotation = _named(annotation, function.__qualname__, line)
            yield Scope(annotation, place, statement.body, function, module)


def name_by_place(qualname: str, line: int) -> str:
    """The name of a scope in a forward that was given none: alike every time the forward runs."""
    return f"{qualname}:{line}"


def _named(annotation: Annotation, qualname: str, line: int) -> Annotation:
    return Annotation(annotation.kind, annotation.device_count, name_by_place(qualname, line))


class _Statement(NamedTuple):
    call: ast.Call
    line: int
    body: Sequence[ast.AST]


_sources: dict[Any, list[_Statement]] = {}  # by code object: `with` statements that call something


def _scope_statements(module: nn.Module) -> Iterator[tuple[_Statement, Any, int]]:
    function = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    code = getattr(function, "__code__", None)
    if code is None or not {"replicate", "split"} & {*code.co_names, *code.co_freevars}:
        return
    if code not in _sources:
        _sources[code] = list(_with_statements(function))
    for statement in _sources[code]:
        if _is_strategy(look_up(statement.call.func, function, module)):
            yield statement, function, statement.line


def _with_statements(function: Any) -> Iterator[_Statement]:
    tree = source_of(function)
    if tree is None:
        return
    start = function.__code__.co_firstlineno
    found = [
        _Statement(item.context_expr, start + item.context_expr.lineno - 1, node.body)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
    ]
    yield from sorted(found, key=lambda each: (each.call.lineno, each.call.col_offset))


def source_of(function: Any) -> ast.AST | None:
    """The source of a function; None if there is none to read: built in a notebook or by exec."""
    try:
        return ast.parse(textwrap.dedent("".join(inspect.getsourcelines(function)[0])))
    except (OSError, TypeError, SyntaxError):
        return None


def look_up(expression: ast.expr, function: Any, module: nn.Module) -> object:
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
    annotation = getattr(look_up(call, function, module), "annotation", None)
    return annotation if isinstance(annotation, Annotation) else None
