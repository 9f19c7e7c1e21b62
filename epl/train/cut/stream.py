"""Random numbers inside stages.

What a stage draws (dropout) must not move the random stream of the loop: only the rank that has the stage would move it, and noise
that the loop draws next would differ between the ranks of a replica. So every micro batch of a stage draws from a stream of its own.
Its seed follows from the call, the stage and the first row: alike on ranks that compute the same rows (the lanes of a split
stage), whatever the schedule.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch

from epl.parallel.split.common import generators_of


@contextlib.contextmanager
def own_stream(device: torch.device, *seeds: int) -> Iterator[None]:
    """Inside, torch draws from a stream with this seed; afterwards it goes on as before."""
    digest = hashlib.blake2b(repr(seeds).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    generators = generators_of(device)
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
