"""Places a model once its first call is recorded: parameters of other stages lose their bytes, groups and reducers are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from epl import _torch
from epl.cluster.communication import Job, speaking
from epl.data import active_share
from epl.env import Env
from epl.graph.deferred import is_deferred, materialise_whole
from epl.graph.record import RecordedCall
from epl.parallel import GradientReducer, sync_batch_norm
from epl.parallel.clip_torch import count_over
from epl.parallel.pipeline.lanes import Lanes
from epl.parallel.pipeline.ties import Ties
from epl.plan.stages import StageCut
from epl.report.log import notice
from epl.train.cut.carrier import StageCarrier
from epl.train.cut.part import Held, PartGradients
from epl.train.cut.peers import RankPeers
from epl.train.cut.sources import StageSource
from epl.train.cut.stageplace import StagePlace
from epl.train.cut.state import WholeState
from epl.train.laneplace import LanePlace
from epl.train.lazy import become_foreign
from epl.train.place import NoTransport
from epl.train.policy import reduce_policy
from epl.train.split.staged import StageSplit, split_devices

if TYPE_CHECKING:
    from epl.train.replicas import Replicas


class OneStage:
    """No stages: the whole model is here, and its calls run in micro batches (gradient accumulation)."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        reducers: Sequence[GradientReducer],
        inside: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._job, self._model, self._reducers, self._inside = job, model, reducers, inside
        self.widths: tuple[int, ...] = (1,)

    def place(self, recorded: RecordedCall) -> StageCarrier:
        peers = RankPeers(self._job, [[rank] for rank in range(self._job.world_size)], home=0)
        parameters = dict(self._model.named_parameters())
        gradients = PartGradients(list(parameters.values()), (0,), self._reducers, None)
        place = StagePlace(Lanes(((0,),), 0), 1, 1, 0, "PreferBackward")
        carrier = StageCarrier(place, peers, NoTransport(self._job.device), parameters, gradients)
        if self._inside is not None:
            carrier.inside = self._inside
        return carrier

    def cut(self, recorded: RecordedCall) -> StageCut:
        count = len(recorded.by_size[recorded.rows].graph.nodes)
        return StageCut(("model",), dict.fromkeys(range(count), (0,)), {}, {}, {})

    def whole_state(self) -> None:
        """Every rank has all of it."""


