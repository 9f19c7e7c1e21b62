"""How a buffer of bytes reaches another device of the pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NoReturn, Protocol

import torch
import torch.distributed as dist

Direction = Literal["forward", "backward"]
Edge = tuple[int, int]
"""The stage that makes a value and the stage that uses it; where stages have lanes, these (`lanes.py`)."""
LARGEST = 1 << 15
"""Stages (or lanes) are numbered below this, so that an edge and a direction fit into a Gloo tag."""


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when it has arrived (or, for a send, when its buffer may be used again)."""


class Transport(Protocol):
    """Sends and receives between the devices 0 … p-1 of one model replica.

    Messages of one edge and direction arrive in the order they were sent, whatever happens on others; sends do not wait.
    """

    device: torch.device

    def send(self, peer: int, edge: Edge, direction: Direction, buffer: torch.Tensor) -> Pending:
        """Begin to send; the buffer must not change until the message is done."""

    def receive(self, peer: int, edge: Edge, direction: Direction, buffer: torch.Tensor) -> Pending:
        """Begin to receive into the buffer, which has exactly the size that was sent."""

    def share(self, buffer: torch.Tensor, source: int) -> None:
        """Overwrite the buffer with that of one device; all devices call it together."""


class GroupTransport:
    """Over c10d. Gloo keeps edges apart by tags; NCCL has none, so there every edge and direction has a group of its own."""

    def __init__(
        self,
        groups: Callable[[Edge, Direction], dist.ProcessGroup],
        pipe: dist.ProcessGroup,
        device: torch.device,
        guard: Callable[[str], AbstractContextManager[None]] = lambda what: contextlib.nullcontext(),
        name: Callable[[int], str] = "stage {}".format,
    ) -> None:
        self.device = device
        self._groups, self._pipe, self._guard, self._name = groups, pipe, guard, name

    def send(self, peer: int, edge: Edge, direction: Direction, buffer: torch.Tensor) -> Pending:
        group = self._groups(edge, direction)
        try:
            work = dist.isend(buffer, group=group, group_dst=peer, tag=_tag(edge, direction))
        except RuntimeError as error:
            self._fail(error, "sending", edge, direction)
        return _Work(work, self, "sending", edge, direction)

    def receive(self, peer: int, edge: Edge, direction: Direction, buffer: torch.Tensor) -> Pending:
        group = self._groups(edge, direction)
        try:
            work = dist.irecv(buffer, group=group, group_src=peer, tag=_tag(edge, direction))
        except RuntimeError as error:
            self._fail(error, "receiving", edge, direction)
        return _Work(work, self, "receiving", edge, direction)

    def _fail(self, error: RuntimeError, verb: str, edge: Edge, direction: Direction) -> NoReturn:
        """Say what c10d's error means here; only now, since a text for each of many messages costs time."""
        maker, user = map(self._name, edge)
        what = f"activations of {maker} for {user}" if direction == "forward" else f"gradients of {user} for {maker}"
        with self._guard(f"{verb} {what}"):
            raise error
        raise AssertionError("the guard lets nothing pass")

    def share(self, buffer: torch.Tensor, source: int) -> None:
        with self._guard("sharing the losses"):
            dist.broadcast(buffer, group=self._pipe, group_src=source)


def _tag(edge: Edge, direction: Direction) -> int:
    return (edge[0] << 15 | edge[1]) << 1 | (direction == "backward")


class _Work:
    def __init__(
        self, work: dist.Work | None, transport: GroupTransport, verb: str, edge: Edge, direction: Direction
    ) -> None:
        assert work is not None, "this rank is not in the group"
        self._work: dist.Work | None = work
        self._transport, self._what = transport, (verb, edge, direction)

    def wait(self) -> None:
        # Gloo blocks for good when one send is waited for twice: once is remembered.
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                self._transport._fail(error, *self._what)
            self._work = None


def wait_all(messages: Sequence[Pending]) -> None:
    """Wait for every message, in order."""
    for message in messages:
        message.wait()
