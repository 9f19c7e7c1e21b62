"""What this rank has recorded of the models that it computes with others, for comparison with what they have."""

from __future__ import annotations

import threading
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch

from epl import _torch
from epl.data.structure import sample_digest
from epl.graph.spec import Spec, leaves_of

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Carrier


class Journal:
    """How many operations were recorded, and a checksum of them: ranks that recorded different things find out at once."""

    def __init__(self) -> None:
        self.count = 0
        self.checksum = 0
        self.carriers: list[weakref.ref[Carrier]] = []
        """Of the models that these ranks compute together, in the order of their first calls: alike on all of them."""

    def enter(self, carrier: Carrier) -> None:
        """A model is called."""
        if not any(known() is carrier for known in self.carriers):
            self.carriers.append(weakref.ref(carrier))
            theirs = [p for p in carrier.parameters.values() if hasattr(p, "epl_owner")]
            parts = Parts(carrier)
            for parameter in theirs:
                parameter.epl_parts = parts  # type: ignore[attr-defined]

    def note(self, name: str, spec: Any, args: Any, kwargs: Any) -> int:
        """The number of a new entry. Real tensors among its arguments (targets, noise) must be the same everywhere, too."""
        self.count += 1
        shape = spec.shape if isinstance(spec, Spec) else ()
        self.mix(f"{name}{tuple(shape)}")
        if real := _real_operands(args, kwargs):
            self.mix(sample_digest(real))
        return self.count

    def mix(self, text: str) -> None:
        """Let the checksum depend on this too."""
        self.checksum = zlib.crc32(text.encode(), self.checksum)


class Parts:
    """What a parameter of another rank knows of the model that it is in."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = weakref.ref(carrier)
        kept = (p for p in carrier.parameters.values() if not hasattr(p, "epl_owner") or hasattr(p, "epl_lanes"))
        here = (p for p in kept if not p.is_inference())
        self._own = list(dict.fromkeys(here))

    @property
    def carrier(self) -> Carrier | None:
        """Who runs the model; None if it is gone."""
        return self._carrier()

    def changes(self) -> int:
        """How often this rank's own were changed in place. Other ranks' change at the same places of the loop."""
        return sum(map(_torch.version_of, self._own))


class _Journals(threading.local):
    """One journal for each set of ranks that compute a model together: ranks of different replicas record different rows. And for
    each thread: in tests, ranks are threads of one process."""

    def __init__(self) -> None:
        self.by_ranks: dict[tuple[int, ...], Journal] = {}


_journals = _Journals()


def journal(carrier: Carrier) -> Journal:
    """What this rank has recorded of the models that it computes with these ranks."""
    return _journals.by_ranks.setdefault(tuple(carrier.ranks), Journal())


def forget_journal(carrier: Carrier) -> None:
    """Start anew: what was recorded before, maybe differently on some rank, no longer counts."""
    _journals.by_ranks.pop(tuple(carrier.ranks), None)


def _real_operands(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Real tensors that every rank of the replica must have alike: targets, noise.

    Not those that may follow from parameters, of which ranks hold parts: with a graph, made without grad mode, or single numbers (a norm).
    """
    if not torch.is_grad_enabled():
        return []
    found = leaves_of((args, kwargs), torch.Tensor)
    return [t for t in found if type(t) is torch.Tensor and t.numel() > 1 and not (t.requires_grad or t.is_inference())]
