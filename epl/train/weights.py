"""What this rank's gradients count for: f in the picture on top of epl/parallel/reducer.py.

Each rank's loss is a mean over the rows it sees. With n_r rows on rank r, N ranks, replicas of k ranks:

    mean over replicas     every row of the global batch counts alike         f = N · n_r / Σ n
    sum over replicas      within a replica rows count alike, replicas add    f = N · n_r / (rows of r's replica)

Without a loader of ours every rank is taken to see the same number of rows.
"""

from __future__ import annotations

from typing import Literal

from epl.data.share import BatchShare


def row_factor(method: Literal["mean", "sum"], ranks: int, parts: int, share: BatchShare | None) -> float:
    """f for this rank, over `ranks` ranks of which each replica has `parts` that divide its rows."""
    if method == "mean":
        return 1.0 if share is None else share.weight
    return ranks * within_replica(parts, share)


def within_replica(parts: int, share: BatchShare | None) -> float:
    """This rank's part of its replica's rows."""
    if share is None:
        return 1 / parts
    first = share.index - share.index % parts
    rows = sum(share.rows[first : first + parts])
    return share.own / rows if rows else 0.0


def replica_factor(method: Literal["mean", "sum"], replicas: int, parts: int, share: BatchShare | None) -> float:
    """What this replica's gradient counts for in an average over replicas, once its own ranks have been averaged."""
    if method == "sum":
        return float(replicas)
    if share is None or not share.total:
        return 1.0
    first = share.index - share.index % parts
    return replicas * sum(share.rows[first : first + parts]) / share.total
