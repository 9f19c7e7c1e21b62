"""The values an annotation is made of: what was asked for, the TaskGraph it became, and the tag a module carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["replicate", "split"]
Origin = Literal["scope", "default", "annotate"]


@dataclass(frozen=True)
class Annotation:
    """What the user asked for: `replicate` or `split`, over how many devices, under which name (None: by order)."""

    kind: Kind
    device_count: int
    name: str | None = None

    @property
    def strategy(self) -> str:
        """The strategy without its name, as in `replicate(2)`."""
        return f"{self.kind}({self.device_count})"

    @property
    def title(self) -> str:
        """How messages speak of it: `replicate(2) 'stage_0'`, or `replicate(2)` when it has no name."""
        return self.strategy if self.name is None else f"{self.strategy} {self.name!r}"


@dataclass(frozen=True)
class TaskGraph:
    """The identity of one TaskGraph: a value, so that a copied or unpickled model still belongs to the same one."""

    name: str
    kind: Kind
    device_count: int
    index: int
    """Order of creation."""
    session: str
    """Which `epl.init` it was made under: the same name before and after a reset is not the same TaskGraph."""

    @property
    def strategy(self) -> str:
        """Its strategy, as in `replicate(2)`."""
        return f"{self.kind}({self.device_count})"

    @property
    def title(self) -> str:
        """How messages speak of it: `replicate(2) 'stage_0'`."""
        return f"{self.strategy} {self.name!r}"


@dataclass(frozen=True)
class Tag:
    """The mark on a module, parameter or buffer: its TaskGraph, and by what kind of annotation it got there."""

    taskgraph: TaskGraph
    by: Origin

    @property
    def explicit(self) -> bool:
        """Whether the user pointed at this very thing; a default only takes what nothing else covers."""
        return self.by != "default"
