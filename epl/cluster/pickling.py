"""A value as a pickle that stops at every tensor and writes only its number.

Containers (dicts, named tuples, dataclasses, Hugging Face's outputs) so need no code of ours, and no tensor is ever pickled:

    {"x": tensor, "ids": [1, 2]}   →   pickle of {"x": #0, "ids": [1, 2]}   +   [tensor]
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence

import torch

FAILURES = (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError)
"""What Python raises for something that cannot be pickled."""


def dump_around_tensors(value: object) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle, and the tensors in the order of their numbers; one that occurs twice has one number."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors


def load_around_tensors(data: bytes, tensors: Sequence[torch.Tensor | None]) -> object:
    """The value, with these tensors in their places."""
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.tensors = tensors
    return unpickler.load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, found: object) -> int | None:
        if not isinstance(found, torch.Tensor):
            return None
        if id(found) not in self._numbers:
            self._numbers[id(found)] = len(self.tensors)
            self.tensors.append(found)
        return self._numbers[id(found)]


class _Unpickler(pickle.Unpickler):
    tensors: Sequence[torch.Tensor | None]

    def persistent_load(self, number: object) -> torch.Tensor | None:
        assert isinstance(number, int)
        return self.tensors[number]
