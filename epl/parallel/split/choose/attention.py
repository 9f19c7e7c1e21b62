"""What a run computes: how many attentions whole, all their heads on every rank; and how much there is to it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from epl.parallel.split.rules.attention import OPENED
from epl.parallel.split.rules.registry import RULES
from epl.parallel.split.value import SplitTensor

_SOFTMAX = frozenset({functional.softmax, torch.softmax, torch.Tensor.softmax})


class Attention(TorchFunctionMode):
    """Inside, attentions are looked at: fused ones, and the softmax over scores of those that are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = 0
        self.calls = 0
        """Of torch functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls += 1
        fused = func is functional.scaled_dot_product_attention
        if fused or func in _SOFTMAX:
            values = [
                value for value in (*args[: 3 if fused else 1], *kwargs.values()) if isinstance(value, torch.Tensor)
            ]
            if values[0].ndim >= 3 and not all(map(_is_cut_by_heads, values[:3])):
                self.whole += 1
        if func in OPENED:  # its body is Python: looked at as well
            with self:
                return RULES[func](func, *args, **kwargs)
        return func(*args, **kwargs)


def _is_cut_by_heads(value: torch.Tensor) -> bool:
    return isinstance(value, SplitTensor) and not value.is_partial and value.from_end <= -3
