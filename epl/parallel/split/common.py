"""The random stream that the ranks of a split have in common: what all of them compute, they must draw alike.

Users may seed ranks unlike, or not at all, and code that only one rank runs may draw. So the stream is kept aside, and put in force
while a split part runs. It starts as the first rank's, at the first call:

    process's state == the stream's   what the part draws counts for the process too, as on one device
    otherwise                         the process gets its own state back, untouched

Where the user's code has drawn since the last call, on all ranks alike, the stream goes on from there: ranks tell each other in the
word that they exchange at every call anyway. Only a rank whose state has changed has to wait for that, before it computes. In a stage it is
never started: every micro batch has a stream of its own already (train/cut/stream.py).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch

State = tuple[torch.Tensor, ...]


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Those that code draws from which computes on this device."""
    found = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


class CommonStream:
    """Of one rank of a split. Until `start` parts draw from the process's own generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state: State | None = None
        self._seen: State = ()
        """Where the process was when it was looked at last."""
        self._in_force = False

    def start(self, from_first: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Begin where the first rank is; `from_first` gives its tensor for this one's, and all ranks call it together."""
        self._seen = self._now()
        self._state = tuple(map(from_first, self._seen))

    def word(self) -> int:
        """For ranks to tell each other at a call: 0, or a digest of the state that the process is in since the last call."""
        now = self._now()
        if self._state is None or _same(now, self._seen):
            return 0
        self._seen = now
        digest = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in now), digest_size=7).digest()
        return int.from_bytes(digest, "little") << 1 | 1

    def hear(self, words: Sequence[int]) -> None:
        """What the ranks of the split said. With a word that is not 0 the parts of the call wait for this."""
        if words[0] and len(set(words)) == 1:
            self._state = self._seen

    def saved(self) -> State | None:
        """Where it is now, to be put back by `restore`."""
        return self._state

    def restore(self, state: State | None) -> None:
        """Go on from there."""
        self._state = state

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, torch draws from this stream."""
        if self._state is None or self._in_force:
            yield
            return
        own, start = self._now(), self._state
        in_step = _same(own, start)
        if not in_step:
            self._set(start)
        self._in_force = True
        try:
            yield
        finally:
            self._in_force = False
            self._state = self._now()
            if not in_step:
                self._set(own)
            elif _same(own, self._seen):  # else the user's code has drawn, which the next word is to tell
                self._seen = self._state

    def _now(self) -> State:
        return tuple(generator.get_state() for generator in generators_of(self._device))

    def _set(self, state: State) -> None:
        for generator, each in zip(generators_of(self._device), state, strict=True):
            generator.set_state(each)


def _same(one: State, other: State) -> bool:
    return all(map(torch.equal, one, other))
