"""Runs the bodies of model calls over the stages of one replica: in a schedule with the loss, or all forwards, then all backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from epl.graph.spec import Spec
from epl.parallel.pipeline.bridge import Bridge, make_mailbox
from epl.parallel.pipeline.executor import Executor, Program, StageReducer
from epl.parallel.pipeline.mailbox import Mailbox
from epl.parallel.pipeline.stage import Stage
from epl.parallel.pipeline.transport import Transport
from epl.train.cut.call import ModelCall
from epl.train.cut.part import PartGradients
from epl.train.cut.peers import Peers
from epl.train.cut.stageplace import ScheduleKind, StagePlace
from epl.train.cut.stream import own_stream
from epl.train.cut.work import Work, WorkStage
from epl.train.lazy.protocol import Call, ScheduledLoss

_MAILBOXES = 64  # signatures whose forms are remembered


@dataclass
class _Kept:
    """All forwards of a call, kept for its backward."""

    work: Work
    stages: dict[int, Stage]
    values: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """At home, by micro batch: the frontier values with their graphs."""


class StageCarrier:
    """The calls of one cut model on this rank; see `epl.train.lazy.protocol.Carrier`."""

    def __init__(
        self,
        place: StagePlace,
        peers: Peers,
        transport: Transport,
        parameters: Mapping[str, nn.Parameter],
        gradients: PartGradients,
        on_rows: Callable[[tuple[int, ...]], None] = lambda rows: None,
    ) -> None:
        self.place, self.parameters = place, parameters
        self._peers, self._transport, self._gradients, self._on_rows = peers, transport, gradients, on_rows
        self.ranks, self.home = peers.ranks, peers.ranks[peers.home]
        self.is_home = peers.index == peers.home
        self.ends_split = place.at_lanes is not None
        self.at_end = self.is_home or (self.ends_split and place.num_stages - 1 in place.stages)
        self.rows = 0
        """Of the batch that the loop is at, for the other replicas to know."""
        self.padded = False
        """Whether the rows that a stage computes now only repeat another lane's."""
        self.stream_seed: int | None = None
        """Of what stages draw at random; None: they draw from the loop's stream, as every rank computes all of the model."""
        self.inside: Callable[[int], AbstractContextManager[None]] = lambda stage: contextlib.nullcontext()
        """What surrounds the forward of a stage."""
        self._looked = False
        self._programs: dict[object, Program] = {}
        self._mailboxes: dict[object, Mailbox | Bridge] = {}
        self._kept: dict[ModelCall, _Kept] = {}
        self.events: list[tuple[str, float, float]] | None = None
        """Name, start and end of every action, while somebody records a trace."""

    def drawing(self, *seeds: int) -> AbstractContextManager[None]:
        """Where random numbers come from while a stage computes a micro batch."""
        if self.stream_seed is None:
            return contextlib.nullcontext()
        return own_stream(self._transport.device, self.stream_seed, *seeds)

    # ---- with the other ranks --------------------------------------------------------------------------------------

    def refuses(self, calls: Sequence[Call]) -> str:
        if not self.place.lanes.is_plain and len({call.sizes for call in calls}) > 1:
            return "model calls in one loss have different numbers of rows, and a stage has several ranks, among which rows are counted"
        return ""

    def agree(self, kind: str, bits: int, flags: int = 0) -> int:
        rows, union = self._peers.agree(kind, bits, self.rows, flags)
        self._on_rows(rows)
        return union

    def share(self, values: list[torch.Tensor] | None, specs: list[Spec]) -> list[torch.Tensor]:
        return self._peers.share(values, specs)

    def push(self, values: list[tuple[int, torch.Tensor]] | None) -> list[tuple[int, torch.Tensor]]:
        return self._peers.push(values)

    def exchange(self, value: object) -> list[object]:
        return self._peers.exchange(value)

    # ---- one backward pass of the loop -----------------------------------------------------------------------------

    def begin_backward(self, aside: bool, terms: bool = False) -> None:
        self._gradients.before(collects=aside, more_comes=terms)

    def end_backward(self, extra: Mapping[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        return self._gradients.after(extra)

    def train(self, loss: ScheduledLoss) -> None:
        calls = [_own(call) for call in loss.calls]

        def share(micro_batch: int, frontiers: list[list[torch.Tensor]]) -> torch.Tensor | None:
            outputs = {
                node: value
                for call, values in zip(calls, frontiers, strict=True)
                for node, value in zip(call.nodes, values, strict=True)
            }
            part, seed = loss.share(micro_batch, outputs), loss.seed(micro_batch)
            if not part.requires_grad:
                return None
            return (
                part if part.numel() == 1 and seed is None else (part * seed).sum() if seed is not None else part.sum()
            )

        place = self._place(loss.together)
        # Logits of a split head stay cut where all of its ranks compute the loss; elsewhere only home does.
        work = Work(calls, place.home_stage, share, takes_cut=loss.together or len(self.ranks) == 1)
        self._run("train", work, self._stages(work, place), self._gradients.reducers(), place=place)
        self._collect_input_gradients(calls)

    def forward_all(self, call: Call, keep: bool, at_lanes: bool = False) -> list[torch.Tensor] | None:
        own, place = _own(call), self._place(at_lanes)
        values: dict[int, list[torch.Tensor]] = {}

        def note(micro_batch: int, frontiers: list[list[torch.Tensor]]) -> None:
            values[micro_batch] = frontiers[0]

        work = Work([own], place.home_stage, note, takes_cut=at_lanes)
        kept = _Kept(work, self._stages(work, place), values)
        with torch.set_grad_enabled(keep):
            self._run("forward", work, kept.stages, {}, keeps=keep, place=place)
        if keep:
            self._kept[own] = kept
        if not (self.at_end if at_lanes else self.is_home):
            return None
        parts = [[t.detach() for t in values[m]] for m in range(own.slots)]
        return [own.join(n, [part[n] for part in parts]) for n in range(len(own.kinds))]

    def backward_all(
        self, call: Call, gradients: list[torch.Tensor | None] | None, reached: tuple[bool, ...], retain: bool
    ) -> None:
        own = _own(call)
        kept = self._kept[own] if retain else self._kept.pop(own)
        home = kept.stages.get(self.place.home_stage)
        if home is not None:
            assert gradients is not None
            for m in range(own.slots):
                seeds = own.cut_gradients(m, gradients)
                pairs = zip(kept.values[m], seeds, strict=True)
                home.micro_batch(m).seeds = [(v, g) for v, g in pairs if g is not None and v.requires_grad]
        for stage in kept.stages.values():
            stage.retain = retain
        self._run("backward", kept.work, kept.stages, {} if retain else self._gradients.reducers())
        self._collect_input_gradients([own])

    def forget(self, call: Call) -> None:
        """No backward of this call will come: its graphs may go."""
        self._kept.pop(_own(call), None)

    # ---- the engine ------------------------------------------------------------------------------------------------

    def _place(self, at_lanes: bool) -> StagePlace:
        """Where the stages are; `at_lanes`: without a home of its own after the last."""
        place = self.place.at_lanes if at_lanes else self.place
        assert place is not None
        return place

    def _stages(self, work: Work, place: StagePlace) -> dict[int, Stage]:
        return {index: WorkStage(index, work) for index in place.stages}

    def _run(
        self,
        kind: ScheduleKind,
        work: Work,
        stages: Mapping[int, Stage],
        reducers: Mapping[int, StageReducer],
        keeps: bool = False,
        place: StagePlace | None = None,
    ) -> None:
        """`place`: where the stages are, if not at `self.place`."""
        place = place or self.place
        slots = work.calls[0].slots
        key = (kind == "train" or keeps or kind == "backward", place, *(call.layout.signature for call in work.calls))
        mailbox = self._mailbox(key, work, place)
        executor = Executor(stages, place.num_devices, self._transport, reducers=reducers, mailbox=mailbox)
        executor.record = self.events is not None
        program = self._program(kind, slots, work, keeps, place)
        grad = kind != "forward" or keeps
        settings = {call.settings: call.settings.now() for call in work.calls}
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                step = executor.run(program, [1.0] * slots)
        except BaseException as error:
            self._gradients.abandon()
            self._peers.break_off(error)
            raise
        for some, before in settings.items():
            some.forwards_ran_since(before)
        if self.events is not None:
            self.events += step.events
        if kind != "forward" and not self._looked:
            self._looked = True
            for call in work.calls:
                call.warn_of_values_left()

    def _program(self, kind: ScheduleKind, slots: int, work: Work, keeps: bool, place: StagePlace) -> Program:
        layouts = work.layouts
        key = (kind, slots, keeps, place, tuple((edge, tuple(each)) for edge, each in layouts.items()))
        if key not in self._programs:
            schedule = place.schedule(kind, slots, list(layouts), layouts)
            self._programs[key] = Program.of(schedule, place.device, keeps=keeps, stages=place.stages)
        return self._programs[key]

    def _mailbox(self, key: object, work: Work, place: StagePlace) -> Mailbox | Bridge:
        """One for each signature: both ends of an edge remember the forms of what travelled last."""
        mailbox = self._mailboxes.pop(key, None)
        if mailbox is None:
            mailbox = make_mailbox(self._transport, place.lanes, work.calls[0].sizes, work.layouts)
        self._mailboxes[key] = mailbox
        while len(self._mailboxes) > _MAILBOXES:
            del self._mailboxes[next(iter(self._mailboxes))]
        return mailbox

    def _collect_input_gradients(self, calls: Sequence[ModelCall]) -> None:
        """Every stage that uses an input adds to its gradient; of lanes that all have the whole of it the first one does."""
        for call in calls:
            found = call.take_input_gradients()
            if self.place.lanes.is_copy:
                found = [t if t is None else torch.zeros_like(t) for t in found]
            wanted = [n for n, t in enumerate(found) if t is not None]
            if wanted and self._peers.size > 1:
                totals = self._peers.add_up([cast("torch.Tensor", found[n]) for n in wanted])
                for n, total in zip(wanted, totals, strict=True):
                    found[n] = total
            call.input_gradients = found


def _own(call: Call) -> ModelCall:
    assert isinstance(call, ModelCall)
    return call
