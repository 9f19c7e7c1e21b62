"""The arithmetic of an ordered topology: named axes over the ranks, and the groups of ranks along them.

    axes = Axes.parse([("pipe", 2), ("tensor", 2), ("data", 4)], world_size=16)

    rank 0..15 as a box, outermost axis first, the last one counts fastest:

                      tensor 0           tensor 1
        pipe 0     0   1   2   3      4   5   6   7       data runs along a row
        pipe 1     8   9  10  11     12  13  14  15       model = one column of each block: [0, 4, 8, 12]

The innermost axis has consecutive ranks, so it stays inside a node: put the axis that talks most there.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Real

from epl.errors import TopologyError, list_problems

RESERVED = ("model", "node", "global")
"""Names of groups that every topology has beside its axes."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Axes:
    """Named axes, outermost first, whose sizes multiply to the number of ranks."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    node_of_rank: tuple[int, ...]
    """The node on which each rank runs."""

    @classmethod
    def parse(
        cls,
        axes: Sequence[tuple[str, float]],
        world_size: int,
        *,
        node_of_rank: Sequence[int] | None = None,
    ) -> Axes:
        """The axes of a list of (name, size); integral floats such as `world_size / 4` are sizes too.

        Raises:
            TopologyError: with everything that is wrong with the list.
        """
        nodes = (0,) * world_size if node_of_rank is None else tuple(node_of_rank)
        assert len(nodes) == world_size, f"node_of_rank has {len(nodes)} entries for {world_size} ranks"
        names, sizes, problems = _read(axes)
        if not problems and math.prod(sizes) != world_size:
            problems.append(_does_not_multiply(names, sizes, world_size))
        if problems:
            raise TopologyError(list_problems("these axes make no topology", problems))
        return cls(tuple(names), tuple(sizes), nodes)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.sizes)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every name that `groups` answers to: the axes in order, then model, node and global."""
        return (*self.names, *RESERVED)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks compute on different data: `data`, and any named `data_…`."""
        return tuple(name for name in self.names if name == "data" or name.startswith("data_"))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis."""
        found = {}
        for name, size in reversed(list(zip(self.names, self.sizes, strict=True))):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def groups(self, kind: str) -> list[Ranks]:
        """All groups of one kind: an axis, `model`, `node` or `global`. Ranks of a group ascend.

        Groups along an axis come in the order of TorchDistPackage: by the position on the axes inside, then outside.
        """
        self.check(kind)
        if kind == "global":
            return [tuple(range(self.world_size))]
        if kind == "model":
            return self.groups_over(*(name for name in self.names if name not in self.data_axes))
        if kind == "node":
            return [
                tuple(r for r in range(self.world_size) if self.node_of_rank[r] == node)
                for node in sorted(set(self.node_of_rank))
            ]
        at = self.names.index(kind)
        stride, block = math.prod(self.sizes[at + 1 :]), math.prod(self.sizes[at:])
        return [
            tuple(range(start + inside, start + block, stride))
            for inside in range(stride)
            for start in range(0, self.world_size, block)
        ]

    def groups_over(self, *names: str) -> list[Ranks]:
        """All groups of ranks that differ only on the named axes, sorted; no name gives one group per rank."""
        for name in names:
            self.check(name)
            if name in RESERVED:
                raise TopologyError(f"{name!r} is not an axis and cannot be combined; {self._choices()}")
        steps = {name: math.prod(self.sizes[i + 1 :]) for i, name in enumerate(self.names)}
        rows = [[i * steps[n] for i in range(s)] for n, s in zip(self.names, self.sizes, strict=True)]
        along = [row for n, row in zip(self.names, rows, strict=True) if n in names]
        across = [row for n, row in zip(self.names, rows, strict=True) if n not in names]
        # Axes are taken in their own order, so ranks ascend, and a rank's place in the list is its rank in the group.
        return [tuple(sum(fixed) + sum(moved) for moved in product(*along)) for fixed in product(*across)]

    def ranks(self, kind: str, rank: int) -> Ranks:
        """The group of that kind to which a rank belongs."""
        self.check(kind)
        if kind in self.names:
            step = math.prod(self.sizes[self.names.index(kind) + 1 :])
            size = self.sizes[self.names.index(kind)]
            first = rank - self.coordinates(rank)[kind] * step
            return tuple(range(first, first + size * step, step))
        return next(group for group in self.groups(kind) if rank in group)

    def check(self, kind: str) -> None:
        """Refuse a name that is neither an axis nor `model`, `node`, `global`."""
        if kind not in self.kinds:
            near = difflib.get_close_matches(kind, self.kinds, n=1) if isinstance(kind, str) else []
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TopologyError(f"there is no axis {kind!r}; {hint}{self._choices()}")

    def dump(self) -> str:
        """A line `group pipe, ranks: [0, 8]`: the axes in order, model, then node if there are several."""
        shown = [*self.names, "model", *(["node"] if len(set(self.node_of_rank)) > 1 else [])]
        return "\n".join(f"group {kind}, ranks: {list(ranks)}" for kind in shown for ranks in self.groups(kind))

    def __str__(self) -> str:
        return _arithmetic(self.names, self.sizes)

    def _choices(self) -> str:
        return f"this topology has the axes {', '.join(self.names)} and the groups {', '.join(RESERVED)}"


def _read(axes: Sequence[tuple[str, float]]) -> tuple[list[str], list[int], list[str]]:
    """Names, sizes, and what is wrong with them one by one."""
    names: list[str] = []
    sizes: list[int] = []
    problems: list[str] = []
    if isinstance(axes, (str, bytes)) or not isinstance(axes, Sequence):
        return names, sizes, [f"expected a list like [('pipe', 2), ('data', 4)], found {axes!r}"]
    if not axes:
        problems.append("the list is empty; name at least one axis, for example [('data', world_size)]")
    for entry in axes:
        if not isinstance(entry, Sequence) or isinstance(entry, (str, bytes)) or len(entry) != 2:
            problems.append(f"expected a pair (name, size), found {entry!r}")
            continue
        name, size = entry
        if not isinstance(name, str) or not name.strip():
            problems.append(f"an axis needs a name, found {name!r} (size {size!r})")
        elif name in RESERVED:
            problems.append(f"{name!r} names a group that is made automatically; give this axis another name")
        elif name in names:
            problems.append(f"two axes are called {name!r}; names must differ")
        if isinstance(size, bool) or not isinstance(size, Real) or not float(size).is_integer() or size < 1:
            problems.append(f"the size of {name!r} must be a whole number from 1 on, found {size!r}")
            continue
        names.append(name)
        sizes.append(int(size))
    return names, sizes, problems


def _does_not_multiply(names: Sequence[str], sizes: Sequence[int], world_size: int) -> str:
    total = math.prod(sizes)
    fits = [
        f"{name!r} = {world_size // (total // size)}"
        for name, size in zip(names, sizes, strict=True)
        if world_size % (total // size) == 0
    ]
    remedy = (
        f"it fits with {' or '.join(fits)}" if fits else f"start {total} ranks or choose sizes that divide {world_size}"
    )
    return f"{_arithmetic(names, sizes)}, but there are {world_size} ranks; {remedy}"


def _arithmetic(names: Sequence[str], sizes: Sequence[int]) -> str:
    """`pipe 2 × data 4 = 8 ranks`."""
    product_ = " × ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    return f"{product_} = {math.prod(sizes)} ranks"
