"""A pipeline of per-stage functions: what `epl.forward_backward` and `epl.forward_eval` run on this rank."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from epl.cluster.communication import Job, speaking
from epl.cluster.topology import Topology
from epl.env import Env, setup_process_groups
from epl.errors import PlanError, UsageError
from epl.parallel import GradientReducer, ReducePolicy, copy_from_first
from epl.parallel.clip import count_over
from epl.parallel.pipeline.executor import Executor, Program
from epl.parallel.pipeline.parcel import Form, put_together, take_apart
from epl.parallel.pipeline.stage import Backward, Stage
from epl.parallel.pipeline.ties import Ties, check_holders, tied_parameters
from epl.parallel.pipeline.transport import Direction, Edge, GroupTransport, Transport
from epl.plan.batch import cut_evenly
from epl.plan.schedule import Schedule, check, forward_only, make_schedule
from epl.report.log import notice
from epl.train.micro import count_rows, cut_batch

Forward = Callable[..., object]


class ChainStage:
    """One stage's function, called with what the stage before returned and this micro batch."""

    def __init__(self, index: int, last: bool) -> None:
        self._index, self._last = index, last
        self.function: Forward = lambda received: received
        self.micro_batches: Sequence[tuple[object, ...]] = ()
        self.evaluates = False
        self.results: dict[int, object] = {}
        """By micro batch what the last stage returned in an evaluation."""

    def forward(self, received: Mapping[int, object], micro_batch: int) -> tuple[Mapping[int, object], object]:
        result = self.function(received.get(self._index - 1), *self.micro_batches[micro_batch])
        if not self._last:
            return {self._index + 1: result}, None
        if self.evaluates:
            self.results[micro_batch] = result
            return {}, None
        if result is None:
            raise UsageError(
                f"the last stage (stage {self._index}) must return the loss of the micro batch, found None"
            )
        return {}, result


@dataclass(frozen=True)
class Rows:
    """How many rows this replica has in this step, and all replicas together."""

    own: int
    total: int


