"""`torch.optim.LBFGS` on a model in stages: every rank moves the whole vector of parameters, by the same products over all of it.

It keeps one flat vector of all parameters and gradients, where other optimizers look at each parameter alone. So while it steps,
whole tensors stand in its list for parameters of other ranks: their numbers, and after every call of the closure their
gradients, come from the owners. Of a split stage, the whole is shown in the places of its blocks, but for the time of the closure. All
ranks then compute the same step, bit for bit, each with its own part among it. That takes memory for the whole model on every rank, and LBFGS is for models where this is nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from epl import _torch
from epl.train.lazy import ForeignParameter
from epl.train.lazy.lane import LaneParameter, ranks_of
from epl.train.split.stepping import ShownWhole

if TYPE_CHECKING:
    from epl.train.replicas import Replicas

Closure = Callable[[], Any]
_Numbers = dict[int, torch.Tensor | None]


def step_whole_vectors(replicas: Replicas) -> Callable[[], None]:
    """From now on steps of an LBFGS with parameters of this model are those of the whole model; the undo."""
    under_way: dict[LBFGS, _Whole] = {}

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(optimizer, LBFGS) or not replicas.trains(optimizer):
            return None
        whole = under_way[optimizer] = _Whole(optimizer, replicas)
        given: Closure = args[1] if len(args) > 1 else kwargs["closure"]  # the first is the optimizer
        return (args[0], whole.closure(given)), {}

    def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if isinstance(optimizer, LBFGS) and optimizer in under_way:
            under_way.pop(optimizer).end()

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class _Whole:
    """One step of an LBFGS."""

    def __init__(self, optimizer: LBFGS, replicas: Replicas) -> None:
        self._optimizer, self._replicas = optimizer, replicas
        self._own = _torch.lbfgs_parameters(optimizer)
        self._stand_ins: dict[int, nn.Parameter] = {}
        self._blocks: ShownWhole | None = None

    def closure(self, given: Closure) -> Closure:
        """The user's, after which all gradients are here."""

        def closure() -> Any:
            try:
                if self._blocks is not None:
                    self._blocks.hide()
                loss = given()
                self._show_blocks()
                self._gather()
            except BaseException:
                self.end()
                raise
            return loss

        return closure

    def end(self) -> None:
        """The optimizer has its own list again."""
        if self._blocks is not None:
            self._blocks.hide()
        _torch.set_lbfgs_parameters(self._optimizer, self._own)

    def _show_blocks(self) -> None:
        if self._blocks is None:  # the stages may have been dealt out in the closure
            self._blocks = ShownWhole("LBFGS", [p for p in self._own if isinstance(p, LaneParameter)], ranks_of)
        self._blocks.show()

    def _gather(self) -> None:
        cut = self._replicas.cut
        if cut is None or cut.carrier is None:
            return
        here = {n: p for n, p in enumerate(self._own) if not isinstance(p, ForeignParameter)}
        if not self._stand_ins:
            values = self._everyones({n: p.detach() for n, p in here.items()})
            foreign = [n for n in range(len(self._own)) if n not in here]
            self._stand_ins = {n: nn.Parameter(value) for n in foreign if (value := values[n]) is not None}
            listed = [self._stand_ins.get(n, p) for n, p in enumerate(self._own)]
            _torch.set_lbfgs_parameters(self._optimizer, listed)
        gradients = self._everyones({n: p.grad for n, p in here.items()})
        for n, stand_in in self._stand_ins.items():
            stand_in.grad = gradients[n]

    def _everyones(self, mine: _Numbers) -> _Numbers:
        cut = self._replicas.cut
        assert cut is not None
        assert cut.carrier is not None
        found: _Numbers = {}
        for theirs in cut.carrier.exchange(mine):
            assert isinstance(theirs, dict)
            found |= theirs
        return found
