"""Numbers for the loop: what it reads is computed at home and given to every rank; small values come by themselves after backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from epl.train.lazy.alone import ask
from epl.train.lazy.foreign import refuse_foreign
from epl.train.lazy.lanes import bring_home, waits_for_lanes
from epl.train.lazy.live import is_small, live_nodes
from epl.train.lazy.meeting import ASKS, WAITS_FOR_LANES, asks, carriers_of, meet, meet_with_flags
from epl.train.lazy.node import Node, foreign, home_of, output_of, topological
from epl.train.lazy.terms import is_told, recall, tell
from epl.train.lazy.whole import compute, share_values

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Call, Carrier


def read(nodes: Sequence[Node], doing: str) -> list[torch.Tensor]:
    """The values, on every rank, without their graphs. All ranks must read, unless every rank has them already."""
    terms = {n: recall(n) for n in nodes if n.carrier is None and not n.done}
    missing = [n for n in nodes if not n.everywhere and n not in terms]
    if missing:
        carrier = carriers_of(missing)[0]
        asked = meet(carrier, f"reading a value ({doing})", missing, ask=asks(carrier, missing))
        compute(missing, f"the loop reads a value before backward: {doing} at {missing[0].place}", asked=asked)
        share_values([n for n in missing if not n.everywhere])
    untold = [n for n, value in terms.items() if value is None]
    if untold:
        terms |= ask(untold, doing)
    return [_leaf(terms[n], n) if n in terms else _plain(n) for n in nodes]


def _leaf(value: torch.Tensor | None, node: Node) -> torch.Tensor:
    assert value is not None
    value = value.detach()
    return value.requires_grad_() if node.requires_grad else value


def _plain(node: Node) -> torch.Tensor:
    value: torch.Tensor = node.value
    if node.graph is None and not node.spent:
        return value  # also a leaf that the loop has made of it
    return _leaf(value, node)


def bring_everywhere(nodes: Sequence[Node], doing: str) -> None:
    """Every rank gets the values as real tensors with gradients."""
    wanted = [n for n in nodes if n.graph != "everywhere" and not (n.everywhere and n.graph is None)]
    if not wanted:
        return
    for node in wanted:
        refuse_foreign(node, doing)
    carrier = carriers_of(wanted)[0]
    asked = meet(carrier, f"using a value in code that cannot be recorded ({doing})", wanted, ask=asks(carrier, wanted))
    plain = [n for n in wanted if n.done and n.graph is None]
    rest = [n for n in wanted if n not in plain]
    if rest:
        compute(rest, f"{doing} at {rest[0].place} cannot be recorded", asked=asked, everyone=True)
    share_values([n for n in wanted if not n.everywhere])


def gather_at_home(nodes: Sequence[Node], doing: str) -> None:
    """What the lanes have in parts, home has whole."""
    carrier = carriers_of(nodes)[0]
    meet(carrier, f"gathering a value ({doing})", nodes)
    bring_home(nodes)


def uncomputed_at_lanes(carrier: Carrier, outputs: Collection[Node] = (), known: Collection[Node] = ()) -> list[Node]:
    """What the loop holds that is made of values at the lanes of these ranks, and not computed yet. `outputs` will be there, too; what is
    made of `known` values only is not counted."""
    if not carrier.ends_split:
        return []
    own = (n for n in live_nodes() if n.carrier is not None and home_of(n.carrier) == home_of(carrier))
    return [n for n in own if waits_for_lanes(n, outputs, known)]


def settle_at_lanes(carrier: Carrier) -> None:
    """What the loop holds of values at the lanes is computed there; all ranks of the replica call it together.

    Each rank says what it still holds: lanes wait for each other inside an operation, so only what all of them hold is computed.
    """
    waiting = {n.number: n for n in uncomputed_at_lanes(carrier) if _is_ready(n)}
    held: list[Any] = carrier.exchange(list(waiting))
    everyones = set(waiting).intersection(*held)
    nodes = [n for number, n in sorted(waiting.items()) if number in everyones]
    compute(nodes, "", asked=False)
    bring_home(n for n in nodes if is_small(n))


def settle_live(carrier: Carrier, asked: Sequence[Carrier] = (), *, at_lanes: bool = False) -> None:
    """What the loop recorded before backward is computed now, so that nothing refers to the finished step any more; small values
    go to every rank, so that `if rank == 0: print(loss.item())` needs no partner.

    `asked`: of the models with a term over parameters in the loss; what the loop still holds of such terms is asked for, too.
    `at_lanes`: all ranks know that some of them holds what the lanes have to compute.
    """
    live = live_nodes()
    if asked:
        tell(asked, [n for n in live if _is_term(n) and recall(n) is None])
    if at_lanes:
        settle_at_lanes(carrier)
    ready = [n for n in live if not n.done and n.carrier is not None and not waits_for_lanes(n) and _is_ready(n)]
    if ready:
        compute(sorted(ready, key=lambda n: n.serial), "", asked=False)
    pushed: list[tuple[int, torch.Tensor]] | None = None
    if carrier.is_home:
        pushed = [(n.number, n.value.detach()) for n in live if n.number is not None and _is_pushed(n, carrier)]
    by_number = {n.number: n for n in live if n.carrier is not None and n.carrier.ranks == carrier.ranks}
    for number, value in carrier.push(pushed):
        node = by_number.get(number)
        if node is not None:
            node.everywhere = True
            if not carrier.is_home:
                node.value = value


def _is_ready(node: Node) -> bool:
    """Whether all it is made from is there: no model call that has not run, no other rank's parameters, nothing that every rank
    would have to compute."""
    known = is_told if not node.requires_grad else lambda n: False  # what was told has no graph
    for n in topological([node], lambda n: n.done or known(n)):
        waits = n.func in (output_of, foreign) or n.several_homes or n.hooks or n.has_effects
        if (waits and not n.done and not known(n)) or n.graph == "everywhere":
            return False
    return True


def _is_term(node: Node) -> bool:
    return is_small(node) and not node.done and node.carrier is None


def _is_pushed(node: Node, carrier: Carrier) -> bool:
    if (
        not node.done
        or node.everywhere
        or node.at_lanes
        or node.carrier is None
        or home_of(node.carrier) != home_of(carrier)
    ):
        return False
    return isinstance(node.value, torch.Tensor) and is_small(node)


def run_forward(call: Call) -> None:
    """Run a call under no_grad at once: batch norm may learn, and hooks may look on. All ranks call it together."""
    nodes: list[Any] = list(call.nodes)
    carrier = call.carrier
    # Hits that an evaluation counts for later must not keep the logits of every batch.
    waits = bool(uncomputed_at_lanes(carrier))
    flags = ASKS * asks(carrier, nodes) | WAITS_FOR_LANES * waits
    found = meet_with_flags(carrier, "model(x) without gradients", nodes, flags=flags)
    if found & WAITS_FOR_LANES:
        settle_at_lanes(carrier)
    compute(nodes, "", asked=bool(found & ASKS))
