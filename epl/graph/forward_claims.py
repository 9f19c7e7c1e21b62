"""Split scopes in a forward: the modules and parameters that their code names belong to their TaskGraphs, as if built there.

    def forward(self, x):
        with epl.replicate(8):
            features = self.backbone(x)      # self.backbone is claimed by the first TaskGraph
        with epl.split(8):
            return self.head(features)       # and self.head by the second

What is cut must be known before anything is placed, so it is read from the source. Stages of `replicate` are not: which code
belongs to them is seen when the forward is recorded (forward_scopes.py).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from epl.errors import StrategyError, list_problems
from epl.graph.forward_scopes import Scope, look_up, scopes_in, source_of
from epl.graph.state import Registry
from epl.graph.tagging import module_tag, tag_module, tag_tensor, tensor_tags
from epl.graph.taskgraph import Annotation, Tag

_INSTEAD = (
    "Build the part under the scope, in __init__ (with epl.split(k): self.part = …), or name it before training: "
    "epl.annotate(epl.split(k), model.part)"
)
_Seat = tuple[nn.Module, str]
"""A parameter or buffer: the module that has it, and its name there."""


def claim_split_scopes(model: nn.Module, registry: Registry) -> None:
    """If a forward of this model opens split scopes: all scopes of its forwards claim what they name, and do nothing when they run."""
    scopes = list(scopes_in(model))
    if not any(s.annotation is not None and _cuts(s.annotation) for s in scopes):
        return
    problems: list[str] = []
    claims: list[tuple[Annotation, Scope, _Named]] = []
    for scope in scopes:
        if scope.annotation is None:
            problems.append(
                f"{scope.place}: its arguments are known while the forward runs only: write plain numbers and names"
            )
            continue
        named = _Named(scope)
        if named.unknown:
            problems.append(
                f"{scope.place}: it calls {', '.join(named.unknown)}, of which the source does not say what it is: write self.… there"
            )
        elif not named.modules and not named.seats and _cuts(scope.annotation):
            problems.append(f"{scope.place}: it names no module and no parameter of self")
        claims.append((scope.annotation, scope, named))
    problems += _conflicts(claims, registry)
    if problems:
        title = "split scopes in a forward claim what their code names, and this is not clear"
        raise StrategyError(f"{list_problems(title, problems)}\n{_INSTEAD}")
    for annotation, scope, named in claims:
        tag = Tag(registry.open(annotation), "annotate")
        registry.mark(tag.taskgraph)
        for module in named.modules:
            for part in module.modules():
                tag_module(part, tag)
        for owner, name in named.seats:
            tag_tensor(owner, name, tag)
        registry.claimed.add(scope.code)


def refuse_unclaimed(annotation: Annotation) -> None:
    """For a scope that is entered in a forward and was not found in its source."""
    if _cuts(annotation):
        raise StrategyError(
            f"the scope {annotation.title} was entered inside a forward, and the source of that forward does not say so (expected `with "
            f"epl.split(…):` in it, around code that names self.…): nothing would be cut. {_INSTEAD}"
        )


def _cuts(annotation: Annotation) -> bool:
    return annotation.kind == "split" and annotation.device_count > 1


class _Named:
    """What the code of a scope names: modules with all that is in them, single parameters and buffers."""

    def __init__(self, scope: Scope) -> None:
        self.modules: dict[nn.Module, None] = {}
        self.seats: dict[_Seat, None] = {}
        self.unknown: list[str] = []
        self._seen: set[Any] = set()
        self._read(scope.body, scope.function, scope.module)

    def _read(self, body: Sequence[ast.AST], function: Any, module: nn.Module) -> None:
        for chain in _chains(body):
            self._read_chain(chain, function, module)
        self.unknown += _unknown(body, function)

    def _read_chain(self, node: ast.expr, function: Any, module: nn.Module) -> None:
        if not isinstance(node, (ast.Attribute, ast.Subscript)):
            return
        value = look_up(node, function, module)
        if isinstance(value, nn.Module):
            self.modules[value] = None
        elif isinstance(value, torch.Tensor) and isinstance(node, ast.Attribute):
            owner = look_up(node.value, function, module)
            if isinstance(owner, nn.Module):
                self.seats[owner, node.attr] = None
        elif inspect.ismethod(value) and isinstance(value.__self__, nn.Module):
            if value.__self__ is module:
                self._read_method(value.__func__, module)
            else:
                self.modules[value.__self__] = None
        elif isinstance(value, (list, tuple, dict)):
            inside = value.values() if isinstance(value, dict) else value
            self.modules.update(dict.fromkeys(each for each in inside if isinstance(each, nn.Module)))
        elif value is None or callable(value):  # `self.layers[i]`, `self.weight.t`
            self._read_chain(node.value, function, module)

    def _read_method(self, function: Any, module: nn.Module) -> None:
        """A method of the module whose forward it is."""
        tree = source_of(function)
        if function not in self._seen and tree is not None:
            self._seen.add(function)
            self._read([tree], function, module)


def _chains(body: Sequence[ast.AST]) -> Iterator[ast.expr]:
    """`self.a.b[0]` and the like, each as far as it goes."""
    for node in body:
        if isinstance(node, (ast.Attribute, ast.Subscript)) and _begins_with_self(node):
            yield node
            inner: ast.expr = node
            while isinstance(inner, (ast.Attribute, ast.Subscript)):
                if isinstance(inner, ast.Subscript):
                    yield from _chains([inner.slice])
                inner = inner.value
        else:
            yield from _chains(list(ast.iter_child_nodes(node)))


def _begins_with_self(node: ast.expr) -> bool:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def _unknown(body: Sequence[ast.AST], function: Any) -> list[str]:
    """Names that are called and were bound outside of the scope, in the forward itself."""
    nodes = [node for top in body for node in ast.walk(top)]
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    local = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    return sorted((called & local) - bound - {"self"})


def _conflicts(claims: Sequence[tuple[Annotation, Scope, _Named]], registry: Registry) -> list[str]:
    """What is named in scopes of two TaskGraphs, or belongs to another one explicitly."""
    owners: dict[object, Annotation] = {}
    problems: dict[str, None] = {}

    def claim(key: object, what: str, tag: Tag | None, annotation: Annotation) -> None:
        earlier = owners.setdefault(key, annotation)
        if earlier != annotation:
            problems[f"{what} is named in {earlier.title} and in {annotation.title}"] = None
        elif tag is not None and tag.explicit and tag.taskgraph != registry.named(annotation):
            problems[f"{what} is named in {annotation.title} and belongs to {tag.taskgraph.title}"] = None

    for annotation, scope, named in claims:
        for module in named.modules:
            for path, part in module.named_modules(prefix=type(module).__name__):
                claim(part, f"{scope.place}: {path}", module_tag(part), annotation)
        for owner, name in named.seats:
            claim(
                (owner, name), f"{scope.place}: {type(owner).__name__}.{name}", tensor_tags(owner).get(name), annotation
            )
    return list(problems)
