"""Optimizers on cut parameters.

Most optimizers treat every element by itself: on a block they compute what one device computes for that block. Those that look at
rows, matrices or all parameters together (Adafactor, Muon, LBFGS, anything we do not know) get whole parameters and gradients while
they step, on every rank alike, and the blocks are cut from the result. That takes memory and communication for the whole of them.
"""

from __future__ import annotations

from collections.abc import Callable
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


def step_whole_where_needed(model: nn.Module, ranks: SplitRanks) -> Callable[[], None]:
    """From now on optimizers that do not step element by element see whole parameters of this model; the undo."""
    under_way: dict[Optimizer, _Whole] = {}

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in _BY_ELEMENT:
            return None
        own = {id(p) for p in model.parameters()}
        listed = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        cut = {p: layout for p in listed if (layout := layout_of(p)) is not None}
        if not cut:
            return None
        notice(
            f"{type(optimizer).__name__} may look at more than one element of a parameter at a time: while it steps, every rank has "
            f"the whole of the {len(cut)} split parameters it holds"
        )
        whole = under_way[optimizer] = _Whole(cut, ranks)
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


class _Whole:
    """Cut parameters that are shown whole while an optimizer steps."""

    def __init__(self, cut: dict[nn.Parameter, ParameterLayout], ranks: SplitRanks) -> None:
        self._cut, self._ranks = cut, ranks
        self._shown = False

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
        for parameter, layout in self._cut.items():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = whole_of(parameter.detach(), layout, self._ranks)
            if gradient is not None:
                parameter.grad = whole_of(gradient.to_dense() if gradient.is_sparse else gradient, layout, self._ranks)
        self._shown = True

    @torch.no_grad()
    def hide(self) -> None:
        """The blocks again, cut from what the optimizer has made."""
        if not self._shown:
            return
        for parameter, layout in self._cut.items():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = layout.take(parameter.detach(), self._ranks.rank)
            if gradient is not None:
                parameter.grad = layout.take(gradient, self._ranks.rank)
        self._shown = False
