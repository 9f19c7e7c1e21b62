"""Parcels between the stages of a pipeline, in order, with receives posted ahead of time.

Both ends of an edge assume that micro batch i has the form it had in the step before, and so agree on the size of the buffer
before it is sent (Gloo kills a receiver whose buffer has another size). Where the form has changed the sender says so in the
preamble of a buffer of the *assumed* size, and sends the form and the real buffer after it:

    form as assumed    | 0 | … | tensors |
    form changed       | length of the form | … | nothing |   then   | form |   then   | preamble | tensors |

Of each edge and direction at most one receive is posted ahead: the form that may follow it must find nobody before it. On an
accelerator reading a preamble waits for the device to have the message; that cannot be measured here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass

import torch

from epl.parallel.pipeline.parcel import PREAMBLE, Form, enter_stage, put_together, take_apart
from epl.parallel.pipeline.transport import Direction, Edge, Pending, Transport, wait_all

_NOTHING = Form(b"", ())
_UNDER_WAY = 2  # messages of one edge and direction whose buffers are kept at most


@dataclass
class _Expected:
    form: Form
    buffer: torch.Tensor
    pending: Pending


class Mailbox:
    """What this device sends and receives; kept between steps, since it remembers the forms."""

    def __init__(self, transport: Transport, num_devices: int) -> None:
        self._transport, self._num_devices = transport, num_devices
        self._forms: dict[tuple[Edge, int], Form] = {}  # (edge, micro batch) → the form it had last
        self._sent: dict[tuple[Edge, Direction], deque[tuple[Pending, torch.Tensor]]] = defaultdict(deque)
        self._expected: dict[tuple[Direction, Edge, int], _Expected] = {}
        self.patient: Collection[Edge] = ()
        """Edges along which nothing sent is waited for before the step ends, see `Program.patient`."""

    # ---- activations -----------------------------------------------------------------------------------------------

    def send(self, edge: Edge, micro_batch: int, value: object) -> tuple[Form, list[torch.Tensor]]:
        """Send a value along an edge; its form and tensors, which its gradients will have to match."""
        assumed = self._forms.get((edge, micro_batch), _NOTHING)
        form, tensors = take_apart(value, assumed)
        peer, detached = edge[1] % self._num_devices, [t.detach() for t in tensors]
        if form is assumed:
            self._post(peer, edge, "forward", _marked(form.pack(detached, self._transport.device), 0))
        else:
            text = form.encode()
            self._post(peer, edge, "forward", _marked(assumed.pack([], self._transport.device), len(text)))
            told = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._transport.device)
            self._post(peer, edge, "forward", told)
            self._post(peer, edge, "forward", _marked(form.pack(detached, self._transport.device), 0))
            self._forms[edge, micro_batch] = form
        return form, tensors

    def expect(self, edge: Edge, micro_batch: int) -> None:
        """Post the receive of a value ahead of time."""
        assumed = self._forms.get((edge, micro_batch), _NOTHING)
        self._expect("forward", edge, micro_batch, edge[0], assumed)

    def receive(self, edge: Edge, micro_batch: int) -> tuple[object, Form, list[torch.Tensor]]:
        """The value that was sent along an edge, its form, and its tensors (as leaves, ready for autograd)."""
        buffer, form = self._arrived("forward", edge, micro_batch)
        length = _mark(buffer)
        if length:
            peer = edge[0] % self._num_devices
            text = torch.empty(length, dtype=torch.uint8, device=self._transport.device)
            self._transport.receive(peer, edge, "forward", text).wait()
            form = Form.decode(text.cpu().numpy().tobytes())
            buffer = torch.empty(form.size, dtype=torch.uint8, device=self._transport.device)
            self._transport.receive(peer, edge, "forward", buffer).wait()
            self._forms[edge, micro_batch] = form
        leaves = form.unpack(buffer)
        for leaf, described in zip(leaves, form.tensors, strict=True):
            leaf.requires_grad_(described.needs_gradient)
        return put_together(form, enter_stage(leaves)), form, leaves

    # ---- gradients -------------------------------------------------------------------------------------------------

    def send_gradients(self, edge: Edge, form: Form, gradients: list[torch.Tensor | None]) -> None:
        """Send back the gradients of what came along an edge; nothing at all if nothing of it needs one."""
        if form.gradient.tensors:
            buffer = form.gradient.pack(gradients, self._transport.device)
            present = sum(1 << n for n, g in enumerate(gradients[:62]) if g is not None)
            for gradient, room in zip(gradients[62:], form.gradient.unpack(buffer)[62:], strict=True):
                if gradient is None:
                    room.zero_()
            self._post(edge[0] % self._num_devices, edge, "backward", _marked(buffer, present))

    def expect_gradients(self, edge: Edge, micro_batch: int, form: Form) -> None:
        """Post the receive of the gradients of what was sent along an edge."""
        if form.gradient.tensors:
            self._expect("backward", edge, micro_batch, edge[1], form.gradient)

    def receive_gradients(self, edge: Edge, micro_batch: int, form: Form) -> list[torch.Tensor | None]:
        """The gradients of what was sent along an edge, one for each tensor that needs one; None where it had no use."""
        if not form.gradient.tensors:
            return []
        self.expect_gradients(edge, micro_batch, form)
        buffer, gradient = self._arrived("backward", edge, micro_batch)
        present = _mark(buffer)
        tensors = gradient.unpack(buffer)
        return [t if n >= 62 or present >> n & 1 else None for n, t in enumerate(tensors)]

    # ---- messages --------------------------------------------------------------------------------------------------

    def _post(self, peer: int, edge: Edge, direction: Direction, buffer: torch.Tensor) -> None:
        # A message that nobody waits for is never known to have left (Gloo), so the oldest is waited for: the peer, which takes
        # messages in order, is that far behind only when this device has nothing better to do.
        sent = self._sent[edge, direction]
        while len(sent) >= _UNDER_WAY and edge not in self.patient:
            sent.popleft()[0].wait()
        sent.append((self._transport.send(peer, edge, direction, buffer), buffer))

    def _expect(self, direction: Direction, edge: Edge, micro_batch: int, peer: int, form: Form) -> None:
        key = (direction, edge, micro_batch)
        if key not in self._expected:
            buffer = torch.empty(form.size, dtype=torch.uint8, device=self._transport.device)
            pending = self._transport.receive(peer % self._num_devices, edge, direction, buffer)
            self._expected[key] = _Expected(form, buffer, pending)

    def _arrived(self, direction: Direction, edge: Edge, micro_batch: int) -> tuple[torch.Tensor, Form]:
        if direction == "forward":
            self.expect(edge, micro_batch)
        expected = self._expected.pop((direction, edge, micro_batch))
        expected.pending.wait()
        return expected.buffer, expected.form

    def finish(self) -> None:
        """Wait until everything sent has left; a step ends with this."""
        for sent in self._sent.values():
            wait_all([message for message, _ in sent])
            sent.clear()
        assert not self._expected, f"receives without a message: {list(self._expected)}"


def _marked(buffer: torch.Tensor, mark: int) -> torch.Tensor:
    buffer[:8].view(torch.int64).fill_(mark)
    return buffer


def _mark(buffer: torch.Tensor) -> int:
    return int(buffer[:8].view(torch.int64).item())


assert PREAMBLE >= 8
