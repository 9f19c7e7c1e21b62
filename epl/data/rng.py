"""Random streams of the loader's own, so that all ranks draw the same order whatever else they draw.

A plain loader draws from the process's generators. Ranks may have seeded these differently, so a divided loader draws
from rank 0's state at that moment instead. `RngStream` keeps such a state aside and puts it in force only while the
sampler or the dataset runs. Of torch's, Python's and numpy's generator, each by itself:

    process's state == the stream's   the draws count for the process too: rank 0, and every rank in step with it,
                                      go on as a plain run does
    otherwise                         the process gets its own state back, untouched
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from epl.data.exchange import Exchange
from epl.errors import DataError


@dataclasses.dataclass(frozen=True)
class RngState:
    """The state of the three generators that samplers and datasets draw from, as values that compare and travel."""

    torch: bytes
    python: tuple[object, ...]
    numpy: tuple[str, bytes, int, int, float]

    @classmethod
    def capture(cls) -> RngState:
        """The state this process is in."""
        name, key, position, has_gauss, gauss = np.random.get_state()  # the legacy form is always this tuple
        legacy = (str(name), np.asarray(key).tobytes(), int(position), int(has_gauss), float(gauss))
        return cls(_generator_bytes(torch.default_generator), random.getstate(), legacy)

    @classmethod
    def seeded(cls, seed: int) -> RngState:
        """The state of a process that has just seeded everything with `seed`."""
        generator = torch.Generator()
        generator.manual_seed(seed)
        words = [seed >> shift & 0xFFFFFFFF for shift in (0, 32)]
        name, key, position, has_gauss, gauss = np.random.RandomState(words).get_state()
        legacy = (str(name), np.asarray(key).tobytes(), int(position), int(has_gauss), float(gauss))
        return cls(_generator_bytes(generator), random.Random(seed).getstate(), legacy)

    def beside(self, own: RngState, other: RngState) -> RngState:
        """This state where `own` and `other` are alike, `own` where they are not: for each generator by itself."""
        names = (field.name for field in dataclasses.fields(self))
        kept = {name: getattr(own, name) for name in names if getattr(own, name) != getattr(other, name)}
        return dataclasses.replace(self, **kept)

    def restore(self) -> None:
        """Put this process into this state."""
        set_generator(torch.default_generator, self.torch)
        random.setstate(self.python)
        name, key, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.frombuffer(key, dtype=np.uint32), position, has_gauss, gauss))


class RngStream:
    """A random stream kept aside from the process's own."""

    def __init__(self, state: RngState) -> None:
        self.state = state

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within, everything draws from this stream."""
        own, start = RngState.capture(), self.state
        if own != start:
            start.restore()
        try:
            yield
        finally:
            self.state = RngState.capture()
            if own != start:  # most users seed torch only: what they seeded alike must go on alike
                self.state.beside(own, start).restore()


def running(stream: RngStream | None) -> contextlib.AbstractContextManager[None]:
    """Within, everything draws from `stream`; None stands for the process's own generators."""
    return contextlib.nullcontext() if stream is None else stream.running()


def rank_zero_stream(loader: DataLoader[object], exchange: Exchange) -> RngStream:
    """A stream that starts where rank 0 is now; generators that belong to the loader are put where rank 0's are."""
    generators = _generators(loader)
    own = (RngState.capture(), [_generator_bytes(g) for g in generators])
    state, states = cast("tuple[RngState, list[bytes]]", exchange.broadcast(own))
    if len(states) != len(generators):
        raise DataError(
            f"expected loaders built alike on every rank, found {len(generators)} torch.Generator(s) in this rank's loader and "
            f"samplers, {len(states)} in rank 0's. Give every rank's loader the same arguments."
        )
    for generator, theirs in zip(generators, states, strict=True):
        set_generator(generator, theirs)
    return RngStream(state)


def draw_base_seed(loader: DataLoader[object]) -> tuple[bytes, int]:
    """The seed a plain loader draws at the start of an epoch, and the state of the generator just before it."""
    generator = loader.generator if loader.generator is not None else torch.default_generator
    before = _generator_bytes(generator)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    return before, seed


def share_seed(base_seed: int, replica: int, part: int) -> int:
    """A seed of its own for every share, so that replicas augment differently; always the same for the same share."""
    text = f"{base_seed}/{replica}/{part}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def set_generator(generator: torch.Generator, state: bytes) -> None:
    """Put a generator into a state captured as bytes."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _generator_bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _generators(loader: DataLoader[object]) -> list[torch.Generator]:
    """The generators that belong to the loader's order: its own, its sampler's, its batch sampler's."""
    batch_sampler = loader.batch_sampler
    owners = (loader, loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
