"""A recorded operation: what the loop wrote, and where its value is.

Every rank of a replica runs the loop and makes the same nodes; one of them, *home*, has the numbers:

    recorded        done is False                         nobody has computed it
    at home         done, not everywhere                  home has `value`; the others know its spec and that it is computed
    at the lanes    done and at_lanes                     every rank that splits the last stage has its part of `value`
    everywhere      done and everywhere                   every rank has `value`, and may use it alone

`done`, `at_lanes`, `everywhere`, `graph` and `spent` are alike on all ranks, and decisions look at nothing else; `value` is not.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal

import torch

from epl import _torch
from epl.errors import LazyValueError
from epl.graph.context import Context
from epl.graph.spec import Spec, leaves_of
from epl.train.lazy.journal import Parts, journal

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Call, Carrier

Graph = Literal["home", "everywhere"]


class Node:
    """One recorded operation. `args` holds Nodes for lazy values and real tensors for everything else."""

    __slots__ = (
        "__weakref__",
        "args",
        "as_of",
        "at_lanes",
        "carrier",
        "changed",
        "context",
        "done",
        "everywhere",
        "func",
        "graph",
        "has_effects",
        "hooks",
        "kwargs",
        "leaf",
        "number",
        "parents",
        "serial",
        "several_homes",
        "spec",
        "spent",
        "value",
        "versions",
        "viewed",
        "where",
    )

    def __init__(
        self,
        func: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: Context,
        spec: Any,
    ) -> None:
        self.func, self.args, self.kwargs, self.context = func, args, kwargs, context
        self.spec = spec
        """A Spec; a tree of them for an operation with several results, each of which `pick` then takes out."""
        self.parents: tuple[Node, ...] = _parents(func, args, kwargs)
        self.carrier: Carrier | None
        """Whose home has the value; None if no model call is under it (an expression over another rank's parameters)."""
        self.carrier, self.several_homes = _carrier(func, args, self.parents)
        self.done = self.at_lanes = self.everywhere = self.spent = self.viewed = False
        self.has_effects = False
        """Whether it draws random numbers or writes into a real tensor: every rank must run it."""
        self.changed = False
        """Whether its value was changed in place through an alias, so that its operation no longer tells what it is."""
        self.value: Any = None
        self.graph: Graph | None = None
        """Where the autograd graph of a computed value is; None if it has none (any more)."""
        self.leaf: torch.Tensor | None = None
        """At home, for an output of a call whose graphs are kept: where gradients of the recorded code arrive."""
        self.hooks: list[Callable[[torch.Tensor], None]] = []
        """What to do with the value when it is there: register a hook on its gradient, or have that retained."""
        self.serial = next(_serials)
        # Operations that only this rank records (its own share of an expression over parameters) are not counted.
        self.number = (
            journal(self.carrier).note(name_of(func), spec, args, kwargs) if self.carrier is not None else None
        )
        self.where = _caller() if func is not None else None
        self.versions = _versions(args, kwargs) if func is not foreign else []
        self.as_of = _as_of(self.parents) if self.carrier is None and func is not foreign else ()
        """Of an operation on other ranks' parameters: how often this rank's own had been changed when it was written down."""

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow through it, as far as its code and flags say."""
        return self.spec.requires_grad if isinstance(self.spec, Spec) else True

    @property
    def name(self) -> str:
        """The operation, as people write it."""
        return name_of(self.func)

    def check_versions(self) -> None:
        """Raise if a tensor was changed in place between recording and now."""
        for tensor, version in self.versions:
            if _torch.version_of(tensor) != version:
                raise LazyValueError(
                    f"a {tuple(tensor.shape)} tensor given to {self.name} together with an output of the model ({self.place}) was "
                    "changed in place before the result was computed. Change a clone, or read the result (for instance .item()) first."
                )

    def check_parameters(self) -> None:
        """Raise if parameters were changed between recording and now: other ranks' numbers of then are gone."""
        if any(parts.changes() != count for parts, count in self.as_of):
            raise LazyValueError(
                f"a term over the model's parameters ({self.name}, {self.place}) is computed after they were changed (optimizer.step(), "
                "load_state_dict): those of other ranks are no longer what they were when it was written. Read it before (for instance "
                ".item()), or write it again."
            )

    @property
    def place(self) -> str:
        """file:line of the user's code that recorded it."""
        return f"{self.where[0].co_filename}:{self.where[1]}" if self.where else "?"

    def settle(self, value: Any, graph: Graph | None = None, *, everywhere: bool = False) -> None:
        """It is computed; `value` is None where only home has it. Without a graph, what it was made from is let go."""
        self.done, self.value, self.graph, self.everywhere = True, value, graph, everywhere
        if graph is None:
            self.let_go()

    def let_go(self) -> None:
        """Forget what it was made from."""
        self.args, self.kwargs, self.parents, self.versions = (), {}, (), []

    def spend(self) -> None:
        """Its graph has been used up by a backward: the value stays, gradients no longer flow."""
        self.spent, self.graph, self.leaf = self.requires_grad, None, None
        if isinstance(self.value, torch.Tensor):
            self.value = self.value.detach()
        self.let_go()


_serials = itertools.count()


def output_of(call: Call, index: int) -> torch.Tensor:
    """Stands for a frontier value of a call in `Node.func`; the carrier computes it."""
    raise AssertionError("an output of a model call is computed by its carrier")


def foreign(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Stands for a parameter of another rank in `Node.func`; that rank computes with it."""
    raise AssertionError("a parameter of another rank has no value here")


def home_of(carrier: Carrier) -> tuple[tuple[int, ...], int]:
    """Where a carrier's values are, and for whom: beside a model in stages, one that every rank has whole has homes of its own,
    also on the rank that happens to be the other's home."""
    return carrier.ranks, carrier.home


def name_of(func: object) -> str:
    """A function's name for messages."""
    return str(getattr(func, "__name__", func))


def topological(roots: Iterable[Node], stop: Callable[[Node], bool] = lambda n: n.done) -> list[Node]:
    """The roots and all they are made from, parents first; what `stop` says is not looked behind."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if not stop(node):
                stack.extend((parent, False) for parent in reversed(node.parents))
    return order


def reached_by_gradient(roots: Iterable[Node]) -> set[Node]:
    """Every node that a backward from the roots passes through, by the flags alone."""
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen and node.requires_grad:
            seen.add(node)
            stack.extend(node.parents)
    return seen


@contextmanager
def blame(node: Node) -> Iterator[None]:
    """An error inside is told with the line of the user's code that recorded the operation."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {node.name}, recorded at {node.place}")
        raise


def _parents(func: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Node, ...]:
    if func is output_of:
        return tuple(x for x in args[0].inputs if isinstance(x, Node))
    return tuple(leaves_of((args, kwargs), Node))


def _carrier(
    func: Callable[..., Any] | None, args: tuple[Any, ...], parents: tuple[Node, ...]
) -> tuple[Carrier | None, bool]:
    carriers: list[Carrier] = [args[0].carrier] if func is output_of else []
    several = False
    for parent in parents:
        # What every rank has without a graph can be used by each alone.
        if parent.carrier is not None and not (parent.everywhere and parent.graph is None):
            carriers.append(parent.carrier)
            several = several or parent.several_homes
    return (carriers[0] if carriers else None), several or len({home_of(c) for c in carriers}) > 1


def _as_of(parents: tuple[Node, ...]) -> tuple[tuple[Parts, int], ...]:
    parts = dict.fromkeys(getattr(p.args[0], "epl_parts", None) for p in parents if p.func is foreign)
    return tuple((each, each.changes()) for each in parts if each is not None)


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
    tensors = leaves_of((args, kwargs), torch.Tensor)
    return [(t, _torch.version_of(t)) for t in tensors if not t.is_inference()]


def _caller() -> tuple[CodeType, int] | None:
    """Code and line of the innermost caller outside torch and epl."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "contextlib", "epl"):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_code, frame.f_lineno