class Pipeline:
    """This rank's place in the pipeline, and everything that is kept between steps."""

    _current: Pipeline | None = None

    def __init__(self, env: Env, topology: Topology, job: Job) -> None:
        self._env, self._job, self._topology = env, job, topology
        config = env.config.pipeline
        self.num_devices = topology.size("pipe") if topology.has("pipe") else 1
        self.device = topology.rank("pipe") if topology.has("pipe") else 0
        self.num_chunks = config.num_chunks
        self.num_stages = self.num_devices * self.num_chunks
        data_axes = topology.axes.data_axes
        self._replica_groups = topology.axes.groups_over(*data_axes) if data_axes else []
        self.num_replicas = len(self._replica_groups[0]) if self._replica_groups else 1
        own = range(self.device, self.num_stages, self.num_devices)
        self.programs = {index: ChainStage(index, index == self.num_stages - 1) for index in own}
        self.transport: Transport = self._make_transport()
        self._stages: dict[int, Stage] = {}
        self._executors: dict[bool, Executor] = {}
        self._modules: list[nn.Module] | None = None
        self._backward: Backward | None = None
        self._reducers: dict[int, GradientReducer] = {}
        self._ties: Ties | None = None
        self._rows = Rows(1, 1)
        self._undo: list[Callable[[], None]] = []
        self.events: list[tuple[str, float, float]] | None = None
        """Name, start and end of every action, while somebody records a trace."""
        env.at_close(self._close)

    @staticmethod
    def of(env: Env, what: str) -> Pipeline:
        """The pipeline of this run; made when first asked for, on the topology of the user or one of our own."""
        job = env.job(what)
        topology = env.topology or _default_topology(env)
        if Pipeline._current is None or Pipeline._current._topology is not topology:
            if Pipeline._current is not None:
                Pipeline._current._close()
            Pipeline._current = Pipeline(env, topology, job)
        return Pipeline._current

    # ---- one step --------------------------------------------------------------------------------------------------

    def train(
        self, functions: Sequence[Forward], batch: Sequence[object], modules: list[nn.Module], backward: Backward | None
    ) -> torch.Tensor:
        """One step over all micro batches; their losses, on every rank."""
        pieces = self._agree("epl.forward_backward", batch, needs_setup=self._is_new(modules, backward))
        if self._setup_wanted:
            self._set_up(modules, backward)
        number = len(pieces)
        weights = [rows / self._rows.own for rows, _ in pieces]
        self._give_work(functions, [piece for _, piece in pieces], evaluates=False)
        for reducer in self._reducers.values():
            reducer.accumulate()
        with torch.enable_grad():
            step = self._executor(record=self.events is not None).run(self._program(number, trains=True), weights)
        if self.events is not None:
            self.events += step.events
        if self._ties is not None:
            self._ties.add_up_gradients()
        return self._share_losses(step.losses, number)

    @torch.no_grad()
    def evaluate(self, functions: Sequence[Forward], batch: Sequence[object]) -> list[object]:
        """What the last stage returned for each micro batch, on every rank."""
        pieces = self._agree("epl.forward_eval", batch, needs_setup=False)
        self._give_work(functions, [piece for _, piece in pieces], evaluates=True)
        self._executor(record=False).run(self._program(len(pieces), trains=False), [1.0] * len(pieces))
        results = self.programs[self.num_stages - 1].results if self._has_last else {}
        return [self._share(results.pop(number, None)) for number in range(len(pieces))]

    def _agree(self, what: str, batch: Sequence[object], *, needs_setup: bool) -> list[tuple[int, tuple[object, ...]]]:
        """Tell the others how many rows this rank has, before anybody waits for anybody; the micro batches with their rows."""
        rows = count_rows(batch)
        if rows == 0:
            rows = None
        said = self._job.meet(what, (rows or 0) << 1 | needs_setup).wait()
        self._setup_wanted = bool(said.union & 1)
        told = [bits >> 1 for bits in said.bits]
        of_replica: dict[tuple[int, ...], set[int]] = {}
        for ranks in self._topology.all_groups("model"):
            of_replica[ranks] = {told[rank] for rank in ranks if told[rank]}
        problems = [f"ranks {list(r)}: {sorted(found)}" for r, found in of_replica.items() if len(found) != 1]
        if problems:
            raise UsageError(
                f"{what}: all ranks of a model replica must be given batches of the same number of rows (a rank that needs none may "
                f"be given nothing, but not all of them); found {'; '.join(problems)}"
            )
        counts = {ranks: next(iter(found)) for ranks, found in of_replica.items()}
        own = counts[self._topology.ranks("model")]
        self._rows = Rows(own, sum(counts.values()))
        pieces = cut_batch(batch, own, min(self._env.config.pipeline.num_micro_batch, own))
        sizes = [stop - start for start, stop in cut_evenly(0, own, len(pieces))]
        return list(zip(sizes, pieces, strict=True))

    def _give_work(self, functions: Sequence[Forward], pieces: list[tuple[object, ...]], *, evaluates: bool) -> None:
        for (_, program), function in zip(sorted(self.programs.items()), functions, strict=True):
            program.function, program.micro_batches, program.evaluates = function, pieces, evaluates

    def _executor(self, *, record: bool) -> Executor:
        grad = torch.is_grad_enabled()
        if not self._stages:
            self._stages = {index: Stage(index, program, self._backward) for index, program in self.programs.items()}
        if grad not in self._executors:  # evaluation has its own, since forms differ: nothing needs a gradient
            reducers = self._reductions() if grad else {}
            self._executors[grad] = Executor(self._stages, self.num_devices, self.transport, reducers=reducers)
        executor = self._executors[grad]
        executor.record = record
        return executor

    def _reductions(self) -> dict[int, _StageReduction]:
        """One for each module, which may be that of several stages."""
        stages = Counter(id(reducer) for reducer in self._reducers.values())
        made = {id(reducer): _StageReduction(reducer, stages[id(reducer)]) for reducer in self._reducers.values()}
        return {stage: made[id(reducer)] for stage, reducer in self._reducers.items()}

    @functools.cache  # noqa: B019 - lives as long as the pipeline, of which there is one
    def _program(self, micro_batches: int, *, trains: bool) -> Program:
        return Program.of(self.schedule(micro_batches, trains=trains), self.device)

    def schedule(self, micro_batches: int, *, trains: bool) -> Schedule:
        """The checked list that every device runs for this number of micro batches."""
        name = self._env.config.pipeline.strategy
        if trains:
            made = (
                make_schedule(name, self.num_devices, micro_batches, self.num_chunks).with_communication().with_reduce()
            )
        else:
            made = forward_only(self.num_devices, micro_batches, self.num_chunks).with_communication()
        check(made)
        return made

    # ---- results ---------------------------------------------------------------------------------------------------

    @property
    def _has_last(self) -> bool:
        return self.num_stages - 1 in self.programs

    def _share_losses(self, losses: Mapping[int, torch.Tensor], number: int) -> torch.Tensor:
        own = torch.stack([losses[n].reshape(()) for n in range(number)]) if self._has_last else None
        shared = self._share(own)
        assert isinstance(shared, torch.Tensor)
        return shared

    def _share(self, value: object) -> object:
        """The last stage's value on every device of the replica."""
        if self.num_devices == 1:
            return value
        source, device = self.num_devices - 1, self.transport.device
        form, tensors = take_apart(value) if self._has_last else (None, [])
        text = form.encode() if form is not None else b""
        length = torch.tensor([len(text)], dtype=torch.int64, device=device)
        self.transport.share(length, source)
        header = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
        if form is not None:
            header.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.transport.share(header, source)
        if form is None:
            form = Form.decode(header.cpu().numpy().tobytes())
            buffer = torch.empty(form.size, dtype=torch.uint8, device=device)
        else:
            buffer = form.pack([t.detach() for t in tensors], device)
        self.transport.share(buffer, source)
        return value if self._has_last else put_together(form, [t.clone() for t in form.unpack(buffer)])

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def _is_new(self, modules: list[nn.Module], backward: Backward | None) -> bool:
        same = self._modules is not None and len(self._modules) == len(modules)
        same = same and all(a is b for a, b in zip(self._modules or [], modules, strict=True))
        return not same or backward is not self._backward

    def _set_up(self, modules: list[nn.Module], backward: Backward | None) -> None:
        """Modules are new: make their replicas equal, reduce their gradients, join tied weights. All ranks do it together."""
        self._undo_set_up()
        self._modules, self._backward, self._stages, self._executors = modules, backward, {}, {}
        if self.num_replicas > 1:
            self._need_modules(modules)
            group = self._groups(self._replica_groups)
            with speaking(self._job, "epl.forward_backward"):
                copy_from_first([t for m in dict.fromkeys(modules) for t in [*m.parameters(), *m.buffers()]], group)
            made = {id(m): self._reducer(m, group) for m in dict.fromkeys(modules)}
            self._reducers = {stage: made[id(m)] for stage, m in zip(sorted(self.programs), modules, strict=True)}
            self._undo += [reducer.close for reducer in made.values()]
        self._tie(modules)
        elsewhere = self._ties.counted_elsewhere if self._ties is not None else set()
        if self.num_devices > 1 and modules:
            parameters = [p for m in dict.fromkeys(modules) for p in m.parameters()]
            self._undo.append(count_over(parameters, self._topology.group("pipe"), counted_elsewhere=elsewhere))

    def _need_modules(self, modules: list[nn.Module]) -> None:
        if not modules:
            raise UsageError(
                f"there are {self.num_replicas} model replicas: epl.forward_backward needs module=…, the parameters of this rank's "
                "stage, to reduce their gradients over the replicas"
            )

    def _reducer(self, module: nn.Module, group: dist.ProcessGroup) -> GradientReducer:
        settings = self._env.config.communication
        policy = ReducePolicy(
            method=settings.gradients_reduce_method,
            max_splits=settings.max_splits,
            fp16=settings.fp16,
            fp16_scale=settings.fp16_scale,
            sparse_as_dense=settings.sparse_as_dense,
        )
        communicators = [self._groups(self._replica_groups) for _ in range(settings.num_communicators - 1)]
        return GradientReducer(
            module, group, policy=policy, factor=self._factor, communicators=communicators, guard=self._guard
        )

    def _factor(self) -> float:
        if self._env.config.communication.gradients_reduce_method == "sum":
            return float(self.num_replicas)
        return self.num_replicas * self._rows.own / self._rows.total

    def _tie(self, modules: list[nn.Module]) -> None:
        own = tied_parameters(modules)
        described = {key: (tuple(p.shape), str(p.dtype)) for key, p in own.items()}
        told: list[Any] = self._job.gather("epl.forward_backward", described)
        pipes = (
            self._topology.all_groups("pipe")
            if self._topology.has("pipe")
            else [(r,) for r in range(self._job.world_size)]
        )
        keys = sorted({key for words in told for key in words})
        groups: dict[str, dist.ProcessGroup] = {}
        holders: dict[str, list[int]] = {}
        for key in keys:
            everywhere = [[r for r in ranks if key in told[r]] for ranks in pipes]
            for ranks in everywhere:  # every rank makes every group, in the same order
                if len(ranks) > 1:
                    group = dist.new_group(ranks, timeout=self._job.timeout)
                    if self._job.rank in ranks:
                        groups[key] = group
        mine = [told[r] for r in self._topology.ranks("pipe")] if self._topology.has("pipe") else [described]
        holders = check_holders(mine)
        self._ties = Ties(own, holders, self.device, _GroupAdder(groups, self._job)) if own else None

    def _make_transport(self) -> Transport:
        pipes = self._topology.all_groups("pipe") if self._topology.has("pipe") else []
        if not pipes:
            return _NoTransport(self._job.device)
        pipe = self._groups(pipes)
        separate: dict[tuple[Edge, Direction], dist.ProcessGroup] = {}
        if self._job.device.type != "cpu":
            directions: tuple[Direction, Direction] = ("forward", "backward")
            for stage in range(self.num_stages - 1):
                for direction in directions:
                    separate[(stage, stage + 1), direction] = self._groups(pipes)
        return GroupTransport(
            lambda edge, direction: separate.get((edge, direction), pipe), pipe, self._job.device, self._guard
        )

    def _groups(self, ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        with speaking(self._job, "making process groups"):
            made = dist.new_subgroups_by_enumeration([list(r) for r in ranks], timeout=self._job.timeout)  # type: ignore[no-untyped-call]
        group: dist.ProcessGroup = made[0]
        return group

    def _guard(self, what: str) -> AbstractContextManager[None]:
        stages = ", ".join(map(str, self.programs))
        return speaking(self._job, f"{what} (this rank has stage {stages})")

    def _undo_set_up(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._reducers, self._ties = {}, None

    def _close(self) -> None:
        self._undo_set_up()
        if Pipeline._current is self:
            Pipeline._current = None


class _StageReduction:
    """Lets the reducer of a module send once the last backward of all its stages has come."""

    def __init__(self, reducer: GradientReducer, stages: int) -> None:
        self._reducer, self._stages, self._left = reducer, stages, stages

    def last_backward(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._reducer.send_next()

    def finish(self) -> None:
        self._reducer.finish()
        self._left = self._stages


class _GroupAdder:
    def __init__(self, groups: Mapping[str, dist.ProcessGroup], job: Job) -> None:
        self._groups, self._job = groups, job

    def add_up(self, key: str, tensor: torch.Tensor) -> None:
        with speaking(self._job, f"adding up the gradient of the tied weight {key!r}"):
            dist.all_reduce(tensor, group=self._groups[key])

    def copy_first(self, key: str, tensor: torch.Tensor) -> None:
        with speaking(self._job, f"copying the tied weight {key!r}"):
            dist.broadcast(tensor, group=self._groups[key], group_src=0)


class _NoTransport:
    """One device has nobody to talk to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, peer: int, edge: Edge, direction: Direction, buffer: torch.Tensor) -> Any:
        raise AssertionError("one device sends nothing")

    receive = send

    def share(self, buffer: torch.Tensor, source: int) -> None:
        raise AssertionError("one device shares nothing")


def _default_topology(env: Env) -> Topology:
    """All ranks in one pipeline, or in pipelines of `pipeline.num_stages` devices."""
    world, stages = env.cluster.world_size, env.config.pipeline.num_stages
    devices = stages if stages is not None else world
    if world % devices:
        raise PlanError(
            f"pipeline.num_stages = {devices} does not divide the {world} ranks: a pipeline needs a rank for each stage, and several "
            f"of them make replicas. Start {devices * max(1, world // devices)} or {devices * (world // devices + 1)} ranks, or change it."
        )
    notice(f"pipeline of {devices} devices × {world // devices} replicas (epl.setup_process_groups chooses otherwise)")
    return setup_process_groups([("data", world // devices), ("pipe", devices)])
