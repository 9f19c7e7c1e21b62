"""What a call returns at sizes it has not been made at, from the sizes it has.

To learn a shape from fake tensors takes up to a millisecond for one torch call and tens of them for a layer, at every new
length, and a stream of changing lengths brings many. So each such call is an observation: the sizes that go in, the sizes
that come out. A rule is drawn only if every size that comes out has always been the same, or always equal to one that goes
in, to that plus or times a number, or to a product of two. It is used only between sizes that were observed (three
different ones at least), and for multiples of what all of those are multiples of: a length that is capped, padded or halved
does not fit. At run time what every module returns is compared with what was recorded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from epl.graph.spec import Spec

ENOUGH = 3
"""Different sizes from which a law may be drawn."""
_MANY = 64
"""Observations that are kept of one kind of call."""


class _Dense(NamedTuple):
    """Dims from the innermost to the outermost; those that are left out are expanded."""

    order: tuple[int, ...]
    gaps: tuple[int, ...] = ()
    """By how much each of them is longer in memory, if any is: of `x[:, :-1]`, by one in dim 1."""


class Form(NamedTuple):
    """What of a spec does not change with its sizes."""

    ndim: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: Hashable
    """The order of the dims in memory, or the strides themselves if there are gaps."""

    @staticmethod
    def of(spec: Spec) -> Form:
        """The form of a spec."""
        return Form(len(spec.shape), spec.dtype, spec.device, spec.requires_grad, _layout(spec.shape, spec.stride))

    def at(self, sizes: Sequence[int]) -> Spec | None:
        """The spec of this form with other sizes; None if its strides cannot be told."""
        if not isinstance(self.layout, _Dense):
            return None
        strides, step = [0] * self.ndim, 1
        for dim, gap in zip_longest(self.layout.order, self.layout.gaps, fillvalue=0):
            strides[dim], step = step, step * max(sizes[dim] + gap, 1)
        return Spec(torch.Size(sizes), tuple(strides), self.dtype, self.device, self.requires_grad)


@functools.lru_cache(10_000)
def _layout(shape: torch.Size, stride: tuple[int, ...]) -> Hashable:
    if len(stride) != len(shape):
        return "sparse"
    dims = [d for d in reversed(range(len(shape))) if stride[d] != 0 or shape[d] == 1]
    # Of a dim of size 1 the stride means nothing: it must not say where the dim is, or equal tensors would have two forms.
    long = sorted((d for d in dims if shape[d] != 1), key=lambda d: stride[d])
    for order in (dims, [*long, *(d for d in dims if shape[d] == 1)]):
        gaps = _gaps(shape, stride, order)
        if gaps is not None:
            return _Dense(tuple(order), gaps if any(gaps) else ())
    return stride


def _gaps(shape: torch.Size, stride: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...] | None:
    """By how much each dim in this order is longer in memory than in the tensor; None if the order is another one."""
    gaps = [0] * len(order)
    step, inner = 1, -1  # of the last dim that has a stride; its place in the order
    for place, dim in enumerate(order):
        if shape[dim] == 1:
            continue
        if inner < 0:
            if stride[dim] != 1:
                return None
        else:
            length, rest = divmod(stride[dim], step)
            size = max(shape[order[inner]], 1)
            if rest or length < size:
                return None
            gaps[inner] = length - size
        step, inner = stride[dim], place
    return tuple(gaps)


_Column = tuple[int, ...]
_Law = Callable[[Sequence[int]], int]
"""From the values of the columns to a size."""


class Rule:
    """The observations of one kind of call."""

    def __init__(self, forms: tuple[Form, ...], around: Hashable) -> None:
        """`forms`: of what comes out. `around`: what else comes out, which must not change with the sizes."""
        self._forms, self._around = forms, around
        self._inputs: list[tuple[int, ...]] = []
        self._outputs: list[tuple[int, ...]] = []
        self._broken = False
        self._laws: list[_Law] | None = None
        self._columns: dict[_Column, int] = {}
        self._places: list[int] = []

    def observe(self, inputs: tuple[int, ...], outputs: Sequence[Spec], around: Hashable) -> None:
        """Note a call: the sizes that went in, and what came out."""
        if self._around != around or self._forms != tuple(Form.of(spec) for spec in outputs):
            self._broken = True
        elif not self._broken and inputs not in self._inputs and len(self._inputs) < _MANY:
            self._inputs.append(inputs)
            self._outputs.append(tuple(size for spec in outputs for size in spec.shape))
            self._draw()

    def predict(self, inputs: tuple[int, ...]) -> list[Spec] | None:
        """The specs that would come out; None if that does not follow from the observations."""
        if self._broken or self._laws is None:
            return None
        values: list[int | None] = [None] * len(self._columns)
        for place, value in zip(self._places, inputs, strict=True):
            if values[place] is None:
                values[place] = value
            elif values[place] != value:
                return None
        known = [value for value in values if value is not None]
        if not all(map(_is_between, self._columns, known)):
            return None
        sizes = iter([law(known) for law in self._laws])
        specs = [form.at([next(sizes) for _ in range(form.ndim)]) for form in self._forms]
        return [spec for spec in specs if spec is not None] if None not in specs else None

    def _draw(self) -> None:
        """Find the law of every size that comes out."""
        self._columns, self._places, self._laws = {}, [], None
        for column in zip(*self._inputs, strict=True):
            self._places.append(self._columns.setdefault(column, len(self._columns)))
        laws = [law_of(column, list(self._columns)) for column in zip(*self._outputs, strict=True)]
        if all(law is not None for law in laws):
            self._laws = [law for law in laws if law is not None]


@functools.lru_cache(10_000)
def _is_between(column: _Column, value: int) -> bool:
    if value in column:
        return True
    seen = set(column)
    return len(seen) >= ENOUGH and min(seen) < value < max(seen) and value % math.gcd(*seen) == 0


def law_of(out: _Column, columns: Sequence[_Column]) -> _Law | None:
    """How a size follows from others, by what they have been together; None if it does not."""
    if len(set(out)) == 1:
        return lambda values: out[0]
    if out in columns:
        place = columns.index(out)
        return lambda values: values[place]
    for place, column in enumerate(columns):
        difference = out[0] - column[0]
        if all(o - c == difference for o, c in zip(out, column, strict=True)):
            return functools.partial(_plus, place, difference)
        if column[0] and out[0] % column[0] == 0:
            factor = out[0] // column[0]
            if all(o == c * factor for o, c in zip(out, column, strict=True)):
                return functools.partial(_times, place, factor)
    varied = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    for first in varied:
        for second in varied:
            if all(o == a * b for o, a, b in zip(out, columns[first], columns[second], strict=True)):
                return functools.partial(_product, first, second)
    return None


def _plus(place: int, number: int, values: Sequence[int]) -> int:
    return values[place] + number


def _times(place: int, number: int, values: Sequence[int]) -> int:
    return values[place] * number


def _product(first: int, second: int, values: Sequence[int]) -> int:
    return values[first] * values[second]
