"""Takes the actions of one device's list, one after the other. Any list that `epl.plan.schedule` accepts will run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from epl.parallel.pipeline.bridge import Bridge
from epl.parallel.pipeline.mailbox import Mailbox
from epl.parallel.pipeline.parcel import enter_stage, in_words, put_together, take_apart
from epl.parallel.pipeline.stage import Received, Stage
from epl.parallel.pipeline.transport import Edge, Transport
from epl.plan.schedule import Action, ActionKind, Schedule

K = ActionKind


class StageReducer(Protocol):
    """Reduces a stage's gradients over the model replicas, while the pipeline is still at work."""

    def last_backward(self) -> None:
        """The next backward of the stage is its last in this step: gradients may leave as they come."""

    def finish(self) -> None:
        """Wait until all gradients are reduced."""


@dataclass(frozen=True)
class Program:
    """One device's list, and what can be known about it beforehand."""

    actions: tuple[Action, ...]
    here: tuple[Edge, ...]
    """Edges between stages of this device: values are handed over without a message."""
    posts: Mapping[int, tuple[Action, ...]]
    """Position → the receives to post once that action is done (-1: at the start)."""
    last_backwards: frozenset[int]
    """Positions of each stage's last backward."""
    trains: bool
    keeps: bool = False
    """Forwards only, whose backwards are another program's: everything is kept for it."""
    patient: frozenset[Edge] = frozenset()
    """Edges on which a message may be taken long after it was sent, so that nobody must wait for it: with several stages per
    device the user of a skip connection comes only after the maker's device has gone through the other chunk's forwards."""

    @staticmethod
    def of(schedule: Schedule, device: int, *, keeps: bool = False, stages: Collection[int] | None = None) -> Program:
        """The program of one device; the schedule must have its messages. `stages`: only these of its stages are on this rank."""
        own = set(schedule.stages_of(device) if stages is None else stages)
        actions = tuple(action for action in schedule.actions[device] if action.stage in own)
        posts: dict[int, list[Action]] = defaultdict(list)
        before: dict[tuple[ActionKind, Edge], int] = {}  # one receive ahead on each edge, see mailbox.py
        sent: dict[tuple[Edge, int | None], int] = {}
        last: dict[int, int] = {}
        for position, action in enumerate(actions):
            if action.kind is K.SEND_FORWARD:
                sent[action.channel, action.micro_batch] = position
            elif action.kind is K.RECEIVE_FORWARD or action.kind is K.RECEIVE_BACKWARD:
                key = (action.kind, action.channel)
                there_is_room = before.get(key, -1)
                if action.kind is K.RECEIVE_BACKWARD:  # of a form that is known once the activations have left
                    maker, user = action.channel[1], action.channel[0]
                    there_is_room = max(there_is_room, sent.get(((maker, user), action.micro_batch), -1))
                posts[there_is_room].append(action)
                before[key] = position
            elif action.kind is K.BACKWARD or action.kind is K.WEIGHT_GRAD:
                last[action.stage] = position
        here = tuple(edge for edge in schedule.edges if own.issuperset(edge) and not schedule.crosses(edge))
        frozen = {position: tuple(found) for position, found in posts.items()}
        return Program(actions, here, frozen, frozenset(last.values()), bool(last), keeps, _patient(schedule))


def _patient(schedule: Schedule) -> frozenset[Edge]:
    if schedule.num_stages - schedule.home == schedule.num_devices:
        return frozenset()
    home = schedule.num_stages - 1 if schedule.home else None
    meet_at_once = [  # an edge to the next stage, on the next device or at home
        (made, used)
        for made, used in schedule.edges
        if used - made == 1 and (used == home or schedule.device_of(made) != schedule.device_of(used))
    ]
    return frozenset(schedule.edges).difference(meet_at_once)


@dataclass
class Step:
    """What came of one step."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """By micro batch, where the last stage is."""
    events: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, start and end (seconds) of every action, if they are recorded."""


