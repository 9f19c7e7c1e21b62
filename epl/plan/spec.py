"""What a plan is made from: the TaskGraphs' strategies, the shape of the cluster, and the settings that decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epl.errors import PlanError

Kind = Literal["replicate", "split"]
ReduceMethod = Literal["mean", "sum"]


@dataclass(frozen=True)
class TaskGraphSpec:
    """What placement needs to know of a TaskGraph."""

    name: str
    kind: Kind
    device_count: int = 1

    @property
    def strategy(self) -> str:
        """Its strategy, as in `replicate(2)`."""
        return f"{self.kind}({self.device_count})"


@dataclass(frozen=True)
class ClusterShape:
    """How many ranks there are, and on which node each of them is; one rank drives one device."""

    world_size: int
    node_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.world_size < 1 or len(self.node_of_rank) != self.world_size:
            raise PlanError(
                f"a cluster has at least one rank, and a node for each of them; found world_size={self.world_size} "
                f"and node_of_rank of {len(self.node_of_rank)}"
            )

    @classmethod
    def of(cls, nodes: int, devices_per_node: int) -> ClusterShape:
        """A cluster of equal nodes, ranks numbered node by node."""
        return cls(nodes * devices_per_node, tuple(n for n in range(nodes) for _ in range(devices_per_node)))


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The settings that decide a plan; each is named like its configuration key."""

    num_micro_batch: int = 1
    micro_batch: int | None = None
    """The loader's `batch_size`; None while no loader is known."""
    strategy: str = "PreferBackward"
    num_chunks: int = 1
    colocate: bool = False
    """`cluster.colocate_split_and_replicate`"""
    prefer_intra_node: bool = True
    """`cluster.device_place_prefer_intra_node`"""
    gradients_reduce_method: ReduceMethod = "mean"
