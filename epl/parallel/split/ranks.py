"""The ranks of a split, as split values see them: a few collectives. Planning, threads in tests and c10d each have their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import functional

from epl import _torch
from epl.cluster.place import user_place
from epl.cluster.standstill import Standstill
from epl.parallel.split.common import CommonStream, State
from epl.parallel.split.region import region

Op = Literal["sum", "max"]
_SUMMING, _GATHERING, _EXCHANGING = (
    f"{doing} over the ranks of a split" for doing in ("summing", "gathering", "exchanging")
)
SWAPPED = 1 << 21
"""Bytes up to which two ranks on Gloo swap what they have instead of running its all-reduce: as many bytes in one round
instead of two, and where ranks have as many cores as threads a round costs a millisecond, whatever its size."""


class SplitRanks:
    """The k ranks that divide the parameters of a split; every one of them makes the same calls in the same order."""

    plan = False
    """Whether nothing is sent and everything counted (see choose/)."""
    call: Any = None
    """The call of the model that runs, or the micro batch, where ranks have rows of their own (epl/train/split/ownrows.py)."""
    refused = ""
    """Why rows of all ranks cannot be put together in the part that runs; empty if they can."""

    def __init__(self, rank: int, ways: int, device: torch.device | None = None) -> None:
        self.rank, self.ways = rank, ways
        self.generator = torch.Generator(device or "cpu").manual_seed(1_000_003 * (rank + 1))
        """Random numbers of this rank alone, for what is cut."""
        self.common = CommonStream(device or torch.device("cpu"))
        """Those of all ranks, for what is whole."""

    def streams(self) -> tuple[torch.Tensor, State | None]:
        """Where both random streams are now."""
        return self.generator.get_state(), self.common.saved()

    def set_streams(self, streams: tuple[torch.Tensor, State | None]) -> None:
        """Put them there again."""
        self.generator.set_state(streams[0])
        self.common.restore(streams[1])

    def note(self, what: str, size: int, why: str) -> None:
        """Something of so many bytes is about to be sent; only planning listens."""

    def refine(self, wishes: Sequence[Any]) -> None:
        """A rule cannot keep a cut and says how it would have to be; only planning listens."""

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        """`tensor`, contiguous, with the sum (or maximum) over all ranks in it."""
        raise NotImplementedError

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, contiguous, in memory of its own."""
        return self.all_reduce_(tensor.clone(memory_format=torch.contiguous_format))

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all ranks of what they have for this one, where `parts` is what this one has for each; of any lengths."""
        own = parts[self.rank].shape
        first, *others = self.all_to_all(parts, [own] * self.ways)
        total = (
            first.clone() if not others else first + others[0]
        )  # not in place: it would keep the memory of all of them
        for other in others[1:]:
            total += other
        return total

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int], dim: int) -> list[torch.Tensor]:
        """The blocks of all ranks, of these lengths along `dim`."""
        raise NotImplementedError

    def all_to_all(self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """What every rank has for this one, of these shapes, where `parts` is what this one has for each."""
        raise NotImplementedError


class GroupRanks(SplitRanks):
    """Over a process group, with its deadline."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | None = None,
        guard: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext(),
        standstill: Standstill | None = None,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        self.group, self._guard, self._standstill = group, guard, standstill
        self._first: Callable[[], object] | None = None
        self.in_loop: Callable[[], None] | None = None
        """Called before what the loop's own code sends: outside of split parts and of backward passes."""

    def before_next(self, wait: Callable[[], object]) -> None:
        """Call `wait` before anything else is sent: until then this rank may compute."""
        self.settle()
        self._first = wait

    def settle(self) -> None:
        """Wait now, if something is left to wait for."""
        if self._first is not None:
            wait, self._first = self._first, None
            wait()

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        assert tensor.dtype != torch.bool  # a sum of bools is no bool
        if not self._swaps(tensor):
            kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
            self._run(_SUMMING, tensor, lambda: dist.all_reduce(tensor, kind, group=self.group, async_op=True))
            return tensor
        other = self._swap(_SUMMING, tensor, tensor.numel()).view(tensor.shape)
        return tensor.add_(other) if op == "sum" else torch.maximum(tensor, other, out=tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._swaps(tensor):
            return super().all_reduce(tensor)
        tensor = tensor.contiguous()
        return self._swap(_SUMMING, tensor, tensor.numel()).view(tensor.shape).add_(tensor)

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int], dim: int) -> list[torch.Tensor]:
        shapes = [(*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]) for length in lengths]
        sizes = [prod(shape) for shape in shapes]
        if max(sizes) and self._swaps(tensor, max(sizes)):
            there = 1 - self.rank
            other = self._swap(_GATHERING, tensor.contiguous(), sizes[there]).view(shapes[there])
            return [other, tensor] if self.rank else [tensor, other]
        flat = tensor.reshape(-1)
        if len(set(sizes)) > 1:  # c10d gathers equal blocks
            flat = functional.pad(flat, (0, max(sizes) - flat.numel()))
        flat = flat.contiguous()
        parts = list(flat.new_empty(self.ways * max(sizes)).chunk(self.ways)) if max(sizes) else [flat] * self.ways
        if max(sizes):
            self._run(_GATHERING, flat, lambda: dist.all_gather(parts, flat, group=self.group, async_op=True))
        return [part[:size].view(shape) for part, size, shape in zip(parts, sizes, shapes, strict=True)]

    def all_to_all(self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        flat = torch.cat([part.reshape(-1) for part in parts])
        sizes = [prod(shape) for shape in shapes]
        received = self._exchange(_EXCHANGING, flat, sizes, [part.numel() for part in parts])
        return [part.view(shape) for part, shape in zip(received.split(sizes), map(tuple, shapes), strict=True)]

    def _swaps(self, tensor: torch.Tensor, numel: int | None = None) -> bool:
        """Whether it is quicker to swap blocks of so many numbers than to run the collective; the same on both ranks."""
        size = tensor.numel() if numel is None else numel
        return self.ways == 2 and tensor.is_cpu and 0 < size * tensor.element_size() <= SWAPPED

    def _swap(self, what: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """The numbers of the other rank of two, `size` of them, where this one gives its own."""
        there = 1 - self.rank
        given, wanted = [0, 0], [0, 0]
        given[there], wanted[there] = tensor.numel(), size
        return self._exchange(what, tensor.view(-1), wanted, given)

    def _exchange(self, what: str, flat: torch.Tensor, wanted: list[int], given: list[int]) -> torch.Tensor:
        """What all ranks have for this one, `wanted` from each, where this one has `given` for each."""
        received = flat.new_empty(sum(wanted))
        self._run(
            what,
            flat,
            lambda: dist.all_to_all_single(received, flat, wanted, given, group=self.group, async_op=True),
        )
        return received

    def _run(self, what: str, tensor: torch.Tensor, start: Callable[[], Any]) -> None:
        """One collective, from its start to its end."""
        self.settle()
        if self.in_loop is not None and not region.depth and _torch.backward_id() == -1:
            self.in_loop()
        with self._guard(what):
            if self._standstill is None or not tensor.is_cpu:  # a device is not waited for here
                start().wait()
                return
            number = self._standstill.call(self.group)
            self._standstill.wait(start(), self.group, number, lambda: f"{what}, at {user_place()}")