class Executor:
    """Runs programs on the stages of this device; kept between steps, since both ends of an edge remember forms."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_devices: int,
        transport: Transport,
        *,
        reducers: Mapping[int, StageReducer] | None = None,
        mailbox: Mailbox | Bridge | None = None,
    ) -> None:
        self._stages, self._reducers = stages, dict(reducers or {})
        self.record = False
        """Whether steps note when every action began and ended."""
        self._mailbox: Mailbox | Bridge = mailbox or Mailbox(transport, num_devices)

    def run(self, program: Program, weights: Sequence[float]) -> Step:
        """One step; `weights` are those of the micro batches' losses, and add up to 1."""
        step = Step()
        self._mailbox.patient = program.patient
        self._post(program.posts.get(-1, ()))
        for position, action in enumerate(program.actions):
            if position in program.last_backwards and action.stage in self._reducers:
                self._reducers[action.stage].last_backward()
            start = time.perf_counter() if self.record else 0.0
            try:
                self._take(action, program, step, weights)
            except Exception as error:
                error.add_note(f"in {describe(action)}{self._had_received(action)}")
                self.forget()
                raise
            if self.record:
                step.events.append((str(action), start, time.perf_counter()))
            self._post(program.posts.get(position, ()))
        if program.trains:
            for reducer in dict.fromkeys(self._reducers.values()):
                reducer.finish()
        self._mailbox.finish()
        left = not program.keeps and any(stage.flying and not stage.retain for stage in self._stages.values())
        assert not left, "micro batches are left over"
        return step

    def forget(self) -> None:
        """Drop what a step that raised has left behind."""
        for stage in self._stages.values():
            stage.flying.clear()

    # ---- actions ---------------------------------------------------------------------------------------------------

    def _take(self, action: Action, program: Program, step: Step, weights: Sequence[float]) -> None:
        stage, number, peer = self._stages[action.stage], action.micro_batch, action.peer
        if number is None:
            return  # a reduction: begun with the stage's last backward, waited for at the end of the step
        if peer is not None:
            self._take_message(action.kind, stage, number, peer)
        elif action.kind is K.FORWARD:
            self._hand_over(stage, number, program)
            loss = stage.forward(number)
            if loss is not None:
                step.losses[number] = loss.detach()
            if not program.trains and not program.keeps:
                stage.flying[number].received, stage.flying[number].loss = {}, None
        elif action.kind is K.WEIGHT_GRAD:
            stage.backward_of_weights(number)
        else:
            self._hand_back(stage, number, program)
            backward = stage.backward if action.kind is K.BACKWARD else stage.backward_of_inputs
            backward(number, weights[number])
        stage.let_go(number)

    def _take_message(self, kind: ActionKind, stage: Stage, number: int, peer: int) -> None:
        if kind is K.RECEIVE_FORWARD:
            value, form, tensors = self._mailbox.receive((peer, stage.index), number)
            stage.micro_batch(number).received[peer] = Received(value, form, tensors)
        elif kind is K.SEND_FORWARD:
            value = stage.flying[number].outputs[peer]
            form, tensors = self._mailbox.send((stage.index, peer), number, value)
            stage.left(number, peer, form, tensors)
            if not torch.is_grad_enabled():
                del stage.flying[number].sent[peer]
        elif kind is K.RECEIVE_BACKWARD:
            sent = stage.flying[number].sent[peer]
            sent.gradients = self._mailbox.receive_gradients((stage.index, peer), number, sent.form)
        else:
            form, gradients = stage.flying[number].returning.pop(peer)
            self._mailbox.send_gradients((peer, stage.index), form, gradients)

    def _hand_over(self, stage: Stage, number: int, program: Program) -> None:
        """From stages on this same device; the graph is cut between them all the same."""
        for maker, user in program.here:
            if user == stage.index:
                made = self._stages[maker]
                form, tensors = take_apart(made.flying[number].outputs[user])
                made.left(number, user, form, tensors)
                if not torch.is_grad_enabled():
                    del made.flying[number].sent[user]
                    made.let_go(number)
                leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
                value = put_together(form, enter_stage(leaves))
                stage.micro_batch(number).received[maker] = Received(value, form, leaves)

    def _hand_back(self, stage: Stage, number: int, program: Program) -> None:
        for maker, user in program.here:
            if maker == stage.index:
                _, gradients = self._stages[user].flying[number].returning.pop(maker)
                stage.flying[number].sent[user].gradients = gradients
                self._stages[user].let_go(number)

    def _post(self, receives: Sequence[Action]) -> None:
        for action in receives:
            assert action.micro_batch is not None
            if action.kind is K.RECEIVE_FORWARD:
                self._mailbox.expect(action.channel, action.micro_batch)
            else:
                user, maker = action.channel
                form = self._stages[maker].flying[action.micro_batch].sent[user].form
                self._mailbox.expect_gradients((maker, user), action.micro_batch, form)

    def _had_received(self, action: Action) -> str:
        """For the error of a forward: what it was given."""
        kept = self._stages[action.stage].flying.get(action.micro_batch) if action.micro_batch is not None else None
        if kept is None or action.kind is not K.FORWARD:
            return ""
        return "".join(f", which received {in_words(r.value)} from stage {peer}" for peer, r in kept.received.items())


def describe(action: Action) -> str:
    """The action in words, for errors."""
    words = {
        K.FORWARD: "the forward",
        K.BACKWARD: "the backward",
        K.INPUT_GRAD: "the backward (input gradients)",
        K.WEIGHT_GRAD: "the backward (weight gradients)",
        K.SEND_FORWARD: f"sending the output to stage {action.peer}",
        K.RECEIVE_FORWARD: f"receiving the output of stage {action.peer}",
        K.SEND_BACKWARD: f"sending gradients to stage {action.peer}",
        K.RECEIVE_BACKWARD: f"receiving gradients from stage {action.peer}",
        K.REDUCE: "the reduction over replicas",
    }
    return f"{words[action.kind]} of stage {action.stage}, micro batch {action.micro_batch} ({action})"
