"""A transport whose devices are threads of one process: whole products of schedules and models run in it within seconds."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from epl.errors import PeerLostError
from epl.parallel.pipeline.transport import Direction, Edge, Pending

T = TypeVar("T")


class MemoryNetwork:
    """A queue for every edge and direction, and a meeting point for all devices."""

    def __init__(self, devices: int, timeout: float = 30.0) -> None:
        self.devices, self.timeout = devices, timeout
        self._queues: dict[tuple[Edge, Direction], queue.Queue[torch.Tensor]] = {}
        self._making = threading.Lock()
        self._barrier = threading.Barrier(devices)
        self._said: list[object] = [None] * devices

    def transport(self, device: int) -> MemoryTransport:
        """The end of the network at one device."""
        return MemoryTransport(self, device)

    def line(self, edge: Edge, direction: Direction) -> queue.Queue[torch.Tensor]:
        """What is under way along an edge; one object, whichever end asks first."""
        with self._making:
            return self._queues.setdefault((edge, direction), queue.Queue())

    def meet(self, device: int, value: object) -> list[object]:
        """Every device's value, once all have come."""
        self._said[device] = value
        self._wait()
        said = list(self._said)
        self._wait()
        return said

    def _wait(self) -> None:
        try:
            self._barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise PeerLostError("another device of the in-memory network failed or did not come") from None

    def abort(self) -> None:
        """A device failed: wake the others."""
        self._barrier.abort()

    def run(self, function: Callable[[int], T]) -> list[T]:
        """`function(device)` on a thread for each device; their results in order, or the first error."""
        results: list[Any] = [None] * self.devices
        errors: list[BaseException] = []

        def body(device: int) -> None:
            try:
                results[device] = function(device)
            except BaseException as error:
                errors.append(error)
                self.abort()

        threads = [threading.Thread(target=body, args=(d,), name=f"device {d}") for d in range(self.devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, PeerLostError)), errors[0])
        return results


class MemoryTransport:
    """One device's end of a `MemoryNetwork`. Buffers are copied when sent, as a real network would."""

    device = torch.device("cpu")

    def __init__(self, network: MemoryNetwork, own: int) -> None:
        self._network, self._own = network, own

    def send(self, peer: int, edge: Edge, direction: Direction, buffer: torch.Tensor) -> Pending:
        self._network.line(edge, direction).put(buffer.clone())
        return _Done()

    def receive(self, peer: int, edge: Edge, direction: Direction, buffer: torch.Tensor) -> Pending:
        return _Arrival(self._network, self._network.line(edge, direction), buffer)

    def share(self, buffer: torch.Tensor, source: int) -> None:
        told = self._network.meet(self._own, buffer)[source]
        assert isinstance(told, torch.Tensor)
        buffer.copy_(told)


class _Done:
    def wait(self) -> None:
        """What was sent is in the queue already."""


class _Arrival:
    def __init__(self, network: MemoryNetwork, source: queue.Queue[torch.Tensor], buffer: torch.Tensor) -> None:
        self._network, self._source, self._buffer = network, source, buffer
        self._arrived = False

    def wait(self) -> None:
        if self._arrived:
            return
        for _ in range(int(self._network.timeout * 20)):
            try:
                message = self._source.get(timeout=0.05)
                break
            except queue.Empty:
                if self._network._barrier.broken:
                    raise PeerLostError("another device of the in-memory network failed") from None
        else:
            raise PeerLostError(f"nothing arrived within {self._network.timeout} s")
        # A real network would kill the receiver here.
        assert message.numel() == self._buffer.numel(), f"{message.numel()} bytes sent, {self._buffer.numel()} expected"
        self._buffer.copy_(message)
        self._arrived = True
