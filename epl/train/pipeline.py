"""A pipeline of per-stage functions: what `epl.forward_backward` and `epl.forward_eval` run on this rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from epl.cluster.communication import Job
from epl.cluster.topology import Topology
from epl.env import Env, setup_process_groups
from epl.errors import PlanError, UsageError
from epl.graph.collections import CollectingCall
from epl.parallel.pipeline.executor import Program
from epl.parallel.pipeline.mailbox import Mailbox
from epl.parallel.pipeline.parcel import Form, put_together, take_apart
from epl.parallel.pipeline.stage import Backward
from epl.plan.batch import cut_evenly
from epl.plan.schedule import Schedule, check, forward_only, make_schedule
from epl.report.log import notice
from epl.train.collected import collecting
from epl.train.micro import count_rows, cut_batch
from epl.train.place import PipelinePlace
from epl.train.policy import reduce_policy
from epl.train.rehearsal import Rehearsed, Signature, rehearse
from epl.train.stagesetup import StageSetUp

Forward = Callable[..., object]
# Bits 0 to 2 of what ranks tell each other before a step; rows from bit 3 on.
_NEW, _NO_MODULE, _UNTRIED, _ROWS = 1, 2, 4, 3
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ChainStage:
    """One stage's function, called with what the stage before returned and this micro batch."""

    def __init__(self, index: int, last: bool) -> None:
        self._index, self._last = index, last
        self.function: Forward = lambda received: received
        self.micro_batches: Sequence[tuple[object, ...]] = ()
        self.rows: Sequence[tuple[int, int]] = ()
        """Of every micro batch: where they begin and end in the batch."""
        self.collecting: CollectingCall | None = None
        """Who keeps what the function adds to a collection, if anybody does."""
        self.results: dict[int, object] | None = None
        """In an evaluation, by micro batch what the last stage returned."""

    def forward(self, received: Mapping[int, object], micro_batch: int) -> tuple[Mapping[int, object], object]:
        with self._noted(micro_batch):
            result = self.function(received.get(self._index - 1), *self.micro_batches[micro_batch])
        if not self._last:
            return {self._index + 1: result}, None
        if self.results is not None:
            self.results[micro_batch] = result
            return {}, None
        if result is None:
            raise UsageError(
                f"the last stage (stage {self._index}) must return the loss of the micro batch, found None"
            )
        return {}, result

    def _noted(self, micro_batch: int) -> AbstractContextManager[None]:
        if self.collecting is None:
            return contextlib.nullcontext()
        start, stop = self.rows[micro_batch]
        return self.collecting.micro_batch(self._index, start, stop - start)


