"""Parameters of parts under `split`, from their construction to the first call: how they are filled, but not their numbers.

    with epl.split(4):
        self.head = nn.Linear(256, 1_000_000)        # 1 GB, and no rank ever has it whole

    deferred_block(head.weight, layout, rank)        # a quarter of it, bit by bit as if cut out of the whole

Large tensors that are made in such a scope (`scope.py`, `factories.py`) are `DeferredTensor`s: they have a `Recipe` instead of
memory. What cannot be written down builds the whole, with a notice, and is right all the same (`operations.py`).
"""

from __future__ import annotations

from epl.graph.deferred.block import defer_meta, deferred_block, is_deferred, materialise_whole, settle_block
from epl.graph.deferred.scope import Deferring
from epl.graph.deferred.tensor import DeferredTensor

__all__ = [
    "DeferredTensor",
    "Deferring",
    "defer_meta",
    "deferred_block",
    "is_deferred",
    "materialise_whole",
    "settle_block",
]
