"""What ranks with rows of their own give a split part may differ in more than its rows: each has padded its rows to a length of its own.

Experts do not mind: rows go to them one by one. But values cannot be put together of which ranks have other lengths, and what is sent would
not fit: Gloo ends the process then. So ranks say in the word before each call what parts are given, in short; where they differ,
they tell each other in full, and a part that puts such values together refuses, on all ranks (`SplitRanks.refused`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from epl.parallel.split.rows import Batched, PartCall
from epl.train.split.rowmap import GlueCall, RowMap

BITS = 48
Given = tuple[tuple[str, str], ...]
"""Path ("" for the code between modules) and shapes of every call."""


def given(calls: RowMap, glue: Sequence[GlueCall]) -> Given:
    """What the parts of a recorded call are given, but for the number of rows."""
    found = [(str(part.node.target), shapes_of(part.call)) for parts in calls.values() for part in parts]
    return (*found, *(("", shapes_of(each.call)) for each in glue))


def shapes_of(call: PartCall) -> str:
    """The shapes of its arguments, but for the number of rows."""
    return " ".join(_shape(how, shape) for how, shape in zip(call.inputs, call.shapes, strict=True))


def _shape(how: Batched, shape: torch.Size) -> str:
    rows = "rows" if how.inners == (1,) else f"rows × {' + '.join(map(str, how.inners))}"
    return f"({', '.join(rows if d == how.dim else str(size) for d, size in enumerate(shape))})"


def digest(told: object) -> int:
    """The same bits for the same."""
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=BITS // 8).digest(), "big")


def refusals(calls: RowMap, own: Given, others: Sequence[Given], title: str) -> Mapping[nn.Module | None, str]:
    """By part (None: the code between modules) why it cannot put values together; those that all ranks call alike are not in it."""

    def of(told: Given, path: str) -> list[str]:
        return [shapes for where, shapes in told if where == path]

    paths: dict[nn.Module | None, str] = {module: str(parts[0].node.target) for module, parts in calls.items()}
    return {
        module: refusal(path or f"code of {title}", of(own, path))
        for module, path in (*paths.items(), (None, ""))
        if any(of(other, path) != of(own, path) for other in others)
    }


def refusal(path: str, shapes: Sequence[str]) -> str:
    """What to say of values that cannot be put together."""
    return (
        f"{path}, which is under split, is given {' then '.join(shapes) or 'nothing'} on this rank, and something else on another rank of the "
        "replica: expected are the same calls on all of them, and tensors that differ in the number of rows only. Ranks have rows of "
        "their own under replicate, which a split part puts together: let the collate function pad to one fixed length, and give the model "
        "the same flags on all ranks"
    )
