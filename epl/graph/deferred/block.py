"""What the placing code does with tensors without memory: cuts a rank's block out of them, or makes them whole."""

from __future__ import annotations

import math

import torch
from torch import nn

from epl import _torch
from epl.graph.deferred import recipe
from epl.graph.deferred.place import Place
from epl.graph.deferred.recipe import Change, Memo, Recipe
from epl.graph.deferred.tensor import Cell, DeferredTensor, become_ordinary, check_unsettled, defer, order_of, plain
from epl.plan.split.layout import ParameterLayout


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether it has no memory yet: built under `split`, and not placed."""
    return isinstance(tensor, DeferredTensor)


def deferred_block(tensor: torch.Tensor, layout: ParameterLayout, rank: int) -> torch.Tensor:
    """A rank's block, as ordinary memory of its own, bit by bit as if cut out of the whole; the tensor stays as it is.

    Beside the block, a few pieces (`recipe.PIECE` elements) and at least one row of what lies within the cut dim are made at once.
    """
    assert isinstance(tensor, DeferredTensor)
    assert tensor.shape == layout.shape, f"{tuple(tensor.shape)} is not {tuple(layout.shape)}"
    check_unsettled(tensor)
    order = order_of(tensor)
    with torch.no_grad(), _torch.without_operation_modes():
        if tensor.epl_cell.whole is not None or order is None:
            return layout.take(plain(tensor, "cutting a tensor that is not contiguous"), rank)
        block = torch.empty(layout.block_shape(rank), dtype=tensor.dtype, device=tensor.device)
        _fill(block, tensor.epl_cell.recipe, order.first, layout, rank)
    return block


def _fill(block: torch.Tensor, numbers: Recipe, offset: int, layout: ParameterLayout, rank: int) -> None:
    outer, inner = math.prod(layout.shape[: layout.dim]), math.prod(layout.shape[layout.dim + 1 :])
    size, ranges, memo = layout.shape[layout.dim], layout.cut.ranges(rank), Memo()
    rows, length = block.view(outer, -1), size * inner
    if outer == 1 or length > recipe.PIECE:
        for row in range(outer):
            done = 0
            for start, stop in ranges:
                count = (stop - start) * inner
                numbers.write(offset + row * length + start * inner, rows[row, done : done + count], memo)
                done += count
        return
    step = max(1, recipe.PIECE // max(1, length))
    for first in range(0, outer, step):
        last = min(outer, first + step)
        piece = numbers.numbers(offset + first * length, offset + last * length, memo)
        rows[first:last] = layout.cut.take(piece.view(last - first, size, inner), 1, rank).reshape(last - first, -1)


def settle_block(parameter: torch.Tensor, layout: ParameterLayout, rank: int) -> None:
    """`parameter`, the same object, is an ordinary one from now on, with this rank's block as its memory.

    A gradient that it has is cut alike. Views of it that were taken before (a state dict) raise when they are used.
    """
    assert isinstance(parameter, DeferredTensor)
    block, gradient, cell = deferred_block(parameter, layout, rank), parameter.grad, parameter.epl_cell
    become_ordinary(parameter, block)
    if gradient is not None:
        parameter.grad = layout.take(gradient, rank)
    cell.settled = True


def materialise_whole(tensor: torch.Tensor) -> None:
    """`tensor`, the same object, is an ordinary one from now on, with all its numbers; views of it share its memory."""
    assert isinstance(tensor, DeferredTensor)
    check_unsettled(tensor)
    with torch.no_grad(), _torch.without_operation_modes():
        become_ordinary(tensor, plain(tensor, ""))


def defer_meta(parameter: nn.Parameter) -> bool:
    """`parameter`, on the meta device, the same object, now takes what its module's initialiser does to it; whether it does.

    It is not a number throughout until then. Only for the CPU: other devices' generators cannot be drawn from in parts.
    """
    if type(parameter) is not nn.Parameter or not parameter.is_meta or not parameter.is_contiguous():
        return False
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return False
    cpu, place = torch.device("cpu"), Place(0, (parameter.numel(),), (1,))
    mark = Change(place, torch.Tensor.fill_, (float("nan"),), False)
    cell = Cell(Recipe(parameter.numel(), parameter.dtype, cpu, None, (mark,)))
    defer(parameter, cell, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    return True
