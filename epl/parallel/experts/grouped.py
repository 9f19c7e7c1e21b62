"""A linear layer per group of rows: the stacked weights of experts, each on rows of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class Grouped(torch.autograd.Function):
    """Rows in groups of these sizes, each times its own matrix, plus its own bias.

    By hand: torch's grouped_mm takes bfloat16 on some GPUs only, padding for bmm costs as much as the experts are unbalanced,
    and a Python loop of linear layers leaves four autograd nodes per expert.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.sizes, ctx.has_bias = sizes, bias is not None
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        for n, (size, x, y) in enumerate(
            zip(sizes, rows.split_with_sizes(sizes), out.split_with_sizes(sizes), strict=True)
        ):
            if not size:
                continue
            if bias is None:
                torch.mm(x, weight[n], out=y)
            else:
                torch.addmm(bias[n], x, weight[n], out=y)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        sizes, grad = ctx.sizes, grads[0]
        wants_rows, wants_weight, wants_bias, _ = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if wants_rows else None
        of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if wants_weight else None
        of_bias = grad.new_empty(weight.shape[0], weight.shape[2]) if wants_bias else None
        start = 0
        for n, (size, g) in enumerate(zip(sizes, grad.split_with_sizes(sizes), strict=True)):
            stop = start + size
            if of_rows is not None and size:
                torch.mm(g, weight[n].t(), out=of_rows[start:stop])
            if of_weight is not None:  # of no rows: zeros
                torch.mm(rows[start:stop].t(), g, out=of_weight[n])
            if of_bias is not None:
                torch.sum(g, 0, out=of_bias[n])
            start = stop
        return of_rows, of_weight, of_bias, None


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int]
) -> torch.Tensor:
    """rows @ weight[n] + bias[n] for the n-th group of rows; under autocast in its dtype."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    found: torch.Tensor = Grouped.apply(rows, weight, bias, sizes)  # type: ignore[no-untyped-call]
    return found
