"""The bridges of a plan: what goes from the layout of one TaskGraph to that of another, how, and how many bytes of it.

Between stages, on devices of their own (a → b ranks; each value has B bytes for a micro batch of the replica):

    → replicate(b)    every rank gets its own rows of the value                    B
    → split(b)        every rank gets all rows                                     B · b

On shared devices, where k ranks have rows of their own:

    replicate → split    the rows come together: all-gather, backward reduce-scatter          B · (k - 1)
    split → replicate    every rank gets its own rows: reduce-scatter, backward all-gather     B · (k - 1)

Gradients go the same way back. Where all ranks of a split have the same rows there is nothing to bridge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epl.plan.placement import Layout, PlacedTaskGraph
from epl.plan.table import size, table

LOOP = "the loop"
"""Where what the model returns goes."""


@dataclass(frozen=True)
class Crossing:
    """Values that one TaskGraph makes and another uses."""

    source: str
    target: str
    """A TaskGraph, or `LOOP`."""
    forward: int
    """Bytes for a micro batch of the replica."""
    backward: int
    """Of these, bytes of values that have gradients."""


@dataclass(frozen=True)
class BridgePlan:
    """One bridge, and what all ranks of a replica together send over it for one micro batch."""

    source: str
    target: str
    how: str
    forward: int
    backward: int


def make_bridges(
    layout: Layout, taskgraphs: Sequence[PlacedTaskGraph], crossings: Sequence[Crossing]
) -> tuple[BridgePlan, ...]:
    """How these values cross; those that stay as they are take no bridge."""
    by_name = {t.name: t for t in taskgraphs}
    found = []
    for crossing in crossings:
        how, factor = _way(layout, by_name, crossing)
        if how:
            sent = crossing.forward * factor, crossing.backward * factor
            found.append(BridgePlan(crossing.source, crossing.target, how, *sent))
    return tuple(found)


def _way(layout: Layout, taskgraphs: Mapping[str, PlacedTaskGraph], crossing: Crossing) -> tuple[str, int]:
    source, target = taskgraphs[crossing.source], taskgraphs.get(crossing.target)
    if layout == "staged":
        if target is None:
            return "", 0  # the loop's own code runs on the last stage
        a, b = source.width, target.width
        copies = f"; from one of {a} that have it" if source.kind == "split" and a > 1 else ""
        if target.kind == "split" and b > 1:
            return f"all rows to each of {b} ranks{copies}", b
        if b > 1 or (a > 1 and source.kind == "replicate"):
            return f"rows of {1 if copies else a} dealt out to {b}{copies}", 1
        return f"sent{copies}", 1
    k = source.width
    if layout == "single" or k == 1 or all(t.kind == "split" for t in taskgraphs.values()):
        return "", 0
    if source.kind == "split" and (target is None or target.kind == "replicate"):
        if target is None:
            return "own rows; logits stay cut where the loss can work on the blocks", k - 1
        return "own rows to each rank: reduce-scatter, backward all-gather", k - 1
    if target is not None and target.kind == "split" and source.kind == "replicate":
        return "rows come together: all-gather, backward reduce-scatter", k - 1
    return "", 0


def describe_bridges(bridges: Sequence[BridgePlan]) -> str:
    """The bridges as a table."""
    rows = [("bridge from", "to", "how", "forward", "backward")]
    rows += [(b.source, b.target, b.how, size(b.forward), size(b.backward)) for b in bridges]
    return table(rows, right=(3, 4)) + "\n(bytes that a replica sends for one micro batch, at most)"
