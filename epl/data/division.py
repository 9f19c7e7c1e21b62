"""What a rank takes of one global batch, for the three ways in which a loader can be batched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from epl.data.share import BatchShare, DataShare
from epl.plan.batch import divide, share_rows


def take_samples(samples: Sequence[object], share: DataShare) -> tuple[list[object], BatchShare]:
    """This rank's samples of a global batch, one of a neighbour's if it has none; and how all are divided."""
    if not samples:
        return [], BatchShare((0,) * share.shares, share.index)
    spans = share_rows(len(samples), share.replicas, share.parts)
    own = spans[share.index]
    rows = tuple(0 if span.padding else len(span) for span in spans)
    return list(samples[own.start : own.stop]), BatchShare(rows, share.index)


def take_batches(batches: Sequence[Sequence[object]], share: DataShare) -> tuple[list[object], BatchShare]:
    """This rank's samples of R·M batches, M for each replica; of fewer batches, as many rows as its even share."""
    if len(batches) < share.group:
        return take_samples([sample for batch in batches for sample in batch], share)
    blocks: list[list[object]] = []
    for replica in range(share.replicas):
        own = batches[replica * share.num_micro_batch : (replica + 1) * share.num_micro_batch]
        blocks.append([sample for batch in own for sample in batch])
    rows = tuple(stop - start for block in blocks for start, stop in divide(len(block), 1, share.parts))
    divided = BatchShare(rows, share.index)
    inside = dataclasses.replace(share, replicas=1, replica=0)
    samples, _ = take_samples(blocks[share.replica], inside)
    if not samples:  # a replica whose batches are all empty: any row keeps it in step
        samples = next((block[-1:] for block in blocks if block), [])
    return samples, divided


@dataclasses.dataclass(frozen=True)
class ItemSpan:
    """Which ready batches a replica takes of a group, and with how many replicas it shares them by rows."""

    start: int
    stop: int
    sharers: int = 1
    position: int = 0

    def rows_of(self, rows: int, parts: int, part: int) -> tuple[int, int, bool]:
        """The rows [start, stop) of the items put together that one part sees, and whether they count."""
        if rows == 0:
            return 0, 0, False
        own = share_rows(rows, self.sharers, parts)[self.position * parts + part]
        return own.start, own.stop, not own.padding


def item_span(items: int, replica: int, share: DataShare) -> ItemSpan:
    """The ready batches of one replica, of a full group of R·M or of the fewer that are left at the end."""
    if items == share.group:
        return ItemSpan(replica * share.num_micro_batch, (replica + 1) * share.num_micro_batch)
    if items >= share.replicas:
        return ItemSpan(*divide(items, share.replicas)[replica])
    # Fewer items than replicas: the replicas are dealt to the items, those at one item divide its rows.
    for item, (first, last) in enumerate(divide(share.replicas, items)):
        if first <= replica < last:
            return ItemSpan(item, item + 1, last - first, replica - first)
    raise AssertionError(f"replica {replica} is beyond {share.replicas}")


def item_rows(rows: Sequence[int], share: DataShare) -> BatchShare:
    """How a group of ready batches with these row counts is divided."""
    counts = []
    for replica in range(share.replicas):
        span = item_span(len(rows), replica, share)
        total = sum(rows[span.start : span.stop])
        for part in range(share.parts):
            start, stop, counted = span.rows_of(total, share.parts, part)
            counts.append(stop - start if counted else 0)
    return BatchShare(tuple(counts), share.index)