class Staged:
    """Every stage on a device of its own, or several that take turns on it."""

    def __init__(self, env: Env, model: nn.Module, source: StageSource, replicas: Replicas) -> None:
        self._env, self._model, self._source, self._replicas = env, model, source, replicas
        self._job = env.job("epl.parallelize")
        self.widths = tuple({t.width for t in replicas.plan.taskgraphs if t.kind == "replicate"} | {1})
        self._split: StageSplit | None = None
        self._placed: StageCut | None = None
        self._lanes: LanePlace
        self._carrier: StageCarrier
        self._gradients: PartGradients
        self._rows: tuple[int, ...] = ()

    def cut(self, recorded: RecordedCall) -> StageCut:
        return self._source.cut(recorded, self._replicas.plan, self._placed)

    def place(self, recorded: RecordedCall) -> StageCarrier:
        cut = self.cut(recorded)
        self._job.check_same(
            "the stages of the model",
            # Not what travels: replicas may read different numbers of their inputs, and go different ways; ranks of one replica compare it.
            (cut.order, sorted(cut.holders.items()), sorted(cut.buffers.items())),
            "Build, annotate and call the model alike on every rank.",
        )
        self._placed = cut
        plan = self._replicas.plan = self._env.plan = self._source.settle(self._replicas.plan, cut, recorded)
        chunks = plan.settings.num_chunks
        devices = [t.devices for t in plan.taskgraphs[: len(plan.taskgraphs) // chunks]]
        wide_end = plan.taskgraphs[-1].width > 1
        copied = split_devices(plan)
        self._lanes = lanes = LanePlace(
            devices,
            self._job,
            num_chunks=chunks,
            home=wide_end,
            copied=copied,
            names=[t.name for t in plan.taskgraphs],
        )
        if copied:
            self._split = StageSplit(self._env, self._model, self._replicas, self._source, recorded)
            plan = self._replicas.plan = self._env.plan = plan.with_splits(self._split.splits)
        strategy = self._env.config.pipeline.strategy
        place = StagePlace(lanes.lanes, lanes.num_devices, chunks, lanes.device, strategy)
        peers = RankPeers(self._job, lanes.all_pipes, home=lanes.lanes.ranks[place.home_stage][0])
        parameters = dict(self._model.named_parameters())
        here = set(place.model_stages)
        own = {name: p for name, p in parameters.items() if here.intersection(cut.holders[name])}
        meta = self._replicas.meta
        meta.materialise(own.values())
        meta.check_all()
        for name, parameter in parameters.items():
            if name not in own and is_deferred(parameter):
                materialise_whole(parameter)  # to be let go of
        count = lanes.num_devices
        together = {name for name, stages in cut.holders.items() if all(stage % count in copied for stage in stages)}
        self._let_go_of_the_rest(parameters, own, cut, together)
        if self._split is not None:
            self._split.cut(lanes, own, {name: self._owner(cut, name) for name in own}, together)
        held = Held(self._model, list(own), [name for name, stages in cut.buffers.items() if here.intersection(stages)])
        self._sync_batch_norm()
        reducers = self._replicas.reducers = self._make_reducers(held)
        ties = self._ties(own, cut)
        counted_elsewhere = set(map(id, own.values())) if lanes.lane else ties.counted_elsewhere if ties else set()
        if self._split is not None:
            counted_elsewhere -= self._split.ids
        self._replicas.at_close(
            count_over(
                own.values(),
                peers.data,
                counted_elsewhere=counted_elsewhere,
                others=parameters.values(),
                meet=lambda: self._meet("the norm of gradients"),
            )
        )
        gradients = self._gradients = PartGradients(list(own.values()), place.model_stages, reducers, ties)
        edges = [(a, b) for b in range(len(lanes.lanes.ranks)) for a in range(b)]
        carrier = StageCarrier(place, peers, lanes.make_transport(edges), parameters, gradients, self._note_rows)
        bytes_here = sum(p.nbytes for p in own.values())
        notice(
            f"stages in order of execution: {', '.join(cut.order)}; {len(own)} of {len(parameters)} parameters "
            f"({bytes_here / 1e6:.1f} MB) are on rank {self._job.rank}"
        )
        # The same number on all ranks of a replica, another one for each replica.
        carrier.stream_seed = hash((self._job.share("placing the model", torch.initial_seed()), min(peers.ranks)))
        if self._split is not None:
            carrier.inside = self._split.inside
        self._carrier = carrier
        if meta.state is not None:
            self.whole_state().load(meta.state)
            meta.state = None
        return carrier

    def whole_state(self) -> WholeState:
        """Every parameter and every buffer in use is taken from the first rank of the first stage that has it."""
        assert self._placed is not None
        lanes = self._lanes.lanes.ranks
        held = {**self._placed.buffers, **self._placed.holders}
        owners = {name: lanes[stages[0]][0] for name, stages in held.items()}
        ranks = self._split.ranks if self._split is not None else None
        return WholeState(self._model, self._job, self._lanes.pipe_group(), owners, ranks)

    # ---- parameters ------------------------------------------------------------------------------------------------

    def _let_go_of_the_rest(
        self,
        parameters: Mapping[str, nn.Parameter],
        own: Mapping[str, nn.Parameter],
        cut: StageCut,
        together: Collection[str],
    ) -> None:
        for name, parameter in parameters.items():
            if name not in own:
                if parameter.is_meta:
                    nothing = torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=self._job.device)
                    _torch.give_memory(parameter, nothing.expand(parameter.shape))
                become_foreign(parameter, self._owner(cut, name), name, together=name in together)
                for optimizer in self._replicas.optimizers:
                    if not isinstance(optimizer, torch.optim.LBFGS):  # its state is that of the whole vector
                        optimizer.state.pop(parameter, None)

    def _owner(self, cut: StageCut, name: str) -> int:
        """The rank that answers for a parameter: the first lane of the first stage that has it."""
        return self._lanes.pipe_ranks[self._lanes.lanes.ranks[cut.holders[name][0]][0]]

    def _ties(self, own: Mapping[str, nn.Parameter], cut: StageCut) -> Ties | None:
        """Weights that several devices hold, each with the group of all the ranks that do."""
        count = self._lanes.num_devices
        devices = {name: sorted({stage % count for stage in stages}) for name, stages in sorted(cut.holders.items())}
        devices = {name: found for name, found in devices.items() if len(found) > 1}
        groups = {
            holders: self._lanes.group_of_devices(holders)  # every rank makes every group, in the same order
            for holders in sorted({tuple(found) for found in devices.values()})
        }
        tied = {name: [own[name]] for name in devices if name in own}
        found = {name: groups[tuple(devices[name])] for name in tied}
        adder = _GroupAdder({n: g for n, g in found.items() if g is not None}, self._job, self._lanes.width)
        return Ties(tied, devices, self._lanes.device, adder) if tied else None

    # ---- replicas --------------------------------------------------------------------------------------------------

    def _make_reducers(self, held: Held) -> list[GradientReducer]:
        if self._lanes.num_replicas * self._lanes.sharing == 1:
            for n in range(self._env.config.communication.num_communicators):
                self._lanes.replica_group(n)  # ranks of wider stages make theirs now
            return []
        communication = self._env.config.communication
        first, *others = [self._lanes.replica_group(n) for n in range(communication.num_communicators)]
        policy = reduce_policy(self._env.config, "backward" if communication.clip_after_allreduce else "step")
        reducer = GradientReducer(
            held,
            first,
            policy=policy,
            communicators=others,
            extra=self._replicas.outside,
            factor=self._factor,
            on_new=self._replicas.on_new,
            guard=lambda what: speaking(self._job, f"{what} of {type(self._model).__name__}"),
        )
        self._replicas.at_close(reducer.close)
        return [reducer]

    def _sync_batch_norm(self) -> None:
        """Batch statistics over all replicas if asked for; over the lanes of a stage always."""
        wide = any(len(ranks) > 1 for ranks in self._lanes.lanes.ranks)
        everywhere = self._env.config.communication.sync_batch_norm and self._lanes.num_replicas > 1
        if everywhere or wide:
            group = self._lanes.replica_group(0) if everywhere else self._lanes.lane_group()
            if self._lanes.is_copied and not everywhere:
                return  # every lane has all rows
            synced = sync_batch_norm(
                self._model,
                group,
                factor=self._replica_factor if everywhere else lambda: 1.0,
                counted=lambda: not self._carrier.padded,
                guard=lambda what: speaking(self._job, what),
            )
            self._replicas.at_close(synced.undo)

    def _meet(self, what: str) -> None:
        self._job.meet(what).wait()

    def _note_rows(self, rows: tuple[int, ...]) -> None:
        self._rows = rows

    def _factor(self) -> float:
        """What this rank's gradients count for in an average (f on top of epl/parallel/reducer.py).

        A penalty that is differentiated by itself gives every lane of a wide stage the whole of it, not a share.
        """
        of_replica = self._replica_factor()
        shares = self._gradients.at_work or not self._env.config.communication.clip_after_allreduce
        return self._lanes.gradient_factor(of_replica) if shares else of_replica

    def _replica_factor(self) -> float:
        plan = self._replicas.plan
        if plan.settings.gradients_reduce_method == "sum":
            return float(plan.num_replicas)
        share = active_share()
        if share is not None:
            return share.weight
        total = sum(self._rows)
        return plan.num_replicas * self._rows[self._lanes.replica] / total if total else 1.0


class _GroupAdder:
    """Sums and copies over the ranks that hold a tied weight; the lanes of a stage count as one."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], job: Job, width: int) -> None:
        self._groups, self._job, self._width = groups, job, width

    def add_up(self, key: str, tensor: torch.Tensor) -> None:
        with speaking(self._job, f"adding up the gradient of the tied weight {key!r}"):
            dist.all_reduce(tensor.div_(self._width), group=self._groups[key])

    def copy_first(self, key: str, tensor: torch.Tensor) -> None:
        """All holders have the whole model's weights from `parallelize`: they are equal already."""
