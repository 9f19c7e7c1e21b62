"""Who computes each stage: a stage of width k has k *lanes*, ranks of the replica that divide every micro batch's rows (or, under
`split`, the parameters: then every lane has all rows).

    widths 1, 2, 1 (ranks 0 | 1 2 | 3)       stage 0      stage 1      stage 2
    a micro batch of 5 rows                  0 ─ 0..4 ──┬─ 1 ─ 0..2 ──┬─ 3 ─ 0..4
                                                        └─ 2 ─ 3..4 ──┘

To the transport a lane is a stage of its own, numbered so that the rank can be read off: stage · ranks + rank. So an edge of
the schedule becomes several ordinary edges, and nothing below the bridge (mailbox, transports) knows of lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from epl.parallel.pipeline.route import Layout
from epl.parallel.pipeline.transport import LARGEST, Edge
from epl.plan.batch import Rows, share_rows


@dataclass(frozen=True)
class Lanes:
    """The ranks of one replica that compute each stage, in the order of their rows, and which of them this one is."""

    ranks: tuple[tuple[int, ...], ...]
    """For each stage; a rank is its place among the ranks of the replica (in their group)."""
    own: int
    copied: frozenset[int] = frozenset()
    """Stages whose lanes do not divide the rows but all compute all of them, with parameters that are split."""

    def __post_init__(self) -> None:
        assert self.size * len(self.ranks) <= LARGEST, f"{len(self.ranks)} stages on {self.size} ranks need larger tags"

    @staticmethod
    def of(
        widths: Sequence[int], own: int, *, num_chunks: int = 1, home: bool = False, copied: Iterable[int] = ()
    ) -> Lanes:
        """Devices of these widths one after the other; with a home, see `Schedule.with_home`, on the last one's first rank."""
        starts = [sum(widths[:device]) for device in range(len(widths))]
        devices = [tuple(range(start, start + width)) for start, width in zip(starts, widths, strict=True)]
        last = [(devices[-1][0],)] if home else []
        return Lanes((*devices * num_chunks, *last), own, frozenset(copied))

    @cached_property
    def size(self) -> int:
        """How many ranks compute the replica."""
        return 1 + max(rank for ranks in self.ranks for rank in ranks)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages this rank has a lane of."""
        return tuple(stage for stage, ranks in enumerate(self.ranks) if self.own in ranks)

    @cached_property
    def is_plain(self) -> bool:
        """Whether every stage has one rank, stage s that at place s mod p: a message then goes where `Mailbox` sends it."""
        return all(ranks == (stage % self.size,) for stage, ranks in enumerate(self.ranks))

    @cached_property
    def is_copy(self) -> bool:
        """Whether another rank has all that this one has (`copied`): where ranks add up, it must not count."""
        return any(stage in self.copied and self.lane(stage) > 0 for stage in self.stages)

    def width(self, stage: int) -> int:
        """How many lanes a stage has."""
        return len(self.ranks[stage])

    def lane(self, stage: int) -> int:
        """This rank's lane of a stage that it has."""
        return self.ranks[stage].index(self.own)

    def rows(self, stage: int, number: int) -> Rows:
        """What this rank's lane computes of a micro batch of so many rows, and the share of it in a mean.

        Where there are fewer rows than lanes the last ones compute a neighbour's row at weight 0 (`Rows.padding`): many
        modules cannot run on no rows at all, and all lanes must run (batch norm over lanes, the reduction of gradients).
        """
        if stage in self.copied:
            return Rows(0, number, 1.0)
        return share_rows(number, 1, self.width(stage))[self.lane(stage)]

    def bridged(self, edges: Iterable[Edge], layouts: Mapping[Edge, Sequence[Layout]]) -> tuple[Edge, ...]:
        """The edges between stages of one device along which values travel all the same; for `Schedule.with_communication`."""
        return tuple(
            edge for edge in edges if self._shares_ranks(edge) and not self.is_direct(edge, layouts.get(edge, ()))
        )

    def is_direct(self, edge: Edge, layouts: Sequence[Layout]) -> bool:
        """Whether every lane has what the same lane of the other stage needs, and nothing else is to be had."""
        width, other = self.width(edge[0]), self.width(edge[1])
        made, used = self.copies(edge)
        return width == other and (width == 1 or (made == used and (made or "average" not in layouts)))

    def copies(self, edge: Edge) -> tuple[bool, bool]:
        """Whether the lanes of an edge's stages all have the same rows."""
        return edge[0] in self.copied, edge[1] in self.copied

    def _shares_ranks(self, edge: Edge) -> bool:
        return not set(self.ranks[edge[0]]).isdisjoint(self.ranks[edge[1]])

    def channel(self, edge: Edge, maker: int, user: int) -> Edge:
        """The edge from one lane of a stage to one lane of another, as the transport knows it."""
        size = self.size
        return edge[0] * size + self.ranks[edge[0]][maker], edge[1] * size + self.ranks[edge[1]][user]

    def stage_edge(self, channel: Edge) -> Edge:
        """The edge that a channel belongs to."""
        return channel[0] // self.size, channel[1] // self.size

    def name(self, number: int) -> str:
        """What errors call a lane, from its number on the transport."""
        stage, rank = divmod(number, self.size)
        ranks = self.ranks[stage]
        return f"stage {stage}" if len(ranks) == 1 else f"stage {stage} (lane {ranks.index(rank)})"
