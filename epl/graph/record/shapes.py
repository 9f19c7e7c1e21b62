"""What a module returns at a size it has not been run at, from the sizes it has.

Running a layer on fake tensors takes tens of milliseconds at every new length, and a stream of changing lengths brings
many. So each run is an observation: the sizes that go in, the sizes that come out. A rule is drawn only if every size that
comes out has always been the same, or always equal to one that goes in, and it is used only between sizes that were
observed (three different ones at least), and for multiples of what all of those are multiples of: a length that is capped,
padded or halved does not fit. At run time every result is compared with what was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from epl.graph.spec import Spec

_ENOUGH = 3


class Form(NamedTuple):
    """What of a spec does not change with its sizes."""

    ndim: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: Hashable

    @staticmethod
    def of(spec: Spec) -> Form:
        """The form; its layout is the order of the dims in memory, or the strides themselves if there are gaps."""
        return Form(len(spec.shape), spec.dtype, spec.device, spec.requires_grad, _layout(spec))

    def at(self, sizes: Sequence[int]) -> Spec | None:
        """The spec of this form with other sizes; None if its strides cannot be told."""
        if not isinstance(self.layout, _Dense):
            return None
        strides, step = [0] * self.ndim, 1
        for dim in self.layout.order:
            strides[dim], step = step, step * max(sizes[dim], 1)
        return Spec(torch.Size(sizes), tuple(strides), self.dtype, self.device, self.requires_grad)


class _Dense(NamedTuple):
    """Dims from the innermost to the outermost; those that are left out are expanded."""

    order: tuple[int, ...]


def _layout(spec: Spec) -> Hashable:
    if len(spec.stride) != len(spec.shape):
        return "sparse"
    dims = [d for d in reversed(range(len(spec.shape))) if spec.stride[d] != 0 or spec.shape[d] == 1]
    for order in (dims, sorted(dims, key=lambda d: spec.stride[d])):
        if _is_dense(spec, order):
            return _Dense(tuple(order))
    return spec.stride


def _is_dense(spec: Spec, order: Sequence[int]) -> bool:
    step = 1
    for dim in order:
        if spec.shape[dim] != 1:  # of a dim of size 1 the stride means nothing
            if spec.stride[dim] != step:
                return False
            step *= max(spec.shape[dim], 1)
    return True


class Rule:
    """The observations of one kind of call."""

    def __init__(self) -> None:
        self._inputs: list[tuple[int, ...]] = []
        self._outputs: list[tuple[tuple[int, ...], ...]] = []
        self._forms: tuple[Form, ...] | None = None
        self._around: Hashable = None
        self._broken = False

    def observe(self, inputs: tuple[int, ...], outputs: Sequence[Spec], around: Hashable) -> None:
        """Note a run: the sizes that went in, the specs that came out, and what else came out around them."""
        forms = tuple(Form.of(spec) for spec in outputs)
        if self._forms is not None and (self._forms, self._around) != (forms, around):
            self._broken = True
        if not self._broken and inputs not in self._inputs:
            self._forms, self._around = forms, around
            self._inputs.append(inputs)
            self._outputs.append(tuple(tuple(spec.shape) for spec in outputs))

    def predict(self, inputs: tuple[int, ...]) -> list[Spec] | None:
        """The specs that would come out; None if that does not follow from the observations."""
        if self._broken or self._forms is None:
            return None
        columns: dict[tuple[int, ...], int] = {}
        for column, value in zip(zip(*self._inputs, strict=True), inputs, strict=True):
            if columns.setdefault(column, value) != value or not _is_between(column, value):
                return None
        specs = []
        for index, form in enumerate(self._forms):
            sizes = []
            for dim in range(form.ndim):
                column = tuple(outputs[index][dim] for outputs in self._outputs)
                size = columns.get(column, column[0] if len(set(column)) == 1 else None)
                if size is None:
                    return None
                sizes.append(size)
            spec = form.at(sizes)
            if spec is None:
                return None
            specs.append(spec)
        return specs


def _is_between(column: tuple[int, ...], value: int) -> bool:
    seen = set(column)
    if value in seen:
        return True
    return len(seen) >= _ENOUGH and min(seen) < value < max(seen) and value % math.gcd(*seen) == 0
