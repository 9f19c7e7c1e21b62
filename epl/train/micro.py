"""Cuts a batch into micro batches along dim 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epl import _torch
from epl.plan.batch import cut_evenly


def count_rows(batch: Sequence[object]) -> int | None:
    """The rows of a batch: the length of dim 0 of its first tensor that has one; None without any tensor."""
    sizes = (t.shape[0] for t in _torch.tree_leaves(list(batch)) if isinstance(t, torch.Tensor) and t.dim())
    return next(sizes, None)


def cut_batch(batch: Sequence[object], rows: int, pieces: int) -> list[tuple[object, ...]]:
    """The batch in `pieces` micro batches, longer ones first: every tensor with `rows` rows is cut, the rest is passed whole."""
    cuts = cut_evenly(0, rows, pieces)

    def piece(start: int, stop: int) -> tuple[object, ...]:
        def cut(leaf: object) -> object:
            return leaf[start:stop] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows else leaf

        return tuple(cut(v) if isinstance(v, torch.Tensor) else _torch.tree_map(cut, v) for v in batch)

    return [piece(start, stop) for start, stop in cuts]
