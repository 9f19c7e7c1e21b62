"""Ranks that are threads, each with its own cut model on real stages, over the in-memory transport.

They take turns: one runs until it must wait for another, with a random state of its own, so that a loop that seeds and draws
sees what it would see in a process of its own, and nothing that belongs to the whole process (recording, warnings) is shared.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from epl.graph.record import MIXED, Mixed, RecordedCall, Recordings
from epl.graph.staging import graph_nodes, wanted_at_home
from epl.parallel.pipeline.lanes import Lanes
from epl.parallel.pipeline.memory import MemoryNetwork
from epl.parallel.pipeline.transport import Direction, Edge
from epl.plan.stages import StageCut, cut_stages
from epl.train.cut.carrier import StageCarrier
from epl.train.cut.model import CutModel
from epl.train.cut.part import PartGradients
from epl.train.cut.stageplace import StagePlace
from epl.train.lazy import become_foreign
from tests.train.cut.memory import MemoryPeers

T = TypeVar("T")


class Turns:
    """Who may run; whoever waits lets others run meanwhile, and finds the random state as it left it."""

    def __init__(self) -> None:
        self._baton = threading.Lock()

    def take(self, state: torch.Tensor) -> None:
        self._baton.acquire()
        torch.set_rng_state(state)

    def give(self) -> torch.Tensor:
        state = torch.get_rng_state()
        self._baton.release()
        return state

    def waiting(self, wait: Callable[[], T]) -> T:
        """`wait()` while others run."""
        state = self.give()
        try:
            return wait()
        finally:
            self.take(state)


class _Line(queue.Queue[torch.Tensor]):
    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def get(self, block: bool = True, timeout: float | None = None) -> torch.Tensor:
        try:
            return super().get(block=False)
        except queue.Empty:
            return self._turns.waiting(lambda: super(_Line, self).get(block, timeout))


class TurnNetwork(MemoryNetwork):
    """A network whose devices take turns. A rank that ends early while others wait for it fails them."""

    def __init__(self, devices: int, timeout: float = 20.0) -> None:
        super().__init__(devices, timeout)
        self._turns = Turns()

    def line(self, edge: Edge, direction: Direction) -> queue.Queue[torch.Tensor]:
        return self._queues.setdefault((edge, direction), _Line(self._turns))

    def _wait(self) -> None:
        self._turns.waiting(super()._wait)

    def run(self, function: Callable[[int], T]) -> list[T]:
        state = torch.get_rng_state()

        def body(device: int) -> T:
            self._turns.take(state)
            try:
                return function(device)
            finally:
                self._turns.give()

        try:
            return super().run(body)
        finally:
            torch.set_rng_state(state)


class MemoryPlacer:
    """The children of a model, in order, dealt out to as many stages as the network has devices; if there are fewer children, the
    last devices get one each, and the others only watch."""

    widths = (1,)

    def __init__(self, network: MemoryNetwork, rank: int, model: nn.Module, strategy: str) -> None:
        self._network, self._rank, self._model, self._strategy = network, rank, model, strategy
        children = list(model.children())
        count = min(network.devices, len(children))
        self._first = network.devices - count
        self._names = [f"stage_{n}" for n in range(count)]
        self._stage_of = {
            module: self._names[number * count // len(children)]
            for number, child in enumerate(children)
            for module in child.modules()
        }
        self._placed: StageCut | None = None

    def leaf_of(self, module: nn.Module) -> str | Mixed | None:
        return MIXED if module is self._model else self._stage_of[module]

    def cut(self, recorded: RecordedCall) -> StageCut:
        owners = {
            f"{path}.{name}".lstrip("."): self._stage_of.get(module)
            for path, module in self._model.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        return cut_stages(
            graph_nodes(recorded, self._model),
            taskgraphs=self._names,
            parameters=owners,
            home=wanted_at_home(recorded),
            earlier=self._placed,
        )

    def place(self, recorded: RecordedCall) -> StageCarrier:
        network, rank = self._network, self._rank
        self._placed = cut = self.cut(recorded)
        said = network.meet(rank, (cut.order, sorted(cut.edges.items()), cut.holders))
        assert all(word == said[0] for word in said), "the ranks would place the model differently"
        lanes = Lanes(tuple((rank,) for rank in range(self._first, network.devices)), rank)
        stage = rank - self._first
        place = StagePlace(lanes, len(self._names), 1, max(0, stage), self._strategy)
        parameters = dict(self._model.named_parameters())
        own = [p for name, p in parameters.items() if stage in cut.holders[name]]
        for name, parameter in parameters.items():
            if stage not in cut.holders[name]:
                become_foreign(parameter, self._first + cut.holders[name][0], name)
        gradients = PartGradients(own, place.model_stages, [], None)
        peers = MemoryPeers(network, rank, home=network.devices - 1)
        return StageCarrier(place, peers, network.transport(rank), parameters, gradients)

    def whole_state(self) -> None:
        """Nobody asks for it here."""


def cut_in_memory(
    network: MemoryNetwork, rank: int, model: nn.Module, micro_batches: int, strategy: str = "PreferBackward"
) -> nn.Module:
    """`model`, the same object, as this rank of a replica sees it; every rank has built a copy of its own. One that is a single
    layer is put into a model."""
    if not list(model.children()):
        model = nn.Sequential(model)
    placer = MemoryPlacer(network, rank, model, strategy)
    CutModel(model, Recordings(model, placer.leaf_of), micro_batches, placer)
    return model
