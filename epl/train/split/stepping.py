"""Optimizers on cut parameters.

Most optimizers treat every element by itself: on a block they compute what one device computes for that block. Those that look at
rows, matrices or all parameters together (Adafactor, Muon, LBFGS, anything we do not know) get whole parameters and gradients while
they step, on every rank alike, and the blocks are cut from the result. That takes memory and communication for the whole of them.

A model is cut in its first call, which may be one in the closure that an optimizer is given: so optimizers are watched before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from epl.parallel.split.ranks import SplitRanks
from epl.plan.split.layout import ParameterLayout, layout_of
from epl.report.log import notice
from epl.train.split.whole import whole_of

_BY_ELEMENT = frozenset(
    [
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Rprop",
        "ASGD",
        "SparseAdam",
    ]
)
Closure = Callable[[], Any]
RanksOf = Callable[[nn.Parameter], SplitRanks]
"""Of a cut parameter: who has its blocks."""


def step_whole_where_needed(
    model: nn.Module, ranks_of: RanksOf, *, but: tuple[type[Optimizer], ...] | type[Optimizer] = ()
) -> Callable[[], None]:
    """From now on optimizers that do not step element by element see whole parameters of this model; the undo.

    `but`: classes of optimizers that somebody else takes care of.
    """
    under_way: dict[Optimizer, ShownWhole] = {}

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_element = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in _BY_ELEMENT
        if by_element or isinstance(optimizer, but):
            return None
        own = {id(p) for p in model.parameters()}
        listed = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        if not listed:
            return None
        whole = under_way[optimizer] = ShownWhole(type(optimizer).__name__, listed, ranks_of)
        closure: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            whole.show()
            return None
        return (args[0], whole.closure(closure), *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer in under_way:
            under_way.pop(optimizer).hide()

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class ShownWhole:
    """Those parameters of an optimizer that are cut: whole in their places while it steps."""

    def __init__(self, optimizer: str, parameters: Sequence[nn.Parameter], ranks_of: RanksOf) -> None:
        self._optimizer, self._parameters, self._ranks_of = optimizer, parameters, ranks_of
        self._shown: dict[nn.Parameter, ParameterLayout] = {}

    def closure(self, given: Closure) -> Closure:
        """The user's, which computes on blocks; what the optimizer does around it, it does on whole parameters."""

        def closure() -> Any:
            self.hide()
            with torch.enable_grad():
                loss = given()
            self.show()
            return loss

        self.show()
        return closure

    @torch.no_grad()
    def show(self) -> None:
        """Whole parameters and gradients in the places of the blocks."""
        cut = {p: layout for p in self._parameters if (layout := layout_of(p)) is not None}
        if cut:
            notice(
                f"{self._optimizer} may look at more than one element of a parameter at a time: while it steps, every rank has the whole "
                f"of the {len(cut)} split parameters it holds"
            )
        for parameter, layout in cut.items():
            ranks = self._ranks_of(parameter)
            gradient, parameter.grad = parameter.grad, None
            parameter.data = whole_of(parameter.detach(), layout, ranks)
            if gradient is not None:
                parameter.grad = whole_of(gradient.to_dense() if gradient.is_sparse else gradient, layout, ranks)
        self._shown = cut

    @torch.no_grad()
    def hide(self) -> None:
        """The blocks again, cut from what the optimizer has made."""
        for parameter, layout in self._shown.items():
            rank = self._ranks_of(parameter).rank
            gradient, parameter.grad = parameter.grad, None
            parameter.data = layout.take(parameter.detach(), rank)
            if gradient is not None:
                parameter.grad = layout.take(gradient, rank)
        self._shown = {}
