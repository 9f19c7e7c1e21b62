"""What a run computes: how many attentions whole, all their heads on every rank; and how much there is to it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from epl.graph.spec import leaves_of
from epl.parallel.split.rules.attention import OPENED
from epl.parallel.split.rules.pointwise import pointwise
from epl.parallel.split.rules.registry import RULES, functions_named
from epl.parallel.split.value import SplitTensor

_SCORES = "epl_scores"
_PRODUCTS = frozenset(functions_named("matmul", "bmm", "baddbmm", "__matmul__", "einsum"))
_FORMS = frozenset(
    functions_named(
        *[
            "view",
            "reshape",
            "flatten",
            "unflatten",
            "transpose",
            "swapaxes",
            "permute",
            "movedim",
            "unsqueeze",
            "squeeze",
        ],
        *["__getitem__", "to", "type_as", "expand", "dropout", "tril", "triu", "cat"],
    )
)
_SOFTMAX = frozenset({functional.softmax, torch.softmax, torch.Tensor.softmax})


class Attention(TorchFunctionMode):
    """Inside, attentions are looked at: fused ones, and the softmax over scores of those that are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = 0
        self.heads = 0
        """Those of them of which we know that they are over scores, products of queries and keys."""
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
                self.heads += fused or hasattr(values[0], _SCORES)
        if func in OPENED:  # its body is Python: looked at as well
            with self:
                return RULES[func](func, *args, **kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and _are_scores(func, args, kwargs):
            setattr(out, _SCORES, True)
        return out


def _are_scores(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it multiplies values with a batch dim (so not by a weight), or gives such products in another form."""
    tensors = leaves_of((args, kwargs), torch.Tensor)
    if func in _PRODUCTS:
        return len(tensors) > 1 and all(value.ndim >= 3 for value in tensors)
    return (func in _FORMS or RULES.get(func) is pointwise) and any(hasattr(value, _SCORES) for value in tensors)


def _is_cut_by_heads(value: torch.Tensor) -> bool:
    return isinstance(value, SplitTensor) and not value.is_partial and value.from_end <= -3
