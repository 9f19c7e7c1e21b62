"""What `epl.forward_backward` keeps for the modules of this rank's stages: reduction over replicas, tied weights, norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from epl.cluster.communication import Job, speaking
from epl.parallel import GradientReducer, ReducePolicy, copy_from_first
from epl.parallel.clip_torch import count_over
from epl.parallel.pipeline.executor import Executor
from epl.parallel.pipeline.mailbox import Mailbox
from epl.parallel.pipeline.stage import Backward, Stage, StageProgram
from epl.parallel.pipeline.ties import Ties, check_holders, describe, tied_parameters
from epl.parallel.pipeline.transport import Transport
from epl.train.place import PipelinePlace


class StageSetUp:
    """Made once for a list of modules (one for each stage of this rank, or none), by all ranks together."""

    def __init__(
        self,
        place: PipelinePlace,
        job: Job,
        modules: Sequence[nn.Module],
        backward: Backward | None,
        programs: Mapping[int, StageProgram],
        transport: Transport,
        mailboxes: tuple[Mailbox, Mailbox],
        policy: ReducePolicy,
        num_communicators: int,
        factor: Callable[[], float],
    ) -> None:
        """`mailboxes`: of training and of evaluation."""
        self.modules, self.backward = list(modules), backward
        self._place, self._job = place, job
        self._undo: list[Callable[[], None]] = []
        self._reducers: dict[int, GradientReducer] = {}
        distinct = list(dict.fromkeys(modules))
        if place.num_replicas > 1 and distinct:
            self._reduce_over_replicas(distinct, sorted(programs), policy, num_communicators, factor)
        self._ties = self._join_ties(distinct)
        elsewhere = self._ties.counted_elsewhere if self._ties is not None else set()
        if distinct and (place.num_devices > 1 or elsewhere):
            parameters = [p for module in distinct for p in module.parameters()]
            pipe = place.topology.group("pipe") if place.num_devices > 1 else None
            self._undo.append(count_over(parameters, pipe, counted_elsewhere=elsewhere))
        stages = {index: Stage(index, program, backward) for index, program in programs.items()}
        training, evaluation = mailboxes
        self.trainer = Executor(stages, place.num_devices, transport, reducers=self._reductions(), mailbox=training)
        self.evaluator = Executor(stages, place.num_devices, transport, mailbox=evaluation)

    def is_for(self, modules: Sequence[nn.Module], backward: Backward | None) -> bool:
        """Whether this was made for these very modules."""
        same = len(self.modules) == len(modules) and all(a is b for a, b in zip(self.modules, modules, strict=True))
        return same and backward is self.backward

    def before_step(self) -> None:
        """Until its last backward a stage only accumulates."""
        if self._ties is not None:
            self._ties.set_aside()
        for reducer in dict.fromkeys(self._reducers.values()):
            reducer.accumulate()

    def after_step(self) -> None:
        """Gradients are reduced over replicas; those of tied weights are still to be added up."""
        if self._ties is not None:
            self._ties.add_up_gradients()

    def close(self) -> None:
        """Take everything off the modules again."""
        while self._undo:
            self._undo.pop()()

    def _reduce_over_replicas(
        self,
        modules: list[nn.Module],
        stages: list[int],
        policy: ReducePolicy,
        num_communicators: int,
        factor: Callable[[], float],
    ) -> None:
        first, *others = [self._place.replica_group(n) for n in range(num_communicators)]
        with speaking(self._job, "epl.forward_backward"):
            copy_from_first([t for m in modules for t in [*m.parameters(), *m.buffers()]], first)
        made = {}
        for module in modules:
            made[id(module)] = GradientReducer(
                module, first, policy=policy, communicators=others, factor=factor, guard=self._place.guard
            )
            self._undo.append(made[id(module)].close)
        self._reducers = {stage: made[id(module)] for stage, module in zip(stages, self.modules, strict=True)}

    def _reductions(self) -> dict[int, _StageReduction]:
        """One for each module, which may be that of several stages."""
        stages = Counter(id(reducer) for reducer in self._reducers.values())
        made = {id(reducer): _StageReduction(reducer, stages[id(reducer)]) for reducer in self._reducers.values()}
        return {stage: made[id(reducer)] for stage, reducer in self._reducers.items()}

    def _join_ties(self, modules: list[nn.Module]) -> Ties | None:
        own = tied_parameters(modules)
        told: list[Any] = self._job.gather("epl.forward_backward", describe(own))
        holders = check_holders([told[rank] for rank in self._place.pipe_ranks])
        groups: dict[str, dist.ProcessGroup] = {}
        for key in sorted({key for words in told for key in words}):
            for pipe in self._place.all_pipes:  # every rank makes every group, in the same order
                ranks = [rank for rank in pipe if key in told[rank]]
                if len(ranks) > 1:
                    group = self._place.group_of(ranks)
                    if self._job.rank in ranks:
                        groups[key] = group
        return Ties(own, holders, self._place.device, _GroupAdder(groups, self._job)) if own else None


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
    """Sums and copies over the ranks that hold a tied weight."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], job: Job) -> None:
        self._groups, self._job = groups, job

    def add_up(self, key: str, tensor: torch.Tensor) -> None:
        with speaking(self._job, f"adding up the gradient of the tied weight {key!r}"):
            dist.all_reduce(tensor, group=self._groups[key])

    def copy_first(self, key: str, tensor: torch.Tensor) -> None:
        with speaking(self._job, f"copying the tied weight {key!r}"):
            dist.broadcast(tensor, group=self._groups[key], group_src=0)
