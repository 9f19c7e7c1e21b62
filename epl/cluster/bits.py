"""A set of bits as numbers that tensors can carry."""

from __future__ import annotations

from collections.abc import Sequence

NUMBERS = 6  # int64 each, of which 63 bits are used


def pack_bits(bits: int) -> list[int]:
    """The bits in `NUMBERS` numbers."""
    assert 0 <= bits < 1 << (63 * NUMBERS), "more bits than a word carries"
    return [(bits >> (63 * n)) & ((1 << 63) - 1) for n in range(NUMBERS)]


def unpack_bits(numbers: Sequence[int]) -> int:
    """What `pack_bits` was given."""
    return sum(number << (63 * n) for n, number in enumerate(numbers))
