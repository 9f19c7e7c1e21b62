"""One parallelized model: its replicas are kept in step, its optimizers and loaders belong to it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from epl.cluster.communication import Job, speaking
from epl.cluster.place import user_place
from epl.data import (
    DataShare,
    FilePlace,
    active_share,
    disagreeing_shares,
    distribute_loader,
    restore_loader,
    set_file_place,
    watch_loader,
)
from epl.env import Env
from epl.errors import PlanError, RanksDisagreeError
from epl.graph import TaskGraphs
from epl.graph.deferred import is_deferred
from epl.parallel import GradientReducer, ReducePolicy, copy_from_first, sync_batch_norm
from epl.parallel.clip_torch import install_clipping
from epl.parallel.hook import ModuleHook
from epl.parallel.reducer import Named
from epl.plan import Plan
from epl.report.log import notice, warn
from epl.train.arguments import Arguments
from epl.train.lazy.foreign import ForeignParameter
from epl.train.lazy.lane import ranks_of, watch_steps
from epl.train.lbfgs import step_whole_vectors
from epl.train.meta import MetaModel
from epl.train.policy import reduce_policy
from epl.train.scaling import agree_on_unscaling
from epl.train.split.cutting import agree_on_deferred
from epl.train.split.stepping import step_whole_where_needed
from epl.train.weights import replica_factor, row_factor, within_replica

if TYPE_CHECKING:
    from epl.train.cut.model import CutModel
    from epl.train.cut.sources import StageSource
    from epl.train.split.shared import SharedSplit

_parallelized: list[Replicas] = []  # since epl.init; its close() takes them out


class Replicas:
    """Keeps the replicas of one model equal: weights and buffers at first, gradients in every step.

    Reductions, by `communication.clip_after_allreduce` and the number k of ranks that divide a replica's rows:

        True             one reducer over all ranks, during backward
        False, k = 1     one reducer over all ranks, at the optimizer's step; the user clips the replica's own gradient before
        False, k > 1     one over the replica's ranks during backward, one over replicas at the step
    """

    def __init__(self, env: Env, model: nn.Module, plan: Plan, source: StageSource, taskgraphs: TaskGraphs) -> None:
        self.model, self.plan, self._env = model, plan, env
        self._job = env.job("epl.parallelize")
        self.optimizers: list[Optimizer] = []
        """Those given to `parallelize` with this model."""
        self.outside: list[Named] = []
        """Trained parameters that are not the model's: of a loss, or of an optimizer only."""
        self.cut: CutModel | None = None
        """What stands in for the model's forward, if it runs in stages or micro batches."""
        self.split: SharedSplit | None = None
        """The parts under split, on devices that all TaskGraphs share."""
        self._looked_at: tuple[int, ...] = ()
        """The parameters in which `_unknown_parameters` has looked for unknown ones."""
        self.meta = MetaModel(model, self._job)
        self._undo: list[Callable[[], None]] = []
        self.reducers: list[GradientReducer] = []
        self._refuse_shared_parameters()
        _parallelized.append(self)
        self._undo.append(install_clipping())
        if plan.world_size > 1:
            self._meet_others(model)
        if plan.layout != "staged" and self.meta.waits:
            self.meta.materialise(model.parameters())
            self._undo.append(model.register_forward_pre_hook(ModuleHook(lambda *_: self.meta.check())).remove)
        elif self.meta.waits:
            hook = ModuleHook(self.meta.refuse_plain_load)
            self._undo.append(model.register_load_state_dict_pre_hook(hook).remove)  # type: ignore[no-untyped-call]
        if plan.world_size > 1:
            if "split" in plan.needs():
                agree_on_deferred(self._job, model)
            self._make_equal([*(p for p in model.parameters() if not is_deferred(p)), *model.buffers()])
            if plan.layout == "colocated" and "split" in plan.needs():  # what is cut is known at the first call
                from epl.train.split.shared import SharedSplit  # it needs this class in turn

                self.split = SharedSplit(env, model, self, taskgraphs)
            elif plan.layout != "staged":  # else every rank keeps only its part, once it is known which
                self._sync_batch_norm()
                self.reducers = self._make_reducers()
                self._undo += [reducer.close for reducer in self.reducers]
            # Of every optimizer: one that is made later, and never given to parallelize, must not escape.
            self._undo.append(register_optimizer_step_pre_hook(self._before_step).remove)
            if plan.layout == "staged" or not env.config.communication.clip_after_allreduce:
                self._undo.append(agree_on_unscaling(self.trains, self.any_rank))
            if plan.layout == "staged":
                self._undo += [step_whole_vectors(self), watch_steps()]
                # LBFGS needs the parameters of all stages at once: lbfgs.py.
                self._undo.append(step_whole_where_needed(model, ranks_of, but=LBFGS))
        if plan.layout == "staged" or plan.settings.num_micro_batch > 1:
            from epl.train.cut.make import cut_model  # it needs this class in turn

            self.cut = cut_model(env, model, source, self)
            self._undo.append(self.cut.close)
        set_file_place(functools.partial(file_place, plan, env))
        self._undo.append(lambda: set_file_place(None))
        env.at_close(self._close)

    @staticmethod
    def of(model: nn.Module) -> Replicas | None:
        """The replicas of this model, if it is parallelized already."""
        return next((found for found in _parallelized if found.model is model), None)

    @staticmethod
    def all() -> list[Replicas]:
        """Every model that was parallelized since `epl.init`."""
        return list(_parallelized)

    def take(self, arguments: Arguments, loss_fn: object) -> None:
        """Make these optimizers and loaders part of the training of this model."""
        if isinstance(loss_fn, nn.Module):
            self._adopt_outside([(f"loss_fn.{name}", p) for name, p in loss_fn.named_parameters()])
        elif loss_fn is not None and self.plan.world_size > 1:
            notice("loss_fn has no parameters of its own and no stages to run on: it is not needed here")
        for optimizer in arguments.optimizers:
            self._take_optimizer(optimizer)
        for loader in arguments.loaders:
            self._take_loader(loader)

    def at_close(self, undo: Callable[[], None]) -> None:
        """Run `undo` when epl lets go of the model."""
        self._undo.append(undo)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        with contextlib.ExitStack() as stack:
            for reducer in self.reducers:
                stack.enter_context(reducer.no_sync())
            yield

    # ---- the model -------------------------------------------------------------------------------------------------

    def _refuse_shared_parameters(self) -> None:
        own = {id(p): name for name, p in self.model.named_parameters()}
        for other in _parallelized:
            shared = [own[id(p)] for p in other.model.parameters() if id(p) in own and p.requires_grad]
            if shared:
                raise PlanError(
                    f"{len(shared)} trained parameters of this model belong to a model that is parallelized already "
                    f"({', '.join(shared[:3])}): their gradients would be reduced twice. Parallelize one module that holds both "
                    "(nn.ModuleList([a, b])), or call epl.init() to start anew."
                )
            # An optimizer given along with another model may hold this one's parameters: they are this model's.
            other.outside = [(name, p) for name, p in other.outside if id(p) not in own]
            for reducer in other.reducers:
                reducer.drop_parameters(own)

    def _meet_others(self, model: nn.Module) -> None:
        shapes = {
            name: (tuple(t.shape), str(t.dtype), *(["meta"] if t.is_meta else []))
            for name, t in [*model.named_parameters(), *model.named_buffers()]
        }
        everyone: list[Any] = self._job.gather("epl.parallelize", shapes)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                names = [n for n in everyone[0].keys() | theirs.keys() if everyone[0].get(n) != theirs.get(n)]
                found = "\n".join(
                    f"  {n}: rank 0 {everyone[0].get(n)}, rank {rank} {theirs.get(n)}" for n in sorted(names)[:5]
                )
                raise RanksDisagreeError(
                    f"the model is not the same on rank 0 and rank {rank}: {len(names)} tensors differ\n{found}\n"
                    "Build it alike on every rank; if on the meta device, then on all: epl.load_full_state_dict gives them rank 0's state."
                )

    def _make_equal(self, tensors: list[torch.Tensor]) -> None:
        assert dist.group.WORLD is not None
        with speaking(self._job, "epl.parallelize"):
            copy_from_first([t for t in tensors if not t.is_meta], dist.group.WORLD)

    def _sync_batch_norm(self) -> None:
        """Batch statistics over all replicas if asked for; over a replica's own ranks always, where they divide its rows."""
        everywhere = self._env.config.communication.sync_batch_norm
        if everywhere or self.plan.parts > 1:
            # A group of its own: statistics travel in the middle of backward, between buckets that may come in another
            # order on another rank.
            group = self._new_group() if everywhere else self.new_groups(self._ranks_of_replicas())
            synced = sync_batch_norm(self.model, group, factor=self.factor, counted=_rows_count, guard=self.guard)
            self._undo.append(synced.undo)

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _make_reducers(self) -> list[GradientReducer]:
        settings = self._env.config.communication
        plan = self.plan
        policy = reduce_policy(self._env.config, "backward" if settings.clip_after_allreduce else "step")
        if settings.clip_after_allreduce or plan.parts == 1:
            factor = self.factor if settings.clip_after_allreduce else self.replica_factor
            first, *others = self._env.communicators()
            return [self._reducer(first, policy, factor, communicators=others)]
        replicas = self._ranks_of_replicas()
        inside, across = self.new_groups(replicas), self.new_groups([list(r) for r in zip(*replicas, strict=True)])
        within = dataclasses.replace(policy, when="backward")
        return [
            self._reducer(inside, within, lambda: plan.parts * within_replica(plan.parts, active_share())),
            self._reducer(across, policy, self.replica_factor),
        ]

    def _reducer(
        self, group: dist.ProcessGroup, policy: ReducePolicy, factor: Callable[[], float], **more: Any
    ) -> GradientReducer:
        return GradientReducer(
            self.model,
            group,
            policy=policy,
            factor=factor,
            meet=self._meet,
            guard=self.guard,
            on_new=self.on_new,
            **more,
        )

    def _ranks_of_replicas(self) -> list[list[int]]:
        return [list(self.plan.replica_ranks(replica)) for replica in range(self.plan.num_replicas)]

    def _new_group(self) -> dist.ProcessGroup:
        return self.new_groups([list(range(self.plan.world_size))])

    def new_groups(self, ranks: list[list[int]]) -> dist.ProcessGroup:
        """The one of these groups that this rank is in; all ranks make them together."""
        with speaking(self._job, "making process groups"):
            made = dist.new_subgroups_by_enumeration(ranks, timeout=self._job.timeout)  # type: ignore[no-untyped-call]
        group: dist.ProcessGroup = made[0]
        return group

    def factor(self) -> float:
        """What this rank's gradients count for in an average over all ranks."""
        plan = self.plan
        return row_factor(plan.settings.gradients_reduce_method, plan.world_size, plan.parts, active_share())

    def replica_factor(self) -> float:
        """What the replica's gradient counts for in an average over replicas."""
        plan = self.plan
        return replica_factor(plan.settings.gradients_reduce_method, plan.num_replicas, plan.parts, active_share())

    def _meet(self, what: str, bits: int) -> Callable[[], int]:
        meeting = self._job.meet(self._title(what), bits)
        return lambda: meeting.wait().union

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Inside, c10d's errors become epl's, with this model named."""
        return speaking(self._job, self._title(what))

    def _title(self, what: str) -> str:
        taskgraphs = ", ".join(t.name for t in self.plan.taskgraphs)
        return f"{what} of {type(self.model).__name__} (TaskGraph {taskgraphs})"

    def on_new(self, parameters: list[Named]) -> None:
        """Parameters that turned up after `parallelize` start from rank 0's values like all others."""
        self._job.check_same(
            "parameters added to the model", [name for name, _ in parameters], "Add them on every rank."
        )
        self._make_equal([p for _, p in parameters])

    # ---- optimizers and loaders --------------------------------------------------------------------------------------

    def _take_optimizer(self, optimizer: Optimizer) -> None:
        if self.plan.world_size == 1 or any(optimizer is known for known in self.optimizers):
            return
        self.optimizers.append(optimizer)
        self._adopt_outside(self._unknown_parameters())
        if self.cut is None or self.cut.carrier is None:  # of a placed model every rank has the state of its own part
            self._make_state_equal(optimizer)
        if len(self.optimizers) == 1:
            self._undo.append(self.model.register_forward_pre_hook(ModuleHook(self._before_forward)).remove)

    def _unknown_parameters(self) -> list[Named]:
        held = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        looked_at = (len(_parallelized), *map(id, held))
        if looked_at == self._looked_at:  # in every forward: walking through all modules takes much longer
            return []
        self._looked_at = looked_at
        if self.cut is not None:
            self.cut.refuse_new_parameters()
        known = {id(p) for r in _parallelized for p in r.looked_after()}
        new = [p for p in held if id(p) not in known and not isinstance(p, ForeignParameter)]
        return [(f"outside.{len(self.outside) + n}", p) for n, p in enumerate(new)]

    def looked_after(self) -> list[nn.Parameter]:
        """The parameters of the model, of all its stages, and those outside that are trained with it."""
        if self.plan.layout == "staged" or self.split is not None or not self.reducers:
            return [*self.model.parameters(), *(p for _, p in self.outside)]
        return [p for reducer in self.reducers for _, p in reducer.parameters()]

    def _adopt_outside(self, parameters: list[Named]) -> None:
        """Parameters of a loss, or of an optimizer only: they live on every rank and are reduced like the model's."""
        if parameters and self.plan.world_size > 1:
            self.outside += parameters
            if not self.reducers:
                self.on_new(parameters)
            for reducer in self.reducers:
                reducer.add_parameters(parameters)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if torch.is_grad_enabled():
            self._adopt_outside(self._unknown_parameters())

    def _make_state_equal(self, optimizer: Optimizer) -> None:
        state = [(key, value) for entry in optimizer.state.values() for key, value in entry.items()]
        names = [(key, tuple(v.shape) if isinstance(v, torch.Tensor) else repr(v)) for key, v in state]
        self._job.check_same(
            "the optimizer's state", names, "Load the same checkpoint on every rank before epl.parallelize."
        )
        self._make_equal([value for _, value in state if isinstance(value, torch.Tensor)])

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        own = {id(p) for reducer in self.reducers for _, p in reducer.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return
        if active_share() is None and self.plan.layout != "staged":  # the ranks of stages tell each other their rows
            notice(
                "this step's batch did not come from a loader given to epl.parallelize: every rank is taken to have read as "
                "many rows as the others, and rows of its own"
            )
        if disagreeing_shares():
            warn(
                f"two loaders gave this rank different shares of the rows in one step ({user_place()}): gradients are "
                "weighted by the share of the batch that was read last. Use loaders of the same length and batch size, or "
                "io.uneven_tail = 'drop'."
            )
        for reducer in self.reducers:
            if reducer.policy.when == "step":
                reducer.reduce()

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether any parameter of the model is in it: alike on every rank, wherever the parameters are."""
        own = {id(p) for p in self.model.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def any_rank(self, found: bool) -> bool:
        """Whether any rank has found something; all ranks ask together."""
        return self._job.meet(self._title("torch.amp.GradScaler"), int(found)).wait().union > 0

    def _take_loader(self, loader: DataLoader[object]) -> None:
        own = self.plan.data_shares[self._job.rank]
        io = self._env.config.io
        share = DataShare(
            replicas=self.plan.num_replicas,
            replica=own.replica,
            parts=own.parts,
            part=own.part,
            copies=self.plan.devices_per_replica // own.parts,
            num_micro_batch=self.plan.settings.num_micro_batch,
            drop_tail=io.uneven_tail == "drop",
            sliced=io.slicing,
        )
        distribute_loader(loader, share, _LoaderExchange(self._job))
        self._undo.append(functools.partial(_restore, loader))
        if share.alone and share.num_micro_batch == 1:
            self._undo.append(watch_loader(loader))

    def _close(self) -> None:
        while self._undo:
            self._undo.pop()()
        _parallelized.remove(self)


def _rows_count() -> bool:
    """Whether the rows this rank sees count: they do not if they only repeat others'."""
    share = active_share()
    return share is None or not share.padded


def _restore(loader: DataLoader[object]) -> None:
    restore_loader(loader)


class _LoaderExchange:
    """How loaders of all ranks agree, over the job's words."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def all_gather(self, value: object) -> list[object]:
        return self._job.gather("reading the loader", value)

    def broadcast(self, value: object) -> object:
        return self._job.share("reading the loader", value)


def file_place(plan: Plan, env: Env) -> FilePlace:
    """Where this rank stands among those that read files of their own: one reader for each share of the rows."""
    shares, io, cluster = plan.data_shares, env.config.io, env.cluster
    readers: dict[tuple[int, int], int] = {}  # (replica, part) → the first rank that reads it
    for rank, share in enumerate(shares):
        readers.setdefault((share.replica, share.part), rank)
    own = readers[shares[cluster.rank].replica, shares[cluster.rank].part]
    of_worker: list[list[int]] = [[] for _ in range(cluster.worker_num)]
    for rank in readers.values():
        of_worker[rank // cluster.gpu_num_per_worker].append(rank)
    worker = own // cluster.gpu_num_per_worker
    return FilePlace(
        replicas_per_worker=tuple(len(ranks) for ranks in of_worker),
        worker=worker,
        local_replica=of_worker[worker].index(own),
        slicing=io.slicing,
        unbalanced=io.unbalanced_io_slicing,
        drop_last=io.drop_last_files,
    )
