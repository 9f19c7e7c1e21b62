"""Values at the lanes: where the last stage is split, its ranks each have a part of an output (logits cut along the classes), and together
compute what the loop makes of it. So a loss, or a count of hits, never gathers them.

    Node.at_lanes      home                 another lane         a rank without a lane
    True               its part             its part             nothing
    False (at home)    the whole            nothing              nothing

A part is a split value, or simply the whole; which, ranks without a lane cannot know, and need not. Nothing here has a graph any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from epl.graph.spec import swap
from epl.parallel.split.value import SplitTensor, whole
from epl.train.lazy.node import Node, topological


class LossAtLanes(NamedTuple):
    """How the lanes of a split last stage compute a loss together; alike on every rank of the replica but for `here`."""

    here: bool
    """Whether this rank is one of them."""
    known: Sequence[Node]
    """Of the loss's operations, those whose values are wanted whole at home: the loss, and small totals in it."""
    keep_outputs: bool
    """Whether the loop of any rank can still ask for outputs of the model."""


def bring_home(nodes: Iterable[Node]) -> None:
    """Home has these whole from now on; all lanes call it together, with the same nodes in the same order."""
    for node in nodes:
        if not node.at_lanes:
            continue
        node.at_lanes, carrier = False, node.carrier
        assert carrier is not None
        if carrier.at_end:
            with torch.no_grad():
                value = swap(node.value, SplitTensor, whole)
            node.value = value if carrier.is_home else None


def is_for_lanes(node: Node) -> bool:
    """Whether an operation is computed at the lanes: some of its operands are there, and no other is at home alone."""
    parents = node.parents
    return any(p.at_lanes for p in parents) and all(
        (p.at_lanes and p.carrier is node.carrier) or p.everywhere for p in parents
    )


def waits_for_lanes(node: Node, outputs: Collection[Node] = (), known: Collection[Node] = ()) -> bool:
    """Whether it is not computed, and is made from something that is at the lanes, or will be: `outputs`. What is `known` is not looked
    behind."""
    if node.done or node in known:
        return False
    behind = topological([node], lambda n: n.done or n in known)
    return any(n.at_lanes or n in outputs for n in behind)
