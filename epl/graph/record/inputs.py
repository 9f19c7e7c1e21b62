"""The inputs of one model call, without their numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from epl.cluster.pickling import load_around_tensors
from epl.errors import RecordingError
from epl.graph.record.objects import dump
from epl.graph.record.shapes import Form
from epl.graph.record.tree import freeze, skeleton
from epl.graph.spec import Spec
from epl.graph.unbatched import is_unbatched


class _Object(NamedTuple):
    data: bytes
    tensors: tuple[int, ...]


class Inputs:
    """Specs of the tensors, and everything else as it is; equal `key`s are recorded alike."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], spec_of: Callable[[torch.Tensor], Spec]) -> None:
        leaves, self._fill = skeleton((args, kwargs))
        self.tensors: list[torch.Tensor] = []
        """Each once, in order."""
        self._leaves: list[int | _Object] = []
        numbers: dict[int, int] = {}

        def number(tensor: torch.Tensor) -> int:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
            return numbers[id(tensor)]

        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._leaves.append(number(leaf))
            elif isinstance(leaf, (numpy.ndarray, numpy.generic)):
                raise RecordingError(
                    f"the model is given a numpy array of shape {leaf.shape}, which cannot be cut into micro batches: give it a "
                    "tensor, torch.as_tensor(array)"
                )
            else:
                data, inside = dump(leaf)
                self._leaves.append(_Object(data, tuple(map(number, inside))))
        self.specs = tuple(spec_of(tensor) for tensor in self.tensors)
        self.unbatched = tuple(is_unbatched(tensor) for tensor in self.tensors)
        remaining = iter(self._leaves)
        around = freeze((args, kwargs), lambda leaf: next(remaining))
        self.key: Hashable = (around, self.specs, self.unbatched)
        self.form: Hashable = (around, tuple(map(Form.of, self.specs)), self.unbatched)
        """What of it does not change with the sizes of the tensors."""

    @property
    def rows(self) -> int | None:
        """The length of the batch: of the first tensor that has dims and is not marked as unbatched."""
        for spec, unbatched in zip(self.specs, self.unbatched, strict=True):
            if spec.shape and not unbatched:
                return spec.shape[0]
        return None

    def candidates(self, rows: int) -> tuple[bool, ...]:
        """For every tensor, whether it may carry a batch of so many rows."""
        return tuple(
            bool(spec.shape) and spec.shape[0] == rows and not unbatched
            for spec, unbatched in zip(self.specs, self.unbatched, strict=True)
        )

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) around other tensors; objects are made afresh."""
        args, kwargs = self._fill([_put(leaf, tensors) for leaf in self._leaves])
        return args, kwargs

    def shapes(self, is_cut: Sequence[bool], rows: int) -> tuple[torch.Size, ...]:
        """The shapes of the tensors, with so many rows in those that carry the batch."""
        return tuple(
            torch.Size([rows, *spec.shape[1:]]) if cut else spec.shape
            for spec, cut in zip(self.specs, is_cut, strict=True)
        )

    def release(self) -> None:
        """Let go of the tensors: a recording is kept longer than they should live."""
        self.tensors = []


def _put(leaf: int | _Object, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(leaf, int):
        return tensors[leaf]
    return load_around_tensors(leaf.data, [tensors[number] for number in leaf.tensors])
