"""What a recorded value is, as a function of the batch, and how a micro batch gets its share of it.

CONST            the same whatever the micro batch
Rows(dim, part)  rows of the batch along `dim`; micro batch m owns part[m] of them, in order; the recorded operation, run on
                 micro batch m, gives exactly those rows
SUM              a total over the micro batches of what the (rewritten) operation gives on each
None             not known: the whole batch is needed
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from epl.plan.batch import RowDim, flat


class Whole(enum.Enum):
    """The two states that are not rows."""

    CONST = "const"
    SUM = "sum"


CONST, SUM = Whole.CONST, Whole.SUM


class Order:
    """Which rows of a result belong to micro batch m, when a real index tensor has permuted or repeated them.

    Compared by identity: two results of one index tensor line up, others do not, even if they have as many rows.
    """

    def __init__(self, lists: list[torch.Tensor]) -> None:
        self.lists = lists


class Rows(NamedTuple):
    """Rows of the batch along a dim."""

    dim: int
    part: tuple[int, ...]
    order: Order | None = None

    @property
    def total(self) -> int:
        """Rows of the whole batch."""
        return sum(self.part)

    @property
    def kind(self) -> tuple[tuple[int, ...], Order | None]:
        """What two values must have in common to line up."""
        return self.part, self.order

    def take(self, value: torch.Tensor, m: int) -> torch.Tensor:
        """Micro batch m's rows of a whole-batch value."""
        if self.order is not None:
            return value.index_select(self.dim, self.order.lists[m].to(value.device))
        return value.narrow(self.dim, sum(self.part[:m]), self.part[m])

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole-batch value from what the micro batches gave."""
        joined = torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]
        if self.order is None or len(parts) == 1:
            return joined
        places = torch.cat(self.order.lists).to(joined.device)
        return torch.empty_like(joined).index_copy_(self.dim, places, joined)


State = Rows | Whole


def state_of(kind: RowDim | Literal["coupled", "constant"], sizes: Sequence[int]) -> State:
    """Of an output of the model, whose micro batches have so many rows."""
    if isinstance(kind, str):
        return SUM if kind == "coupled" else CONST
    dim, inner = flat(kind)
    return Rows(dim, tuple(n * inner for n in sizes))


class Cut(NamedTuple):
    """A whole-batch value of which micro batch m takes its rows."""

    value: Any
    rows: Rows


class Once(NamedTuple):
    """A constant added to a SUM: counted in the first micro batch only."""

    value: Any


class Per(NamedTuple):
    """A literal that differs between micro batches, such as a size."""

    values: tuple[Any, ...]


class Over(NamedTuple):
    """A divisor that is computed from the given tensors, once for the whole batch."""

    func: Callable[..., Any]
    args: tuple[Any, ...]


class Piece(NamedTuple):
    """What a rule returns: the state of the result and how to get micro batch m's share of it."""

    state: State
    func: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    over: float | Over | None = None
    """What the share is divided by; the same for every micro batch."""
