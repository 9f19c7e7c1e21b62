"""Which elements of a tensor's memory an operation is about, and how it is carried out on a piece of that memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """The elements that a view shows: `(offset, sizes, strides)` in a memory of which only a piece is at hand.

    Sizes and strides are those of the dims that matter, outermost first; a place without gaps has one dim of stride 1.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(view: torch.Tensor) -> Place | None:
        """The place that a view shows, in any order of its elements; None if elements repeat or interleave."""
        dims = sorted(
            ((stride, size) for size, stride in zip(view.shape, view.stride(), strict=True) if size != 1), reverse=True
        )
        joined: list[tuple[int, int]] = []  # from the innermost dim outwards: (stride, size)
        reach = 1
        for stride, size in reversed(dims):
            if stride < reach:
                return None
            if joined and stride == joined[-1][0] * joined[-1][1]:
                joined[-1] = joined[-1][0], joined[-1][1] * size
            else:
                joined.append((stride, size))
            reach += (size - 1) * stride
        joined = list(reversed(joined)) or [(1, view.numel())]
        return Place(int(view.storage_offset()), tuple(s for _, s in joined), tuple(s for s, _ in joined))

    @property
    def in_one_piece(self) -> bool:
        """Whether there are no gaps."""
        return self.strides == (1,)

    @property
    def first(self) -> int:
        """Where it begins."""
        return self.offset

    @property
    def last(self) -> int:
        """Where it ends, for a place in one piece: one after the last element."""
        return self.offset + self.sizes[0]

    @property
    def margin(self) -> int:
        """How many elements beside a piece `change` may need room for."""
        return 0 if self.in_one_piece else self.strides[0]

    def change(self, piece: torch.Tensor, start: int, change: Callable[[torch.Tensor], object]) -> None:
        """`change(view)` in place, for those of its elements that are in `piece`: the memory from `start` on, flat.

        What `change` does to an element must depend on that element alone.
        """
        stop = start + piece.numel()
        if self.in_one_piece:
            first, last = max(self.first, start), min(self.last, stop)
            if first < last:
                change(piece[first - start : last - start])
            return
        (count, *sizes), (step, *strides) = self.sizes, self.strides
        length = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        low = max(0, -((self.offset + length - 1 - start) // step))
        high = min(count - 1, (stop - 1 - self.offset) // step)
        if low > high:
            return
        begin, end = self.offset + low * step, self.offset + high * step + length
        left, right = max(0, start - begin), max(0, end - stop)
        room = piece
        if left or right:  # rows that are only partly in the piece: numbers beside it are made and thrown away
            room = piece.new_zeros(left + piece.numel() + right)
            room[left : left + piece.numel()] = piece
        change(
            room.as_strided((high - low + 1, *sizes), (step, *strides), room.storage_offset() + begin - start + left)
        )
        if room is not piece:
            piece.copy_(room[left : left + piece.numel()])
