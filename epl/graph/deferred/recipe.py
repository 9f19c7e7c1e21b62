"""How the numbers of a tensor come about, so that any piece of it can be made without the rest, bit by bit as one device makes it.

What torch's kernels for the CPU do, and what the canary tests hold them to:

    uniform_, random_, …   draw element by element, in order
    normal_                16 elements from 16 uniform numbers; if the size is no multiple of 16, then the last 16 once more
    arithmetic             an element's result depends on nothing but the element
    erfinv_                the same; it is aligned all the same, since vector and remainder are different code

So a draw may be made in pieces that begin at multiples of 16 and end in one of at least 16. The generator's state is kept at
the beginning of each, and a rank draws only the pieces that it needs a part of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from epl import _torch
from epl.errors import StateError
from epl.graph.deferred.place import Place

PIECE = 1 << 19
"""Elements that are made at once; a multiple of ALIGNMENT. For each, a draw keeps a state of 5 KB."""

ALIGNMENT = 1024
"""Pieces begin at multiples of this, and end there or where the tensor ends: more than any vector register holds."""

Call = Callable[..., Any]


class Step(Protocol):
    """Something that was done in place."""

    @property
    def place(self) -> Place:
        """What it changes."""

    @property
    def reads(self) -> bool:
        """Whether it needs what was there before."""

    def apply(self, piece: torch.Tensor, start: int, memo: Memo) -> None:
        """Do it to the elements from `start` on, which are in `piece`."""


class Memo:
    """What was made last, while a tensor is made piece by piece.

    By draws: the next rows often begin within the piece that these end in. By recipes: an expression may need one several times.
    """

    def __init__(self) -> None:
        self.draws: dict[Draw, tuple[int, torch.Tensor]] = {}
        self.recipes: dict[Recipe, tuple[int, int, torch.Tensor]] = {}


@dataclass(frozen=True, eq=False)
class Recipe:
    """All that was done to a tensor's memory, in order. It never changes: `then` gives a longer one."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    source: Derived | None = None
    """What is there before the first step; nothing (zeros) if None."""
    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> Recipe:
        """This, and then the step; what it overwrites is forgotten."""
        if not step.reads and step.place.in_one_piece and step.place.sizes == (self.numel,):
            return replace(self, source=None, steps=(step,))
        return replace(self, steps=(*self.steps, step))

    def numbers(self, start: int, stop: int, memo: Memo | None = None) -> torch.Tensor:
        """The elements `start:stop`, flat, as memory of their own."""
        memo = Memo() if memo is None else memo
        low, high = start // ALIGNMENT * ALIGNMENT, min(self.numel, -(-stop // ALIGNMENT) * ALIGNMENT)
        with torch.no_grad():
            if self.source is not None:
                piece = self.source.numbers(low, high, memo)
            else:
                piece = torch.zeros(high - low, dtype=self.dtype, device=self.device)
            for step in self.steps:
                step.apply(piece, low, memo)
        return piece[start - low : stop - low]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """`start:stop` in parts that are best made one by one."""
        while start < stop:
            end = min(stop, (start // PIECE + 1) * PIECE)
            yield start, end
            start = end

    def write(self, start: int, out: torch.Tensor, memo: Memo) -> None:
        """Fill `out`, flat, with the elements from `start` on."""
        for low, high in self.pieces(start, start + out.numel()):
            out[low - start : high - start] = self.numbers(low, high, memo)

    def whole(self) -> torch.Tensor:
        """All elements, flat."""
        found = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.write(0, found, Memo())
        return found


@dataclass(frozen=True, eq=False)
class Origin:
    """The elements of a tensor, as they were, from `offset` on."""

    recipe: Recipe
    offset: int

    def numbers(self, start: int, stop: int, memo: Memo) -> torch.Tensor:
        """The elements `start:stop`, flat; to be read only."""
        low, high, found = memo.recipes.get(self.recipe, (0, 0, None))
        first, last = self.offset + start, self.offset + stop
        if found is None or first < low or last > high:
            memo.recipes.pop(self.recipe, None)
            low, high, found = first, last, self.recipe.numbers(first, last, memo)
            memo.recipes[self.recipe] = low, high, found
        return found[first - low : last - low]


@dataclass(frozen=True, eq=False)
class Derived:
    """Elements that were computed one by one from those of other tensors: `torch.randn(…) * 0.02`, `.to(torch.bfloat16)`."""

    operation: Call
    args: tuple[Any, ...]
    """With an `Origin` for each tensor."""
    kwargs: dict[str, Any] = field(default_factory=dict)

    def numbers(self, start: int, stop: int, memo: Memo) -> torch.Tensor:
        """The elements `start:stop`, flat, as memory of their own."""
        args = (x.numbers(start, stop, memo) if isinstance(x, Origin) else x for x in self.args)
        made: torch.Tensor = self.operation(*args, **self.kwargs)
        return made


@dataclass(frozen=True, eq=False)
class Change:
    """An operation with numbers only: `fill_(0)`, `mul_(2)`."""

    place: Place
    operation: Call
    args: tuple[Any, ...]
    reads: bool

    def apply(self, piece: torch.Tensor, start: int, memo: Memo) -> None:
        """See `Step`."""
        self.place.change(piece, start, lambda view: self.operation(view, *self.args))


@dataclass(frozen=True, eq=False)
class Draw:
    """Random numbers, with the generator's state at the beginning of each piece."""

    place: Place
    operation: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: tuple[torch.Tensor, ...]
    size: int
    reads: bool = False

    @staticmethod
    def now(place: Place, dtype: torch.dtype, operation: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        """Draw, piece by piece, and keep nothing but how: the generator has moved as far as on one device."""
        kwargs = dict(kwargs)
        generator = kwargs.pop("generator", None) or torch.default_generator
        size, states = PIECE, []
        bounds = list(_bounds(place.sizes[0], size))
        room = torch.empty(max(last - first for first, last in bounds), dtype=dtype, device="cpu")
        for first, last in bounds:
            states.append(generator.get_state())
            operation(room[: last - first], *args, generator=generator, **kwargs)
        return Draw(place, operation, args, kwargs, tuple(states), size)

    def apply(self, piece: torch.Tensor, start: int, memo: Memo) -> None:
        """See `Step`."""
        first, last = max(self.place.first, start), min(self.place.last, start + piece.numel())
        while first < last:
            number = min((first - self.place.first) // self.size, len(self.states) - 1)
            begin = self.place.first + number * self.size
            drawn = self._piece(number, piece.dtype, memo)
            end = min(last, begin + drawn.numel())
            piece[first - start : end - start] = drawn[first - begin : end - begin]
            first = end

    def _piece(self, number: int, dtype: torch.dtype, memo: Memo) -> torch.Tensor:
        known, drawn = memo.draws.get(self, (-1, None))
        if drawn is None or known != number:
            memo.draws.pop(self, None)
            length = self.place.sizes[0]
            last = length if number == len(self.states) - 1 else (number + 1) * self.size
            generator = torch.Generator("cpu")
            generator.set_state(self.states[number])
            drawn = torch.empty(last - number * self.size, dtype=dtype, device="cpu")
            self.operation(drawn, *self.args, generator=generator, **self.kwargs)
            memo.draws[self] = number, drawn
        return drawn


def _bounds(length: int, size: int) -> Iterator[tuple[int, int]]:
    count = max(1, length // size)
    for number in range(count):
        yield number * size, length if number == count - 1 else (number + 1) * size


@dataclass(frozen=True, eq=False)
class Copy:
    """Numbers of another tensor without memory, as it was then."""

    place: Place
    origin: Origin
    reads: bool = False

    def apply(self, piece: torch.Tensor, start: int, memo: Memo) -> None:
        """See `Step`."""
        first, last = max(self.place.first, start), min(self.place.last, start + piece.numel())
        if first < last:
            begin = self.place.first
            piece[first - start : last - start] = self.origin.numbers(first - begin, last - begin, memo)


class Loaded:
    """Numbers of a tensor that has memory: a loaded state. They are not copied (a file that is mapped is not read)."""

    reads = False

    def __init__(self, place: Place, source: torch.Tensor) -> None:
        self.place = place
        self._source = source.detach()
        self._version, self._sample = _torch.version_of(self._source), _sample(self._source)

    def apply(self, piece: torch.Tensor, start: int, memo: Memo) -> None:
        """See `Step`."""
        # `source.data.zero_()` leaves no trace in the version.
        if _torch.version_of(self._source) != self._version or not _alike(_sample(self._source), self._sample):
            raise StateError(
                f"a tensor of shape {tuple(self._source.shape)} was loaded into a part under epl.split, whose parameters get their memory "
                "at the first call, and was changed since then: leave it as it is until then, or load a copy of it "
                "(load_state_dict({name: tensor.clone(), …}))"
            )
        first, last = max(self.place.first, start), min(self.place.last, start + piece.numel())
        if first < last:
            flat = self._source.view(-1)
            piece[first - start : last - start] = flat[first - self.place.first : last - self.place.first]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    return flat[:: max(1, flat.numel() // 1024)].clone()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())
