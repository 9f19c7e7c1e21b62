"""One step of a pipeline schedule, and its text.

2F3      stage 2 computes the forward of micro batch 3
2B3      its backward: the gradients of its inputs and of its weights together
2I3 2W3  the two halves of a backward: the gradients of the inputs; later those of the weights
2SF3>3   stage 2 has made the activations of micro batch 3 for stage 3: send them
3RF3<2   stage 3 is about to need them: they must have arrived
3SB3>2   stage 3 has made their gradients for stage 2: send them
2RB3<3   stage 2 is about to need them: they must have arrived
2R       all gradients of stage 2 are there: reduce them over the model replicas
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from epl.errors import PlanError


class ActionKind(StrEnum):
    """What an action does; the value is its sign in text."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    REDUCE = "R"


K = ActionKind
COMPUTE = frozenset({K.FORWARD, K.BACKWARD, K.INPUT_GRAD, K.WEIGHT_GRAD})
MAKES_INPUT_GRAD = frozenset({K.BACKWARD, K.INPUT_GRAD})
MAKES_WEIGHT_GRAD = frozenset({K.BACKWARD, K.WEIGHT_GRAD})
SENDS = frozenset({K.SEND_FORWARD, K.SEND_BACKWARD})
RECEIVES = frozenset({K.RECEIVE_FORWARD, K.RECEIVE_BACKWARD})
MESSAGES = SENDS | RECEIVES
_MIRROR = {
    K.SEND_FORWARD: K.RECEIVE_FORWARD,
    K.RECEIVE_FORWARD: K.SEND_FORWARD,
    K.SEND_BACKWARD: K.RECEIVE_BACKWARD,
    K.RECEIVE_BACKWARD: K.SEND_BACKWARD,
}
_TEXT = re.compile(r"(?P<stage>\d+)(?P<kind>[SR][FB]|[FBIWR])(?P<micro_batch>\d+)?((?P<arrow>[<>])(?P<peer>\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One step: its kind, its stage, its micro batch (None for a reduction), and for a message the other stage."""

    kind: ActionKind
    stage: int
    micro_batch: int | None = None
    peer: int | None = None

    def __post_init__(self) -> None:
        needs_micro_batch, needs_peer = self.kind is not K.REDUCE, self.kind in MESSAGES
        if (self.micro_batch is not None) != needs_micro_batch or (self.peer is not None) != needs_peer:
            raise PlanError(
                f"{self.kind.name} {'needs a' if needs_micro_batch else 'has no'} micro batch and "
                f"{'needs a' if needs_peer else 'has no'} peer stage; found micro_batch={self.micro_batch}, peer={self.peer}"
            )

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}"
        if self.micro_batch is not None:
            text += str(self.micro_batch)
        if self.peer is not None:
            text += f"{'>' if self.kind in SENDS else '<'}{self.peer}"
        return text

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `str` writes as this text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise PlanError(f"expected an action like 2F3, 2SF3>3, 3RF3<2 or 2R; found {text!r}")
        kind = ActionKind(found["kind"])
        numbers = [None if found[name] is None else int(found[name]) for name in ("micro_batch", "peer")]
        action = cls(kind, int(found["stage"]), *numbers)
        if str(action) != text:
            raise PlanError(f"expected {action} ({kind.name.lower()}); found {text!r}")
        return action

    @property
    def is_compute(self) -> bool:
        """Whether it occupies the device: a forward or (half of) a backward."""
        return self.kind in COMPUTE

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind in MESSAGES

    @property
    def channel(self) -> tuple[int, int]:
        """The stages that a message leaves and reaches: messages of one channel arrive in the order they left."""
        assert self.peer is not None
        return (self.stage, self.peer) if self.kind in SENDS else (self.peer, self.stage)

    def mirror(self) -> Action:
        """The receive that a send belongs to, or the other way round."""
        assert self.peer is not None
        return Action(_MIRROR[self.kind], self.peer, self.micro_batch, self.stage)
