"""What the stages of this device compute in one step: the bodies of some model calls, and at home what follows them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch

from epl.parallel.pipeline.route import Layout
from epl.parallel.pipeline.stage import Stage
from epl.parallel.pipeline.transport import Edge
from epl.train.cut.call import ModelCall

AtHome = Callable[[int, list[list[torch.Tensor]]], torch.Tensor | None]
"""(micro batch, the frontier values of each call) → this micro batch's share of a loss, or None."""


class Work:
    """The calls of one step, and what home does with their values."""

    def __init__(
        self, calls: Sequence[ModelCall], home_stage: int, at_home: AtHome, *, takes_cut: bool = False
    ) -> None:
        """`takes_cut`: `at_home` is given values as a split part left them, on all ranks of the split: each is home to itself, or they are
        the lanes of the last stage, and compute together."""
        self.calls, self._home_stage, self._at_home, self._takes_cut = calls, home_stage, at_home, takes_cut
        self._edges = [call.layout.edges_to_lanes if takes_cut else call.layout.edges for call in calls]
        """Of every call."""
        self.layouts: dict[Edge, tuple[Layout, ...]] = {}
        """Of every edge, how each of its values carries the batch."""
        for edge in sorted({edge for edges in self._edges for edge in edges}):
            self.layouts[edge] = tuple(
                each
                for call, edges in zip(calls, self._edges, strict=True)
                for each in call.layout.layouts(edge, edges.get(edge, ()))
            )

    def forward(
        self, stage: int, received: Mapping[int, object], micro_batch: int
    ) -> tuple[dict[int, tuple[torch.Tensor, ...]], torch.Tensor | None]:
        """What each later stage gets, and the loss where this is its stage."""
        arrived = {maker: iter(cast("tuple[torch.Tensor, ...]", values)) for maker, values in received.items()}
        outputs: dict[int, list[torch.Tensor]] = {user: [] for maker, user in self.layouts if maker == stage}
        frontiers = []
        for call, edges in zip(self.calls, self._edges, strict=True):
            values = call.run(stage, micro_batch, _incoming(edges, stage, arrived))
            for (maker, user), nodes in edges.items():
                if maker == stage:
                    outputs[user] += [values[node] for node in nodes]
            if stage == self._home_stage:
                take = values.as_left if self._takes_cut else values.__getitem__
                frontiers.append([take(node) for node in call.layout.frontier])
        loss = self._at_home(micro_batch, frontiers) if stage == self._home_stage else None
        return {user: tuple(made) for user, made in outputs.items()}, loss


def _incoming(
    edges: Mapping[Edge, tuple[int, ...]], stage: int, arrived: Mapping[int, Iterator[torch.Tensor]]
) -> dict[int, torch.Tensor]:
    return {node: next(arrived[maker]) for (maker, user), nodes in edges.items() if user == stage for node in nodes}


class WorkStage(Stage):
    """One stage of this device. What surrounds the forward of a micro batch surrounds its backward, in which a checkpoint may compute again."""

    def __init__(self, index: int, work: Work) -> None:
        super().__init__(index, _StageProgram(index, work))
        self._work = work

    def backward(self, number: int, weight: float) -> None:
        with contextlib.ExitStack() as stack:
            for call in self._work.calls:
                stack.enter_context(call.around(number, True))
            super().backward(number, weight)


class _StageProgram:
    """What a stage computes, whatever the work of the step is."""

    def __init__(self, index: int, work: Work) -> None:
        self._index, self._work = index, work

    def forward(self, received: Mapping[int, object], micro_batch: int) -> tuple[Mapping[int, object], object]:
        return self._work.forward(self._index, received, micro_batch)
