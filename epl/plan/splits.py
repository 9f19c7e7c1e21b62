"""How the parts of a model are split, as a plan lists it: which parameter is cut where and why, and what is sent for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from epl.plan.table import compact_paths, size, table


@dataclass(frozen=True)
class ParameterCut:
    """One parameter of a part."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    how: str
    """As `dim 0: 8 heads of 64`, or `whole`: every rank has all of it."""
    why: str


@dataclass(frozen=True)
class Sent:
    """Something that travels in every step: what kind of collective, how many bytes, why."""

    what: str
    """As `all-reduce` or `backward all-gather`; without `backward` it is sent in forward."""
    nbytes: int
    why: str

    @property
    def is_backward(self) -> bool:
        """Whether it is sent in backward."""
        return self.what.startswith("backward")


@dataclass(frozen=True)
class PartSplit:
    """How one part is split over its ranks."""

    part: str
    """A TaskGraph, or a module; empty: the whole model."""
    ways: int
    parameters: tuple[ParameterCut, ...]
    sent: tuple[Sent, ...]
    """In one forward and backward of the rows that it was planned for."""

    def describe(self) -> str:
        """A line and two tables: parameters, and what is sent. Repeated layers that are cut alike have one row."""
        texts = [f"{self.part}, split over {self.ways} ranks:" if self.part else f"split over {self.ways} ranks:"]
        rows = [("parameter", "shape", "cut", "why")]
        for names, cut in _alike(self.parameters):
            rows.append((names, str(cut.shape), cut.how, cut.why))
        texts.append(table(rows))
        if self.sent:
            sent = [("sent", "times", "bytes each", "why")]
            for event, times in Counter(self.sent).items():
                sent.append((event.what, str(times), size(event.nbytes), event.why))
            texts += ["", table(sent, right=(1, 2))]
        return "\n".join(texts)


def _alike(parameters: Sequence[ParameterCut]) -> list[tuple[str, ParameterCut]]:
    """Parameters that are cut alike and whose names differ in a number only, together; in order of the first of each kind."""
    kinds: dict[tuple[tuple[int, ...], str, str], dict[str, ParameterCut]] = {}
    for cut in parameters:
        kinds.setdefault((cut.shape, cut.how, cut.why), {})[cut.name] = cut
    place = {cut.name: n for n, cut in enumerate(parameters)}
    found = [(text, each[first]) for each in kinds.values() for text, first in compact_paths(list(each))]
    return sorted(found, key=lambda row: place[row[1].name])
