"""Everything annotations have said since `epl.init`: TaskGraphs, the default strategy, and the scopes now open."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from epl.errors import StrategyError
from epl.graph import frames
from epl.graph.deferred import Deferring
from epl.graph.tagging import Tagger, module_tag, watch_calls
from epl.graph.taskgraph import Annotation, Tag, TaskGraph


@dataclass(frozen=True)
class _Scope:
    annotation: Annotation
    tag: Tag | None
    """What is built inside gets this; None in a scope inside a forward, which tags nothing."""
    watch: RemovableHandle | None = None
    deferring: Deferring | None = None
    """What keeps large parameters of a part under `split` without memory."""


class _OpenScopes(threading.local):
    """This thread's open scopes: none or one, since nesting is refused."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []


class Registry:
    """The TaskGraphs in order of creation, the default strategy and the open scopes of this process.

    `on_forward_scope`, when set, is called with the annotation of every scope entered inside a module's forward.
    Such scopes tag nothing: on one device there is nothing to do for them.
    """

    def __init__(self) -> None:
        self.on_forward_scope: Callable[[Annotation], None] | None = None
        self.claimed: set[CodeType] = set()
        """Forwards whose scopes have claimed what they name (forward_claims.py), and do nothing when they are entered."""
        self.devices = 1
        """How many devices the run has. On one, a part under `split` is built as any other."""
        self._scopes = _OpenScopes()
        self._tagger = Tagger(self._current_tag)
        self._default: TaskGraph | None = None
        self._begin()

    def _begin(self) -> None:
        self._session = uuid.uuid4().hex
        self._taskgraphs: list[TaskGraph] = []
        self._marked: set[TaskGraph] = set()
        self._by_default: set[TaskGraph] = set()
        self._fallback: TaskGraph | None = None

    def reset(self) -> None:
        """Forget every TaskGraph and the default strategy, as `epl.init` does; models keep the tags they have."""
        self.refuse_inside_scope("epl.init()")
        self.set_default(None)
        self.on_forward_scope = None
        self.claimed.clear()
        self.devices = 1
        self._begin()

    @contextlib.contextmanager
    def left_as_it_is(self) -> Iterator[None]:
        """Inside, TaskGraphs may be opened by a forward that is only looked at; afterwards they are forgotten."""
        before = list(self._taskgraphs), set(self._marked)
        try:
            yield
        finally:
            self._taskgraphs, self._marked = before

    def refuse_inside_scope(self, call: str) -> None:
        """Raise if a scope is open in this thread."""
        if self._scopes.stack:
            title = self._scopes.stack[-1].annotation.title
            raise StrategyError(f"{call} inside the scope {title}: call it once, before any scope")

    @property
    def taskgraphs(self) -> tuple[TaskGraph, ...]:
        """All TaskGraphs, in order of creation."""
        return tuple(self._taskgraphs)

    @property
    def default(self) -> TaskGraph | None:
        """The TaskGraph of the default strategy in force, for what is built from now on."""
        return self._default

    @property
    def fallback(self) -> TaskGraph | None:
        """The first of the default TaskGraphs in force: it takes what was built before there was a default."""
        return self._fallback

    @property
    def scope(self) -> Annotation | None:
        """The scope that is open in this thread, if there is one."""
        return self._scopes.stack[-1].annotation if self._scopes.stack else None

    def unused(self) -> tuple[TaskGraph, ...]:
        """TaskGraphs of scopes in which nothing was ever built."""
        return tuple(t for t in self._taskgraphs if t not in self._marked and t not in self._by_default)

    def named(self, annotation: Annotation) -> TaskGraph | None:
        """The earlier TaskGraph that this annotation continues by its name, if there is one; the same name with
        another strategy is refused."""
        for taskgraph in self._taskgraphs:
            if taskgraph.name == annotation.name:
                if taskgraph.strategy != annotation.strategy:
                    raise StrategyError(
                        f"the name {taskgraph.name!r} belongs to a TaskGraph with the strategy {taskgraph.strategy}, "
                        f"and {annotation.strategy} was asked for under the same name: "
                        "use the same strategy to continue that TaskGraph, or another name for a new one"
                    )
                return taskgraph
        return None

    def open(self, annotation: Annotation) -> TaskGraph:
        """The TaskGraph of this annotation: an earlier one by its name, else a new one."""
        earlier = self.named(annotation)
        if earlier is not None:
            return earlier
        index = len(self._taskgraphs)
        taskgraph = TaskGraph(
            annotation.name or self._free_name(index),
            annotation.kind,
            annotation.device_count,
            index,
            self._session,
        )
        self._taskgraphs.append(taskgraph)
        return taskgraph

    def mark(self, taskgraph: TaskGraph) -> None:
        """Note that something was tagged with it, so that it is not reported as empty."""
        self._marked.add(taskgraph)

    def set_default(self, annotation: Annotation | None) -> None:
        """Open a TaskGraph for what is built from now on outside any scope; None ends that."""
        if annotation is None:
            if self._default is not None:
                self._tagger.release()
            self._default = self._fallback = None
            return
        taskgraph = self.open(annotation)
        self._by_default.add(taskgraph)
        if self._default is None:
            self._fallback = taskgraph
            self._tagger.acquire()
        self._default = taskgraph

    def enter(self, annotation: Annotation) -> None:
        """Open a scope in this thread; `leave` closes it."""
        if self._scopes.stack:
            raise StrategyError(
                f"the scope {annotation.title} is inside the scope {self._scopes.stack[-1].annotation.title}: "
                "scopes cannot be nested; close the outer one first, each part of a model has one strategy"
            )
        # While dynamo traces there is no call stack to look at, and what it traces is a forward.
        if torch.compiler.is_compiling():
            self._scopes.stack.append(_Scope(annotation, None))
        elif frames.place() == "forward":
            if self.on_forward_scope is not None and not frames.passes(self.claimed):
                self.on_forward_scope(annotation)
            self._scopes.stack.append(_Scope(annotation, None))
        else:
            tag = Tag(self.open(annotation), "scope")
            self._tagger.acquire()
            cut = annotation.kind == "split" and annotation.device_count > 1 and self.devices > 1
            deferring = Deferring() if cut else None
            self._scopes.stack.append(_Scope(annotation, tag, watch_calls(self._refuse_call), deferring))
            if deferring is not None:
                deferring.begin()

    def leave(self) -> None:
        """Close the scope that `enter` opened in this thread."""
        scope = self._scopes.stack.pop()
        if scope.watch is not None:
            scope.watch.remove()
            self._tagger.release()
        if scope.deferring is not None:
            scope.deferring.end()

    def _current_tag(self) -> Tag | None:
        if self._scopes.stack:
            tag = self._scopes.stack[-1].tag
        elif self._default is not None:
            tag = Tag(self._default, "default")
        else:
            tag = None
        if tag is not None:
            self.mark(tag.taskgraph)
        return tag

    def _free_name(self, index: int) -> str:
        taken = {taskgraph.name for taskgraph in self._taskgraphs}
        while f"taskgraph_{index}" in taken:
            index += 1
        return f"taskgraph_{index}"

    def _refuse_call(self, module: nn.Module) -> None:
        """A construction scope around a call in the loop would do nothing at all: say so instead."""
        scope = self._scopes.stack[-1] if self._scopes.stack else None
        if scope is None or scope.tag is None or torch.compiler.is_compiling():
            return
        tag = module_tag(module)
        if tag is not None and tag.taskgraph == scope.tag.taskgraph:
            return
        # Reading a parametrised weight calls its parametrisation: not the user's call.
        if isinstance(module, ParametrizationList) or not frames.call_is_outermost():
            return
        kind = type(module).__name__
        annotation = scope.annotation
        count = annotation.device_count
        raise StrategyError(
            f"{kind} was called inside the scope {annotation.title}, outside any module, and it was not built in "
            "that scope: a scope belongs around the construction of modules, or inside a module's forward. "
            "Build it under the scope:\n"
            f"    with epl.{annotation.kind}({count}):\n"
            f"        self.part = {kind}(...)          # in the __init__ of your model\n"
            "or name the built module before training:\n"
            f"    epl.annotate(epl.{annotation.kind}({count}), model.part)\n"
            "and call it without a scope"
        )


registry = Registry()
