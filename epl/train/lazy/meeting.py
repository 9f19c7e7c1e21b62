"""How ranks make sure that they are at the same place of the program before they wait for each other."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from epl.train.lazy.journal import journal
from epl.train.lazy.node import Node, foreign, topological

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Carrier

ASKS = 1
"""Home needs numbers of parameters that live elsewhere."""
HOLDS_OUTPUTS = 2
"""The loop still holds outputs of the model, or what it has written down of them."""
WAITS_FOR_LANES = 4
"""The loop holds something that is not computed, of values that the lanes of a split stage have parts of."""


def meet(carrier: Carrier, kind: str, nodes: Sequence[Node], *words: object, ask: bool = False) -> bool:
    """Whether any rank asks; raises unless all ranks have recorded the same and are about to do the same with it."""
    return bool(meet_with_flags(carrier, kind, nodes, *words, flags=ASKS * ask) & ASKS)


def meet_with_flags(carrier: Carrier, kind: str, nodes: Sequence[Node], *words: object, flags: int) -> int:
    """What holds on any rank of the replica; raises as `meet` does."""
    text = f"{journal(carrier).checksum} {[node.number for node in nodes]} {words}"
    return carrier.agree(kind, zlib.crc32(text.encode()), flags)


def carriers_of(nodes: Iterable[Node]) -> list[Carrier]:
    """The carriers of these nodes, each once, in the order in which the loop met them."""
    found = sorted((n for n in nodes if n.carrier is not None), key=lambda n: n.serial)
    return list(dict.fromkeys(n.carrier for n in found if n.carrier is not None))


def asks(carrier: Carrier, nodes: Sequence[Node]) -> bool:
    """Whether home needs numbers of parameters that live elsewhere, as far as this rank can see.

    Home sees all of them; another rank sees all but its own, and it alone may be the one that home needs.
    """
    waiting = [n for n in topological(nodes) if not n.done and n.carrier is None]
    for node in waiting:
        node.check_parameters()
    owners = {n.args[0].epl_owner for n in waiting if n.func is foreign}
    return bool(owners) and (carrier.is_home or owners != {carrier.home})
