"""Split parts on devices that all TaskGraphs share: what happens at the first call of the model, and around every call.

    split only            all ranks of a replica compute on the same rows; the whole model is one split part, in which only the
                          parameters of split TaskGraphs are cut
    replicate and split   every rank has rows of its own; each split module is a part, with bridges at its borders (parallel/split/rows.py)

Gradients: a cut parameter's are the replica's own, shared with the same rank of the other replicas. Those of whole parameters are
the same on all ranks of a replica (split only), or one rank's share (rows of its own), and shared with all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from epl import _torch
from epl.cluster.communication import speaking
from epl.data import active_share
from epl.env import Env
from epl.errors import UsageError
from epl.graph import TaskGraphs
from epl.graph.owners import owners_of
from epl.parallel import GradientReducer, sync_batch_norm
from epl.parallel.clip_torch import count_over
from epl.parallel.hook import ModuleHook
from epl.parallel.split.expressions import OneLoss, OwnLosses
from epl.parallel.split.part import SplitPart
from epl.parallel.split.ranks import GroupRanks
from epl.plan.bridges import describe_bridges
from epl.plan.splits import PartSplit
from epl.report.log import notice
from epl.train.policy import reduce_policy
from epl.train.scaling import agree_on_unscaling
from epl.train.split.cutting import CutParameters, as_in_training, decide, plan_of, plans_of_all, split_parameters
from epl.train.split.entries import mind_entries
from epl.train.split.loopwords import LoopWords
from epl.train.split.loose import LoosePart
from epl.train.split.ownrows import OwnRows
from epl.train.split.stepping import step_whole_where_needed
from epl.train.split.trampoline import Trampoline
from epl.train.split.whole import SplitState
from epl.train.weights import within_replica

if TYPE_CHECKING:
    from epl.train.replicas import Replicas


class SharedSplit:
    """The split TaskGraphs of one model; the ranks of its replica divide their parameters."""

    def __init__(self, env: Env, model: nn.Module, replicas: Replicas, taskgraphs: TaskGraphs) -> None:
        self._env, self._model, self._replicas, self._taskgraphs = env, model, replicas, taskgraphs
        self._job = env.job("epl.parallelize")
        plan = replicas.plan
        self.names = frozenset(t.name for t in plan.taskgraphs if t.kind == "split")
        lists = [list(plan.replica_ranks(replica)) for replica in range(plan.num_replicas)]
        self._across_lists = [list(ranks) for ranks in zip(*lists, strict=True)]
        self.group = replicas.new_groups(lists)
        self._across = replicas.new_groups(self._across_lists) if plan.num_replicas > 1 else None
        self.ranks = GroupRanks(self.group, self._job.device, replicas.guard, self._job.standstill)
        self.cut = CutParameters(self.ranks)
        self.has_rows = plan.parts > 1
        self._exact_dropout = env.config.split.exact_dropout
        self.placed = self._placing = False
        self.ranks.in_loop = self._loop = LoopWords(self._job, self._job.circle(lists))
        self.rows: OwnRows | None = None
        """Where ranks have rows of their own: which, in the call under way."""
        if self.has_rows:
            owners = owners_of(model, taskgraphs)
            self.rows = OwnRows(
                self._job, model, owners, self.ranks, lists, self.names, micro_batches=plan.settings.num_micro_batch
            )
        self._expressions = OneLoss(self.ranks) if self.rows is None else OwnLosses(self.ranks, self.rows.weight)
        self._part: SplitPart | None = None
        """The whole model, where all ranks have the same rows."""
        self._trampoline = Trampoline(model) if not self.has_rows and plan.settings.num_micro_batch == 1 else None
        hook = ModuleHook(self._before_call)
        replicas.at_close(model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
        replicas.at_close(model.register_forward_hook(ModuleHook(self._after_call), always_call=True).remove)
        replicas.at_close(step_whole_where_needed(model, lambda parameter: self.ranks))
        # After a step as well: what steps with a closure has its gradients only then.
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            replicas.at_close(register(self._refuse_step_without_call).remove)

    # ---- around calls ------------------------------------------------------------------------------------------------

    def _before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _torch.fake_mode_is_on() or _torch.backward_id() != -1 or self._placing:
            return  # recorded, computed again by a checkpoint, or tried out (with numbers, where its code looks at them)
        self._loop.call_begins()
        cut = self._replicas.cut
        with (
            cut.as_it_is() if cut is not None else contextlib.nullcontext()
        ):  # its own forward is recorded, not its stand-in
            if not self.placed:
                self._placing = True
                try:
                    # What is made now lives on: an evaluation may come first.
                    with torch.inference_mode(False):
                        self._place(args, kwargs)
                finally:
                    self._placing = False
            if self.rows is not None:
                self.rows.begin(args, kwargs)
        if self.rows is None or self._exact_dropout:
            self._meet_for_call()

    def _after_call(self, module: nn.Module, args: object, output: object) -> None:
        self._loop.call_ends()
        if self.rows is not None:
            self.rows.end()

    def _meet_for_call(self) -> None:
        """One that evaluates alone is told so, and so are the others: before they wait for each other, and not earlier, unless
        this rank has to know which random numbers come next.
        """
        ranks, plan = self.ranks, self._replicas.plan
        word = ranks.common.word()
        meeting = self._job.meet(f"calling {type(self._model).__name__}, which is split", word)

        def wait() -> None:
            said = meeting.wait()
            ranks.common.hear([said.bits[rank] for rank in plan.replica_ranks(plan.ranks[self._job.rank].replica)])

        ranks.before_next(wait)
        if word:
            ranks.settle()

    def _from_first(self, own: torch.Tensor) -> torch.Tensor:
        """The tensor of the first rank of the split."""
        sent = own.to(self._job.device)
        with speaking(self._job, "agreeing on random numbers"):
            dist.broadcast(sent, group=self.group, group_src=0)
        return sent.to(own.device)

    def _refuse_step_without_call(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """What is cut, and what is reduced, is known from the first call of the model: until then replicas would drift apart."""
        if self.placed or not (self.has_rows or self._across is not None):
            return
        names = {id(p): name for name, p in self._model.named_parameters()}
        held = (p for group in optimizer.param_groups for p in group["params"])
        found = [names[id(p)] for p in held if p.grad is not None and id(p) in names]
        if found:
            title = type(self._model).__name__
            raise UsageError(
                f"an optimizer steps with gradients of {len(found)} parameters of {title} ({', '.join(found[:3])}) before {title} was called: "
                f"what is split, and which gradients ranks share, follows from the first call of {title} itself, and calls of its modules or "
                "computing with its parameters alone would let replicas drift apart. Call the model in the loop, model(x), and let its "
                "forward use its parts; or give epl.parallelize a module whose forward does what the loop does with them"
            )

    def inside(self, stage: int) -> AbstractContextManager[None]:
        """What surrounds the forward of a micro batch: code that belongs to no module sees parameters as split, too."""
        return contextlib.nullcontext() if self._part is None else self._part.entered()

    # ---- once --------------------------------------------------------------------------------------------------------

    def _place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        replicas, model, config = self._replicas, self._model, self._env.config
        own = split_parameters(model, self._taskgraphs, self.names)
        optimizers, ways, agreed = replicas.optimizers, self.ranks.ways, partial(decide, self._job)
        splits: list[PartSplit] = []
        if self.rows is None:
            plan = plan_of(model, model, own, ways, [(args, kwargs)], agreed)
            # In micro batches the code of the forward runs later, without it: `inside` surrounds that.
            in_one = replicas.plan.settings.num_micro_batch == 1
            if self._trampoline is not None:
                self._trampoline.remove()
            self._part = self.cut.cut(
                model, plan, config, optimizers, wraps_itself=in_one, expressions=self._expressions
            )
            splits.append(plan.summary())
        else:
            bridged = replicas.plan.with_bridges(self.rows.crossings(args, kwargs))
            replicas.plan = bridged
            notice(describe_bridges(bridged.bridges))
            splits += self._cut_loose(self.rows, args, kwargs, own)
            with as_in_training(model):
                parts = self.rows.parts(args, kwargs, own)
            plans = plans_of_all(
                {p.path: partial(plan_of, model, p.module, p.own, ways, p.examples, agreed) for p in parts}
            )
            for part in parts:
                plan = plans[part.path]
                border = self.rows.border(part.module)
                self.cut.cut(part.module, plan, config, optimizers, boundary=border, expressions=self._expressions)
                splits.append(plan.summary(part.path))
        for split in splits:
            notice(split.describe())
        replicas.plan = self._env.plan = replicas.plan.with_splits(splits)
        self.placed = True
        self.ranks.common.start(self._from_first)
        replicas.at_close(self.cut.undo)
        replicas.at_close(mind_entries(model, self.ranks.rank))
        replicas.at_close(count_over(self.cut.layouts, self.group, meet=self._meet_for_norm))
        replicas.at_close(agree_on_unscaling(replicas.trains, replicas.any_rank))
        self._sync_batch_norm()
        replicas.reducers += self._make_reducers()
        for reducer in replicas.reducers:
            replicas.at_close(reducer.close)

    def _cut_loose(
        self, rows: OwnRows, args: tuple[Any, ...], kwargs: dict[str, Any], own: set[str]
    ) -> list[PartSplit]:
        """Cut the parameters under split that the code between modules computes with, before any module is cut; how they were cut."""
        model, loose = self._model, rows.loose(args, kwargs, own)
        if not loose:
            return []
        assert isinstance(self._expressions, OwnLosses)
        plan = plan_of(model, model, loose, self.ranks.ways, [(args, kwargs)], partial(decide, self._job))
        parameters = [p for name, p in model.named_parameters() if name in loose]
        make = partial(LoosePart, expressions=self._expressions, is_running=rows.is_running)
        self.cut.cut(model, plan, self._env.config, self._replicas.optimizers, kind=make)
        rows.watch(parameters, self._expressions)
        return [plan.only(set(loose)).summary()]

    def _meet_for_norm(self) -> None:
        self._job.meet("the norm of split gradients").wait()

    def whole_state(self) -> SplitState | None:
        """How the whole state is gathered and loaded, once parameters are cut."""
        return SplitState(self._model, self._job, self.ranks) if self.placed else None

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _make_reducers(self) -> list[GradientReducer]:
        replicas, plan = self._replicas, self._replicas.plan
        after = self._env.config.communication.clip_after_allreduce
        policy = reduce_policy(self._env.config, "backward" if after else "step")
        across, outside = self._across, replicas.outside
        if not self.has_rows:
            if across is None:
                return []
            return [self._reducer(self._model, across, policy, replicas.replica_factor, extra=outside)]
        cut = set(map(id, self.cut.layouts))
        whole = _Some(self._model, cut, wanted=False)
        made = []
        if after:
            first, *others = self._env.communicators()
            made.append(self._reducer(whole, first, policy, replicas.factor, extra=outside, communicators=others))
        else:
            within = dataclasses.replace(policy, when="backward")
            made.append(
                self._reducer(
                    whole,
                    self.group,
                    within,
                    lambda: plan.parts * within_replica(plan.parts, active_share()),
                    extra=outside,
                )
            )
            if across is not None:
                made.append(self._reducer(whole, across, policy, replicas.replica_factor, extra=outside))
        if across is not None:
            made.append(self._reducer(_Some(self._model, cut, wanted=True), across, policy, replicas.replica_factor))
        return made

    def _reducer(
        self, module: nn.Module, group: dist.ProcessGroup, policy: Any, factor: Any, **more: Any
    ) -> GradientReducer:
        replicas = self._replicas
        return GradientReducer(
            module, group, policy=policy, factor=factor, guard=replicas.guard, on_new=replicas.on_new, **more
        )

    def _sync_batch_norm(self) -> None:
        """Statistics over all replicas if asked for, and over the ranks of a replica where they divide its rows; not in split parts,
        whose values say by themselves which rows they have."""
        everywhere = self._env.config.communication.sync_batch_norm
        group = None
        if self.has_rows:
            group = (
                self._replicas.new_groups([list(range(self._replicas.plan.world_size))]) if everywhere else self.group
            )
        elif everywhere:
            group = self._across
        if group is None:
            return
        inside = {m for part in self.cut.parts for m in part.module.modules()} if self.has_rows else set()
        synced = sync_batch_norm(
            _Outside(self._model, inside),
            group,
            factor=self._replicas.factor if self.has_rows else self._replicas.replica_factor,
            counted=lambda: (share := active_share()) is None or not share.padded,
            guard=self._replicas.guard,
        )
        self._replicas.at_close(synced.undo)


class _Outside(nn.Module):
    """A model without some of its modules, for whoever walks through them."""

    def __init__(self, model: nn.Module, left_out: Collection[nn.Module]) -> None:
        super().__init__()
        self._model, self._left_out = [model], left_out

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        return (m for m in self._model[0].modules() if m not in self._left_out)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((n, m) for n, m in self._model[0].named_modules() if m not in self._left_out)


class _Some(nn.Module):
    """A model of which only some parameters are seen: those among `ids`, or the others. Its hooks are those of the model."""

    def __init__(self, model: nn.Module, ids: set[int], *, wanted: bool) -> None:
        super().__init__()
        self._model, self._ids, self._wanted = [model], ids, wanted

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        found = self._model[0].named_parameters(prefix, recurse, remove_duplicate)
        return ((name, p) for name, p in found if (id(p) in self._ids) == self._wanted)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (p for _, p in self.named_parameters())

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        return iter(()) if self._wanted else self._model[0].modules()  # buffers and sparse layers are the other's

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(()) if self._wanted else self._model[0].named_buffers(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return (b for _, b in self.named_buffers())

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._model[0].register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._model[0].register_forward_hook(*args, **kwargs)