class Pipeline:
    """This rank's place in the pipeline, and everything that is kept between steps."""

    _current: Pipeline | None = None

    def __init__(self, env: Env, topology: Topology, job: Job) -> None:
        self._env, self._job, self._settings = env, job, env.config.pipeline
        self.num_chunks = self._settings.num_chunks
        self.place = PipelinePlace(topology, job, self.num_chunks)
        last = self.place.num_stages - 1
        self.programs = {index: ChainStage(index, index == last) for index in self.place.stages}
        self.transport = self.place.make_transport()
        # Not one for each set-up: a rank that always has the same modules has one set-up where others take turns between several,
        # and both ends of an edge must remember the same forms. Two, since in an evaluation nothing needs a gradient.
        devices = self.place.num_devices
        self._mailboxes = Mailbox(self.transport, devices), Mailbox(self.transport, devices)
        self._setups: list[StageSetUp] = []
        self._rehearsed = Rehearsed()
        self._share_of_rows = 1.0
        self.events: list[tuple[str, float, float]] | None = None
        """Name, start and end of every action, while somebody records a trace."""
        env.at_close(self._close)

    @staticmethod
    def of(env: Env, what: str) -> Pipeline:
        """The pipeline of this run; made when first asked for, on the topology of the user or one of our own."""
        job = env.job(what)
        current = Pipeline._current
        if current is None or current.place.topology is not env.topology:
            job.meet(what).wait()  # making one is a call of many steps: first make sure that all ranks are here
            if current is not None:
                current._close()
            Pipeline._current = current = Pipeline(env, env.topology or _default_topology(env), job)
        return current

    @property
    def device(self) -> int:
        """This rank among those of its replica."""
        return self.place.device

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.place.num_stages

    # ---- one step --------------------------------------------------------------------------------------------------

    def train(
        self, functions: Sequence[Forward], batch: Sequence[object], modules: list[nn.Module], backward: Backward | None
    ) -> torch.Tensor:
        """One step over all micro batches; their losses, on every rank."""
        known = next((s for s in self._setups if s.is_for(modules, backward)), None)
        signature = Signature.of(functions, batch, trains=True)
        words = (known is None) * _NEW | (not modules) * _NO_MODULE | self._is_untried(signature) * _UNTRIED
        pieces, sizes, union = self._agree("epl.forward_backward", batch, words)
        self._need_modules(bool(union & _NO_MODULE))
        program = self._program(len(pieces), trains=True)
        self._give_work(functions, pieces, sizes, evaluates=False)
        with torch.enable_grad():
            if union & _UNTRIED:
                self._rehearse("epl.forward_backward", signature, pieces[0])
            setup = self._set_up(modules, backward) if union & _NEW or known is None else known
            setup.before_step()
            setup.trainer.record = self.events is not None
            step = setup.trainer.run(program, [n / sum(sizes) for n in sizes])
        setup.after_step()
        if self.events is not None:
            self.events += step.events
        return self._share_losses(step.losses, len(pieces))

    @torch.no_grad()
    def evaluate(self, functions: Sequence[Forward], batch: Sequence[object]) -> list[object]:
        """What the last stage returned for each micro batch, on every rank."""
        signature = Signature.of(functions, batch, trains=False)
        words = (not self._setups) * _NEW | self._is_untried(signature) * _UNTRIED
        pieces, sizes, union = self._agree("epl.forward_eval", batch, words)
        program = self._program(len(pieces), trains=False)
        self._give_work(functions, pieces, sizes, evaluates=True)
        if union & _UNTRIED:
            self._rehearse("epl.forward_eval", signature, pieces[0])
        setup = self._set_up([], None) if union & _NEW else self._setups[-1]
        setup.evaluator.run(program, [])
        results = (self.programs[self.num_stages - 1].results or {}) if self.place.has_last_stage else {}
        return [self._share(results.get(number)) for number in range(len(pieces))]

    def _agree(self, what: str, batch: Sequence[object], words: int) -> tuple[list[tuple[object, ...]], list[int], int]:
        """Tell the others how many rows this rank has, before anybody waits for anybody: micro batches, their rows, all words."""
        said = self._job.meet(what, (count_rows(batch) or 0) << _ROWS | words).wait()
        told = [bits >> _ROWS for bits in said.bits]
        found = {ranks: {told[r] for r in ranks if told[r]} for ranks in self.place.topology.all_groups("model")}
        problems = [f"ranks {list(ranks)}: {sorted(rows)}" for ranks, rows in found.items() if len(rows) != 1]
        if problems:
            raise UsageError(
                f"{what}: the ranks of a model replica must be given batches of the same number of rows (a rank that needs none may "
                f"be given nothing, but not all of them); found {'; '.join(problems)}"
            )
        rows = {ranks: next(iter(numbers)) for ranks, numbers in found.items()}
        own = rows[self.place.topology.ranks("model")]
        self._share_of_rows = own / sum(rows.values())
        number = min(self._settings.num_micro_batch, own)
        sizes = [stop - start for start, stop in cut_evenly(0, own, number)]
        return cut_batch(batch, own, number), sizes, said.union & (1 << _ROWS) - 1

    def _give_work(
        self, functions: Sequence[Forward], pieces: list[tuple[object, ...]], sizes: Sequence[int], *, evaluates: bool
    ) -> None:
        call, rows = collecting(sum(sizes)), cut_evenly(0, sum(sizes), len(sizes))
        for (_, program), function in zip(sorted(self.programs.items()), functions, strict=True):
            program.function, program.micro_batches = function, pieces
            program.collecting, program.rows = call, rows
            program.results = {} if evaluates else None

    def _is_untried(self, signature: Signature) -> bool:
        return self.place.num_devices > 1 and not self._rehearsed.has(signature)

    def _rehearse(self, what: str, signature: Signature, micro_batch: tuple[object, ...]) -> None:
        came_through = rehearse(what, self._job, self.place, self.programs, micro_batch)
        self._rehearsed.add(signature, conclusive=came_through)

    @functools.cache  # noqa: B019 - lives as long as the pipeline, of which there is one
    def _program(self, micro_batches: int, *, trains: bool) -> Program:
        return Program.of(self.schedule(micro_batches, trains=trains), self.device)

    def schedule(self, micro_batches: int, *, trains: bool) -> Schedule:
        """The checked list that every device runs for this number of micro batches."""
        devices, chunks = self.place.num_devices, self.num_chunks
        if trains:
            made = make_schedule(self._settings.strategy, devices, micro_batches, chunks)
            made = made.with_communication().with_reduce()
        else:
            made = forward_only(devices, micro_batches, chunks).with_communication()
        check(made)
        return made

    # ---- results ---------------------------------------------------------------------------------------------------

    def _share_losses(self, losses: Mapping[int, torch.Tensor], number: int) -> torch.Tensor:
        """One message for all of them: numbers as float64, and which dtype they had."""
        if self.place.has_last_stage:
            own = torch.stack([losses[n].reshape(()) for n in range(number)])
            if self.place.num_devices == 1:
                return own
            kind = _DTYPES.index(own.dtype) if own.dtype in _DTYPES else 0
            numbers = torch.cat([torch.tensor([float(kind)], dtype=torch.float64), own.double().cpu()])
        else:
            numbers = torch.empty(number + 1, dtype=torch.float64)
        numbers = numbers.to(self.transport.device)
        self.transport.share(numbers, self.place.num_devices - 1)
        return numbers[1:].to(_DTYPES[int(numbers[0].item())])

    def _share(self, value: object) -> object:
        """The last stage's value on every device of the replica, whatever it is."""
        if self.place.num_devices == 1:
            return value
        source, device = self.place.num_devices - 1, self.transport.device
        form, tensors = take_apart(value) if self.place.has_last_stage else (None, [])
        text = form.encode() if form is not None else b""
        length = torch.tensor([len(text)], dtype=torch.int64, device=device)
        self.transport.share(length, source)
        header = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
        if form is not None:
            header.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.transport.share(header, source)
        if form is not None:
            self.transport.share(form.pack([t.detach() for t in tensors], device), source)
            return value
        form = Form.decode(header.cpu().numpy().tobytes())
        buffer = torch.empty(form.size, dtype=torch.uint8, device=device)
        self.transport.share(buffer, source)
        return put_together(form, [t.clone() for t in form.unpack(buffer)])

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def _need_modules(self, missing: bool) -> None:
        if missing and self.place.num_replicas > 1:
            raise UsageError(
                f"there are {self.place.num_replicas} model replicas: epl.forward_backward needs module=… on every rank, the "
                "parameters of its stage, to reduce their gradients over the replicas"
            )

    def _set_up(self, modules: list[nn.Module], backward: Backward | None) -> StageSetUp:
        """Modules are new on some rank: all ranks make theirs equal, reduced and tied together."""
        for stale in [s for s in self._setups if s.is_for(modules, backward)]:
            stale.close()
            self._setups.remove(stale)
        made = StageSetUp(
            self.place,
            self._job,
            modules,
            backward,
            self.programs,
            self.transport,
            self._mailboxes,
            reduce_policy(self._env.config),
            self._env.config.communication.num_communicators,
            self._factor,
        )
        self._setups.append(made)
        return made

    def _factor(self) -> float:
        """What this replica's gradients count for, see epl/parallel/reducer.py."""
        if self._env.config.communication.gradients_reduce_method == "sum":
            return float(self.place.num_replicas)
        return self.place.num_replicas * self._share_of_rows

    def _close(self) -> None:
        while self._setups:
            self._setups.pop().close()
        if Pipeline._current is self:
            Pipeline._current = None


def _default_topology(env: Env) -> Topology:
    """All ranks in one pipeline, or in pipelines of `pipeline.num_stages` devices."""
    world, stages = env.cluster.world_size, env.config.pipeline.num_stages
    devices = stages if stages is not None else world
    if world % devices:
        below, above = world // devices * devices, (world // devices + 1) * devices
        raise PlanError(
            f"pipeline.num_stages = {devices} does not divide the {world} ranks: a pipeline needs a rank for each stage, and several "
            f"pipelines are replicas. Start {f'{below} or ' if below else ''}{above} ranks, or change it."
        )
    notice(f"pipeline of {devices} devices × {world // devices} replicas (epl.setup_process_groups chooses otherwise)")
    return setup_process_groups([("data", world // devices), ("pipe", devices)])
