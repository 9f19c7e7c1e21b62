"""The Plan: where every TaskGraph runs, which rows every rank sees, and what one step learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from epl.errors import PlanError, list_problems
from epl.plan.batch import Rows, global_batch, share_rows
from epl.plan.bridges import BridgePlan, Crossing, describe_bridges, make_bridges
from epl.plan.placement import Layout, PlacedTaskGraph, place
from epl.plan.schedule import Schedule, make_schedule
from epl.plan.spec import ClusterShape, PlanSettings, TaskGraphSpec
from epl.plan.splits import ParameterCut, PartSplit, Sent
from epl.plan.stageplan import StagePlan, describe_stages
from epl.plan.table import compact_numbers, table

Capability = Literal["data_parallel", "pipeline", "interleaved", "wide_stage", "split", "bridge", "micro_batches"]

_SHOWN_REPLICAS = 8


@dataclass(frozen=True)
class RankPlace:
    """What one rank does: its model replica, its TaskGraphs, and its position among the ranks of each of them."""

    rank: int
    replica: int
    taskgraphs: tuple[str, ...]
    index: int


@dataclass(frozen=True)
class DataShare:
    """Which part of which replica's rows a rank loads; with one part, the whole block of the replica."""

    replica: int
    part: int
    parts: int


@dataclass(frozen=True)
class Plan:
    """Every decision for one model on one cluster, as plain data that can be printed, saved and compared."""

    layout: Layout
    taskgraphs: tuple[PlacedTaskGraph, ...]
    cluster: ClusterShape
    settings: PlanSettings
    stages: tuple[StagePlan, ...] = ()
    """Of a staged plan, once a forward has been recorded: what every stage computes, in order of execution."""
    reason: str = ""
    """Why the stages are as they are, if epl chose them."""
    bridges: tuple[BridgePlan, ...] = ()
    """Once a forward has been recorded: what goes from the layout of one TaskGraph to that of another."""
    splits: tuple[PartSplit, ...] = ()
    """Once it is known how the model is called: where the parameters of its split parts are cut."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.cluster.world_size

    @property
    def num_replicas(self) -> int:
        """The number of whole copies of the model."""
        return len(self.taskgraphs[0].devices)

    @property
    def devices_per_replica(self) -> int:
        """The number of ranks that compute one model replica."""
        return self.world_size // self.num_replicas

    @property
    def parts(self) -> int:
        """Over how many ranks a replica's rows are divided before the loop sees them.

        Where the loop of every rank computes the whole model (colocated) and a `replicate(k)` is in it, k; in a staged
        model the first stage reads x and the last one y, and under `split` alone all ranks compute on the same rows.
        """
        if self.layout != "staged" and any(t.kind == "replicate" for t in self.taskgraphs):
            return self.devices_per_replica
        return 1

    @property
    def ranks(self) -> tuple[RankPlace, ...]:
        """What every rank does, by rank."""
        places: dict[int, RankPlace] = {}
        for taskgraph in self.taskgraphs:
            for replica, ranks in enumerate(taskgraph.devices):
                for index, rank in enumerate(ranks):
                    earlier = places[rank].taskgraphs if rank in places else ()
                    places[rank] = RankPlace(rank, replica, (*earlier, taskgraph.name), index)
        return tuple(places[rank] for rank in range(self.world_size))

    @property
    def data_shares(self) -> tuple[DataShare, ...]:
        """What every rank loads, by rank."""
        parts = self.parts
        return tuple(DataShare(p.replica, p.index if parts > 1 else 0, parts) for p in self.ranks)

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        """All ranks of one model replica, TaskGraph by TaskGraph."""
        return tuple(dict.fromkeys(rank for t in self.taskgraphs for rank in t.devices[replica]))

    def rows(self, n: int) -> tuple[Rows, ...]:
        """What every rank sees of a global batch of n rows, by rank, with the weight of those rows."""
        rows = share_rows(n, self.num_replicas, self.parts)
        return tuple(rows[share.replica * share.parts + share.part] for share in self.data_shares)

    def needs(self) -> frozenset[Capability]:
        """What carrying out this plan takes:

        data_parallel   gradients are reduced over ranks that hold the same parameters
        pipeline        TaskGraphs on different devices hand tensors to each other
        interleaved     a device computes several stages in turn
        wide_stage      a `replicate(k)` stage divides micro batches over its own k devices
        split           parameters are cut over devices
        bridge          a colocated model goes from divided rows to cut parameters and back
        micro_batches   one step runs several micro batches
        """
        wide = [t for t in self.taskgraphs if t.width > 1]
        kinds = {t.kind for t in wide}
        facts: dict[Capability, bool] = {
            "data_parallel": self.num_replicas > 1 or "replicate" in kinds,
            "pipeline": self.layout == "staged",
            "interleaved": self.layout == "staged" and self.settings.num_chunks > 1,
            "wide_stage": self.layout == "staged" and "replicate" in kinds,
            "split": "split" in kinds,
            "bridge": self.layout == "colocated" and len(kinds) > 1,
            "micro_batches": self.settings.num_micro_batch > 1,
        }
        return frozenset(name for name, needed in facts.items() if needed)

    def in_order(self, names: Sequence[str]) -> Plan:
        """The plan with its TaskGraphs, and so their devices, in this order: that in which they turned out to run."""
        by_name = {t.name: TaskGraphSpec(t.name, t.kind, t.device_count) for t in self.taskgraphs}
        if list(names) == list(by_name):
            return self
        return make_plan([by_name[name] for name in names], self.cluster, self.settings)

    def with_taskgraphs(self, specs: Sequence[TaskGraphSpec]) -> Plan:
        """The plan for these TaskGraphs instead, on the same cluster with the same settings."""
        return make_plan(specs, self.cluster, self.settings)

    def with_stages(self, stages: Sequence[StagePlan], reason: str = "") -> Plan:
        """The plan with what its stages turned out to be; its TaskGraphs, and so their devices, come in this order."""
        ordered = self.in_order([stage.taskgraph for stage in stages])
        ordered.schedule()  # refuses what does not fit it
        return replace(ordered, stages=tuple(stages), reason=reason)

    def with_bridges(self, crossings: Sequence[Crossing]) -> Plan:
        """The plan with how these values go from TaskGraph to TaskGraph."""
        return replace(self, bridges=make_bridges(self.layout, self.taskgraphs, crossings))

    def with_splits(self, splits: Sequence[PartSplit]) -> Plan:
        """The plan with how these parts are split."""
        return replace(self, splits=tuple(splits))

    def schedule(self) -> Schedule:
        """The order of forwards and backwards on the devices of one replica; PlanError if the settings contradict it."""
        chunks = self.settings.num_chunks
        return make_schedule(
            self.settings.strategy, len(self.taskgraphs) // chunks, self.settings.num_micro_batch, chunks
        )

    def describe(self) -> str:
        """The plan as text: layout, TaskGraphs with their devices, the batch equation, who sees which rows."""
        replicas, devices = self.num_replicas, self.devices_per_replica
        size = f"{_count(replicas, 'model replica')} of {_count(devices, 'device')}"
        batch = global_batch(replicas, self.settings.micro_batch, self.settings.num_micro_batch)
        lines = [f"plan: {self.layout}, {size}", self._table(), batch]
        if devices > 1:
            lines.append(
                f"rows: each of the {self.parts} ranks of a replica sees its own share of the replica's rows"
                if self.parts > 1
                else "rows: every rank of a replica sees all of the replica's rows"
            )
        if replicas > 1:
            lines.append(f"gradients: {self.settings.gradients_reduce_method} over {replicas} replicas")
        if self.bridges:
            lines.append(describe_bridges(self.bridges))
        lines += [split.describe() for split in self.splits]
        if self.reason:
            lines.append(self.reason)
        return "\n".join(lines)

    def _table(self) -> str:
        devices, strategies = [_devices(t.devices) for t in self.taskgraphs], [t.strategy for t in self.taskgraphs]
        if self.stages:
            return describe_stages(self.stages, self.schedule(), strategies, devices)
        rows = [("TaskGraph", "strategy", "devices of each replica")]
        rows += [(t.name, strategies[i], devices[i]) for i, t in enumerate(self.taskgraphs)]
        return table(rows)

    def __str__(self) -> str:
        return self.describe()

    def to_dict(self) -> dict[str, object]:
        """The plan as JSON-able data; `Plan.from_dict` gives an equal plan."""
        data = asdict(self)
        for taskgraph in data["taskgraphs"]:
            taskgraph["devices"] = [list(ranks) for ranks in taskgraph["devices"]]
        for stage in data["stages"]:
            stage["modules"], stage["tied"] = list(stage["modules"]), list(stage["tied"])
        for split in data["splits"]:
            split["parameters"], split["sent"] = list(split["parameters"]), list(split["sent"])
            for cut in split["parameters"]:
                cut["shape"] = list(cut["shape"])
        for name in ("taskgraphs", "stages", "bridges", "splits"):
            data[name] = list(data[name])
        data["cluster"]["node_of_rank"] = list(data["cluster"]["node_of_rank"])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Plan:
        """The plan that `to_dict` wrote down."""
        fields = cast("Mapping[str, Any]", data)
        try:
            return cls(
                layout=fields["layout"],
                taskgraphs=tuple(
                    PlacedTaskGraph(**{**t, "devices": tuple(tuple(ranks) for ranks in t["devices"])})
                    for t in fields["taskgraphs"]
                ),
                cluster=ClusterShape(fields["cluster"]["world_size"], tuple(fields["cluster"]["node_of_rank"])),
                settings=PlanSettings(**fields["settings"]),
                stages=tuple(
                    StagePlan(**{**stage, "modules": tuple(stage["modules"]), "tied": tuple(stage["tied"])})
                    for stage in fields["stages"]
                ),
                reason=fields["reason"],
                bridges=tuple(BridgePlan(**bridge) for bridge in fields["bridges"]),
                splits=tuple(_split_from(split) for split in fields["splits"]),
            )
        except (KeyError, TypeError) as error:
            raise PlanError(f"this is not a plan written by Plan.to_dict of this version of epl: {error!r}") from error


def make_plan(taskgraphs: Sequence[TaskGraphSpec], cluster: ClusterShape, settings: PlanSettings) -> Plan:
    """The plan for these TaskGraphs on this cluster; PlanError with the arithmetic if there is none."""
    _check(taskgraphs, settings)
    placement = place(taskgraphs, cluster, settings)
    return Plan(placement.layout, placement.taskgraphs, cluster, settings)


def _check(taskgraphs: Sequence[TaskGraphSpec], settings: PlanSettings) -> None:
    names = [t.name for t in taskgraphs]
    problems = [] if names else ["there is no TaskGraph: a model has at least one"]
    problems += [f"two TaskGraphs are called {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
    counts = [(f"device_count of {t.name!r}", t.device_count) for t in taskgraphs]
    counts.append(("pipeline.num_micro_batch", settings.num_micro_batch))
    counts.append(("pipeline.num_chunks", settings.num_chunks))
    if settings.micro_batch is not None:
        counts.append(("the loader's batch_size", settings.micro_batch))
    problems += [f"{name} must be at least 1, found {count}" for name, count in counts if count < 1]
    if settings.colocate and settings.num_chunks > 1:
        problems.append(
            "cluster.colocate_split_and_replicate puts all TaskGraphs on the same devices, "
            f"pipeline.num_chunks = {settings.num_chunks} on different ones: use one of them"
        )
    if problems:
        raise PlanError(list_problems("no plan can be made", problems))


def _split_from(data: Mapping[str, Any]) -> PartSplit:
    cuts = tuple(ParameterCut(**{**cut, "shape": tuple(cut["shape"])}) for cut in data["parameters"])
    return PartSplit(data["part"], data["ways"], cuts, tuple(Sent(**sent) for sent in data["sent"]))


def _devices(replicas: Sequence[Sequence[int]]) -> str:
    texts = [compact_numbers(ranks) for ranks in replicas]
    if len(texts) > _SHOWN_REPLICAS:
        texts = [*texts[: _SHOWN_REPLICAS - 2], "…", texts[-1]]
    return " | ".join(texts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
