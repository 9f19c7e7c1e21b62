"""What planning needs to know of a recorded forward: its nodes as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NodeKind = Literal["leaf", "glue", "packing", "input", "parameter", "constant"]
"""What a node is:

leaf        a module called as a whole
glue        a torch call between leaves, or an object made afresh
packing     values put together for one consumer; what travels is the values, so it is done beside the consumer
input       a tensor of the model call, or another value that every rank of a replica has
parameter   one that glue uses
constant    a buffer or another tensor that glue uses
"""


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """One step of a recorded forward."""

    index: int
    """Its place in the order of execution."""
    kind: NodeKind
    name: str
    """Module path, function, parameter or input: what messages call it."""
    taskgraph: str | None = None
    inputs: tuple[int, ...] = ()
    effect_on: int | None = None
    """The node whose value it changes in place."""
    views: tuple[int, ...] = ()
    """Those of its inputs whose memory its value shares."""
    random: bool = False
    """Whether it draws random numbers."""
    kept: bool = False
    """Whether it is carried out for what it does beside its value, which nobody may use."""
    parameters: tuple[str, ...] = ()
    """What it uses; a parameter shared by several modules always by the same name."""
    buffers: tuple[str, ...] = ()
    where: str = ""
    """The user's line that wrote it, `file:line`."""

    @property
    def is_everywhere(self) -> bool:
        """Whether it is there on every rank without being computed: an input, a constant."""
        return self.kind in ("input", "constant")

    @property
    def title(self) -> str:
        """How messages speak of it: `'decoder.norm' (train.py:12)`."""
        return f"{self.name!r} ({self.where})" if self.where else repr(self.name)
