"""A parameter of a stage that is split: its ranks, the *lanes*, have a block of it each, or each the whole of it.

In the loop's expressions (an L2 term) it counts as if it were another rank's: every rank of the replica writes the same down, and all
lanes compute it together (terms.py), so that each gets the gradient of its own block. What home differentiates alone would reach one lane
only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from epl import _torch
from epl.graph.context import Context
from epl.graph.spec import Spec
from epl.parallel.split.cutparameter import CutParameter, Expressions
from epl.parallel.split.expressions import OneLoss, value_of
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.plan.split.layout import layout_of, whole_shape
from epl.train.lazy.node import Node, foreign
from epl.train.lazy.tensor import answer


class _Stepping(threading.local):
    under_way = False
    """An optimizer steps: it computes with blocks."""


_stepping = _Stepping()


class LaneParameter(CutParameter):
    """What a rank of a split stage holds of a parameter of that stage."""

    epl_owner: int
    """The first of the lanes: who answers when home asks."""
    epl_lanes: tuple[int, ...]
    """The ranks that have it, all of which compute what home asks for."""
    epl_ranks: SplitRanks
    epl_name: str
    epl_together: bool
    """Whether all that have it are lanes of split stages; else some rank computes with it by itself."""
    epl_node: Node

    @classmethod
    def is_block(cls) -> bool:
        """Only in optimizers, outside of the closure they are given: in an evaluation other ranks write an expression down, and so must this
        one."""
        return _stepping.under_way and not torch.is_grad_enabled()

    def expressions_of_copies(self) -> Expressions:
        """Of a copy only this rank and the other lanes know."""
        return OneLoss(self.epl_ranks)

    @staticmethod
    def is_used_by_its_stage() -> bool:
        """Whether a stage computes now, rather than the loop."""
        return region.depth > 0

    def node(self) -> Node:
        """What stands for it in expressions."""
        with _torch.no_tensor_subclass():
            trained = self.requires_grad
        self.epl_node.spec = self.epl_node.spec._replace(requires_grad=trained)
        return self.epl_node

    def here(self) -> torch.Tensor:
        """What the lanes compute with: a split value, or all of it."""
        if layout_of(self) is not None:
            return value_of(self, self.epl_ranks)
        with _torch.no_tensor_subclass():
            return self.view_as(self)


class _Recorded:
    """Expressions over parameters of lanes are written down."""

    def compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return answer(func, args, kwargs)

    def gather(self, parameter: CutParameter, why: str) -> torch.Tensor:
        return parameter  # it looks whole to whatever is computed from it


def become_lane(
    parameter: nn.Parameter, lanes: Sequence[int], owner: int, name: str, ranks: SplitRanks, *, together: bool
) -> None:
    """`parameter`, the same object, is used by the loop as if another rank had it; its numbers, or this rank's block, stay here."""
    parameter.__class__ = LaneParameter
    assert isinstance(parameter, LaneParameter)
    parameter.epl_expressions = _Recorded()
    parameter.epl_owner, parameter.epl_name, parameter.epl_ranks = owner, name, ranks
    parameter.epl_lanes, parameter.epl_together = tuple(lanes), together
    parameter.epl_node = Node(foreign, (parameter,), {}, Context(True, ()), _spec(parameter))
    _torch.allow_foreach(LaneParameter)


def ranks_of(parameter: nn.Parameter) -> SplitRanks:
    """Who has its blocks, of one that is cut."""
    assert isinstance(parameter, LaneParameter)
    return parameter.epl_ranks


def become_single(parameter: nn.Parameter) -> None:
    """Undo `become_lane`: a plain parameter again, of which the numbers here are what they are."""
    if isinstance(parameter, LaneParameter):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        for attribute in (
            "epl_expressions",
            "epl_owner",
            "epl_name",
            "epl_ranks",
            "epl_lanes",
            "epl_together",
            "epl_node",
            "epl_parts",
        ):
            vars(parameter).pop(attribute, None)


def watch_steps() -> Callable[[], None]:
    """While optimizers step, parameters of lanes are blocks to them; the undo."""

    def before(optimizer: Optimizer, args: object, kwargs: object) -> None:
        _stepping.under_way = True

    def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
        _stepping.under_way = False

    handles = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]

    def undo() -> None:
        _stepping.under_way = False
        for handle in handles:
            handle.remove()

    return undo


def _spec(parameter: nn.Parameter) -> Spec:
    shape = whole_shape(parameter)
    with torch.no_grad(), _torch.no_tensor_subclass():
        one = torch.empty((1,) * len(shape), dtype=parameter.dtype, device=parameter.device)
        return Spec.of(one.expand(shape).requires_grad_(parameter.requires_grad))
