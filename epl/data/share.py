"""Which rows are this rank's: of every global batch (`DataShare`), and of one of them (`BatchShare`).

global batch    | replica 0           | replica 1           |      R = 2 replicas
                | part 0   | part 1   | part 0   | part 1   |      k = 2 parts of a replica
share index       0          1          2          3               index = replica · k + part
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataShare:
    """This rank's place among those that divide the rows between them."""

    replicas: int = 1
    """R, the number of model replicas."""
    replica: int = 0
    """r, which of them this rank belongs to."""
    parts: int = 1
    """k, ranks of one replica that each see rows of their own; 1 where all ranks of the replica see the same rows."""
    part: int = 0
    """j, which of these parts is this rank's."""
    copies: int = 1
    """Ranks that see the very same rows as this one (the stages of a pipeline), this one included."""
    num_micro_batch: int = 1
    """M, micro batches per optimizer step: a step's batch has M times the loader's batch size."""
    drop_tail: bool = False
    """`io.uneven_tail` is "drop": the last, incomplete global batch is left out."""
    sliced: bool = False
    """`io.slicing`: an iterable dataset is this share's own already, its rows are not divided again."""

    def __post_init__(self) -> None:
        counts = (self.replicas, self.parts, self.copies, self.num_micro_batch)
        assert min(counts) >= 1, f"counts below 1 in {self}"
        assert 0 <= self.replica < self.replicas, f"replica out of range in {self}"
        assert 0 <= self.part < self.parts, f"part out of range in {self}"

    @property
    def shares(self) -> int:
        """R · k: how many different shares a global batch is divided into."""
        return self.replicas * self.parts

    @property
    def index(self) -> int:
        """This rank's share among them, replica by replica."""
        return self.replica * self.parts + self.part

    @property
    def group(self) -> int:
        """R · M: micro batches in one global batch."""
        return self.replicas * self.num_micro_batch

    @property
    def alone(self) -> bool:
        """This rank is the only one that reads the data."""
        return self.shares * self.copies == 1


@dataclasses.dataclass(frozen=True)
class BatchShare:
    """How the rows of one global batch are divided: what makes the gradient exact when the division is uneven."""

    rows: tuple[int, ...]
    """Rows of every share, in the order of `DataShare.index`."""
    index: int
    """Which of them is this rank's."""

    @property
    def total(self) -> int:
        """Rows of the global batch."""
        return sum(self.rows)

    @property
    def own(self) -> int:
        """Rows of this rank that count."""
        return self.rows[self.index]

    @property
    def padded(self) -> bool:
        """This rank has no row of its own: what its loop sees repeats other rows, and weighs nothing."""
        return self.own == 0

    @property
    def fraction(self) -> float:
        """This rank's part of the global batch: the factor of its mean gradient in the global mean."""
        return self.own / self.total if self.total else 0.0

    @property
    def weight(self) -> float:
        """`fraction` × shares: the factor before an average over all shares; 1 when the rows are divided evenly."""
        return self.own * len(self.rows) / self.total if self.total else 0.0

    @property
    def even(self) -> bool:
        """All shares have the same number of rows, so no weighting is needed."""
        return len(set(self.rows)) == 1
