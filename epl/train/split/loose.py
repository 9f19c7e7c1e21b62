"""Parameters under `split` that no split module uses, but the code between modules, where ranks have rows of their own.

    with epl.split(8):
        self.classes = nn.Parameter(torch.randn(100_000, 512))
    ...
    return F.linear(F.normalize(self.backbone(x)), F.normalize(self.classes))

While the forward runs, `self.classes` is a value that looks whole. Every operation on it, and on what follows from it, was recorded, so
it is known which of its arguments and results carry the batch: each is a split part of one call, with the bridges of
parallel/split/rows.py. What was not recorded, or mixes rows into something without rows, gets whole parameters or the rank's own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from epl.graph.record.tree import skeleton
from epl.parallel.split.cutparameter import CutParameter
from epl.parallel.split.expressions import InOwnLoss, OwnLosses, in_own_loss, value_of
from epl.parallel.split.parameters import SplitParameters
from epl.parallel.split.part import SplitPart
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.rows import PLAIN, Batched, RowBridge
from epl.parallel.split.value import SplitTensor
from epl.plan.split.splitplan import SplitPlan
from epl.train.split.rowmap import GlueCall, fits

Running = Callable[[], bool]
"""Whether the forward of the model runs now, outside of its split modules."""


class Glue:
    """The operations of one call of the model, or of one micro batch, that compute with loose parameters."""

    def __init__(
        self,
        calls: Sequence[GlueCall],
        bridge: RowBridge,
        expressions: OwnLosses,
        is_running: Running,
        refused: str,
    ) -> None:
        """`refused`: why rows of all ranks cannot be put together, if they cannot (unlike.py)."""
        self._calls, self._bridge, self._expressions, self._is_running = calls, bridge, expressions, is_running
        self._refused = refused
        self._next = 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the operation gives, as the code around it sees it; NotImplemented if it was not recorded."""
        if not self._is_running():
            return NotImplemented
        leaves, fill = skeleton((args, dict(kwargs)))
        call = self._find(func, [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)])
        if call is None:
            return NotImplemented
        how, ranks = iter(call.inputs), self._bridge.ranks
        args, kwargs = fill(
            [self._enter(leaf, next(how)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        )
        ranks.refused = self._refused
        leaves, fill = skeleton(func(*args, **kwargs))
        how = iter(call.outputs)
        left = [self._leave(leaf, next(how, PLAIN)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ranks.refused = ""
        return fill(left)

    def _find(self, func: Any, shapes: Sequence[torch.Size]) -> Any:
        """The next recorded call like this one; from the start again if a checkpoint computes again."""
        for number in (*range(self._next, len(self._calls)), *range(self._next)):
            recorded = self._calls[number]
            if recorded.func == func and fits(recorded.call, shapes):
                self._next = number + 1
                return recorded.call
        return None

    def _enter(self, value: torch.Tensor, how: Batched) -> Any:
        if isinstance(value, InOwnLoss):
            return value.common
        if isinstance(value, CutParameter):
            return value_of(value, self._bridge.ranks)
        return self._bridge.enter(value, how)

    def _leave(self, value: torch.Tensor, how: Batched) -> Any:
        if isinstance(value, SplitTensor) and not value.is_partial and how.dim is None:
            return in_own_loss(value, self._expressions)
        return self._bridge.leave(value, how)


class LooseParameters(SplitParameters):
    """The parameters of a module whose code, or whose parents' code, computes with them between split parts."""

    def __init__(
        self, plain: Mapping[str, Any], ranks: SplitRanks, expressions: OwnLosses, is_running: Running
    ) -> None:
        super().__init__(plain, ranks)
        self._expressions, self._is_running = expressions, is_running

    def __getitem__(self, key: str) -> Any:
        held = super().__getitem__(key)
        if isinstance(held, CutParameter) and self._is_running():
            return in_own_loss(value_of(held, self.ranks), self._expressions)
        return held


class LoosePart(SplitPart):
    """Loose parameters of a model, cut in place. No forward is another one because of them."""

    def __init__(
        self,
        module: nn.Module,
        plan: SplitPlan,
        ranks: SplitRanks,
        *,
        expressions: OwnLosses,
        is_running: Running,
        **more: Any,
    ) -> None:
        self._own_losses, self._is_running = expressions, is_running
        super().__init__(module, plan, ranks, expressions=expressions, **more)

    def _attach(self) -> None:
        for module, key, name in self._seats:
            if name in self.layouts:
                held = module.__dict__["_parameters"]
                if not isinstance(held, LooseParameters):
                    held = LooseParameters(held, self.ranks, self._own_losses, self._is_running)
                    module.__dict__["_parameters"] = held
                held.cut(key, self.layouts[name])
