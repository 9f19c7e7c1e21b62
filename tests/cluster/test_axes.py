"""Axes: partition properties over all orders, the seed document's example, and everything that is refused."""

from __future__ import annotations

import math
from itertools import combinations, permutations, product

import pytest

from epl.cluster.axes import Axes
from epl.errors import TopologyError

NAMES = ("pipe", "data", "tensor", "data_inner")
SHAPES = [shape for count in range(1, 5) for shape in product((1, 2, 3), repeat=count) if math.prod(shape) <= 12]


def all_axes() -> list[Axes]:
    """Every order of up to four axes over small worlds."""
    return [
        Axes.parse(list(zip(names, shape, strict=True)), math.prod(shape))
        for shape in SHAPES
        for names in permutations(NAMES, len(shape))
    ]


def test_every_kind_of_group_is_a_partition_with_ascending_ranks() -> None:
    for axes in all_axes():
        for kind in axes.kinds:
            groups = axes.groups(kind)
            assert sorted(r for group in groups for r in group) == list(range(axes.world_size))
            assert all(list(group) == sorted(group) for group in groups)
            for rank in range(axes.world_size):
                assert axes.ranks(kind, rank) == next(group for group in groups if rank in group)


def test_ranks_of_an_axis_differ_on_that_axis_only() -> None:
    for axes in all_axes():
        for name, size in zip(axes.names, axes.sizes, strict=True):
            for group in axes.groups(name):
                where = [axes.coordinates(rank) for rank in group]
                assert [place.pop(name) for place in where] == list(range(size))
                assert all(place == where[0] for place in where)


def test_any_combination_of_axes_holds_what_differs_on_them_only() -> None:
    for axes in all_axes():
        for count in range(len(axes.names) + 1):
            for names in combinations(axes.names, count):
                groups = axes.groups_over(*reversed(names))
                assert sorted(r for group in groups for r in group) == list(range(axes.world_size))
                assert groups == sorted(groups)
                for group in groups:
                    assert list(group) == sorted(group)
                    rest = [{n: c for n, c in axes.coordinates(rank).items() if n not in names} for rank in group]
                    assert all(place == rest[0] for place in rest)


def test_model_groups_compute_on_the_same_data_wherever_data_stands() -> None:
    for axes in all_axes():
        for group in axes.groups("model"):
            data = {tuple(axes.coordinates(rank)[n] for n in axes.data_axes) for rank in group}
            assert len(data) == 1
        assert len(axes.groups("model")) == math.prod(
            size for name, size in zip(axes.names, axes.sizes, strict=True) if name.startswith("data")
        )


def test_data_in_the_middle() -> None:
    # TorchDistPackage lists [0, 4, 1, 5] here while torch orders the group [0, 1, 4, 5], so ranks in it are wrong.
    axes = Axes.parse([("pipe", 2), ("data", 2), ("tensor", 2)], 8)
    assert axes.groups("model") == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_only_data_and_no_data() -> None:
    assert Axes.parse([("data", 3)], 3).groups("model") == [(0,), (1,), (2,)]
    assert Axes.parse([("tensor", 3)], 3).groups("model") == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("name", "is_data"),
    [("data", True), ("data_outer", True), ("dp", False), ("database", False), ("Data", False)],
)
def test_which_axes_are_data(name: str, is_data: bool) -> None:
    assert Axes.parse([(name, 2)], 2).data_axes == ((name,) if is_data else ())


def test_coordinates_follow_the_order_outermost_first() -> None:
    axes = Axes.parse([("pipe", 2), ("tensor", 2), ("data", 4)], 16)
    assert axes.coordinates(0) == {"pipe": 0, "tensor": 0, "data": 0}
    assert axes.coordinates(13) == {"pipe": 1, "tensor": 1, "data": 1}
    assert list(axes.coordinates(13)) == ["pipe", "tensor", "data"]


# The log in the seed document, whose "..." stands for lines left out.
SEED_LOG = """\
group pipe, ranks: [0, 8]
group pipe, ranks: [1, 9]
...
group tensor, ranks: [0, 4]
group tensor, ranks: [8, 12]
...
group data, ranks: [0, 1, 2, 3]
group data, ranks: [4, 5, 6, 7]
...
group model, ranks: [0, 4, 8, 12]
..."""

DATA_INSIDE = """\
group pipe, ranks: [0, 8]
group pipe, ranks: [1, 9]
group pipe, ranks: [2, 10]
group pipe, ranks: [3, 11]
group pipe, ranks: [4, 12]
group pipe, ranks: [5, 13]
group pipe, ranks: [6, 14]
group pipe, ranks: [7, 15]
group tensor, ranks: [0, 4]
group tensor, ranks: [8, 12]
group tensor, ranks: [1, 5]
group tensor, ranks: [9, 13]
group tensor, ranks: [2, 6]
group tensor, ranks: [10, 14]
group tensor, ranks: [3, 7]
group tensor, ranks: [11, 15]
group data, ranks: [0, 1, 2, 3]
group data, ranks: [4, 5, 6, 7]
group data, ranks: [8, 9, 10, 11]
group data, ranks: [12, 13, 14, 15]
group model, ranks: [0, 4, 8, 12]
group model, ranks: [1, 5, 9, 13]
group model, ranks: [2, 6, 10, 14]
group model, ranks: [3, 7, 11, 15]"""

DATA_OUTSIDE = """\
group data, ranks: [0, 4, 8, 12]
group data, ranks: [1, 5, 9, 13]
group data, ranks: [2, 6, 10, 14]
group data, ranks: [3, 7, 11, 15]
group pipe, ranks: [0, 2]
group pipe, ranks: [4, 6]
group pipe, ranks: [8, 10]
group pipe, ranks: [12, 14]
group pipe, ranks: [1, 3]
group pipe, ranks: [5, 7]
group pipe, ranks: [9, 11]
group pipe, ranks: [13, 15]
group tensor, ranks: [0, 1]
group tensor, ranks: [2, 3]
group tensor, ranks: [4, 5]
group tensor, ranks: [6, 7]
group tensor, ranks: [8, 9]
group tensor, ranks: [10, 11]
group tensor, ranks: [12, 13]
group tensor, ranks: [14, 15]
group model, ranks: [0, 1, 2, 3]
group model, ranks: [4, 5, 6, 7]
group model, ranks: [8, 9, 10, 11]
group model, ranks: [12, 13, 14, 15]"""


def test_dump_is_the_seed_documents_log() -> None:
    world_size, pp_size = 16, 2
    axes = Axes.parse([("pipe", pp_size), ("tensor", 2), ("data", world_size / (2 * pp_size))], world_size)
    assert axes.dump() == DATA_INSIDE
    for block in SEED_LOG.split("\n..."):
        assert block in "\n" + axes.dump()


def test_dump_with_data_outermost() -> None:
    world_size, pp_size = 16, 2
    axes = Axes.parse([("data", world_size / (2 * pp_size)), ("pipe", pp_size), ("tensor", 2)], world_size)
    assert axes.dump() == DATA_OUTSIDE


def test_dump_ends_with_nodes_if_there_are_several() -> None:
    axes = Axes.parse([("data", 4)], 4, node_of_rank=[0, 1, 0, 1])
    assert axes.dump().splitlines()[-2:] == ["group node, ranks: [0, 2]", "group node, ranks: [1, 3]"]
    assert "node" not in Axes.parse([("data", 4)], 4).dump()


def test_order_changes_locality() -> None:
    nodes = [0] * 8 + [1] * 8
    inside = Axes.parse([("pipe", 2), ("tensor", 2), ("data", 4)], 16, node_of_rank=nodes)
    outside = Axes.parse([("data", 4), ("pipe", 2), ("tensor", 2)], 16, node_of_rank=nodes)

    def stays_in_a_node(axes: Axes, name: str) -> bool:
        return all(len({axes.node_of_rank[r] for r in group}) == 1 for group in axes.groups(name))

    assert stays_in_a_node(inside, "data")
    assert not stays_in_a_node(inside, "pipe")
    assert not stays_in_a_node(outside, "data")
    assert stays_in_a_node(outside, "pipe")


@pytest.mark.parametrize(
    ("axes", "world", "parts"),
    [
        ([("pipe", 2), ("data", 3)], 8, ["pipe 2 × data 3 = 6 ranks", "8 ranks", "'data' = 4"]),
        ([("pipe", 3), ("data", 2)], 8, ["= 6 ranks", "'pipe' = 4"]),
        ([("pipe", 3), ("tensor", 3)], 8, ["= 9 ranks", "start 9 ranks"]),
        ([("data", 2), ("data", 2)], 4, ["two axes are called 'data'"]),
        ([("data", 1.5)], 2, ["'data'", "found 1.5"]),
        ([("data", 0)], 1, ["'data'", "found 0"]),
        ([("data", -2)], 2, ["found -2"]),
        ([("data", float("nan"))], 2, ["found nan"]),
        ([("data", float("inf"))], 2, ["found inf"]),
        ([("data", True)], 1, ["found True"]),
        ([("data", "2")], 2, ["found '2'"]),
        ([("", 2)], 2, ["needs a name"]),
        ([(3, 2)], 2, ["needs a name", "found 3"]),
        ([("model", 2)], 2, ["'model'", "another name"]),
        ([("node", 2), ("global", 1)], 2, ["2 problems", "'node'", "'global'"]),
        ([], 2, ["the list is empty"]),
        (["data"], 2, ["a pair (name, size)", "found 'data'"]),
        ([("data", 2, 3)], 2, ["a pair (name, size)"]),
        ("data", 2, ["expected a list", "'data'"]),
        ({"data": 2}, 2, ["expected a list"]),
        ([("pipe", 0), ("pipe", 0.5), ("", 1)], 2, ["1. ", "2. ", "3. "]),
    ],
)
def test_refused_with_what_and_why(axes: list[tuple[str, float]], world: int, parts: list[str]) -> None:
    with pytest.raises(TopologyError) as error:
        Axes.parse(axes, world)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("ask", [Axes.groups, Axes.check, lambda axes, kind: axes.ranks(kind, 0)])
def test_unknown_axis_names_the_nearest(ask: object) -> None:
    axes = Axes.parse([("tensor", 2), ("data", 2)], 4)
    with pytest.raises(TopologyError, match=r"no axis 'tensr'; did you mean 'tensor'\?.*tensor, data.*model, node"):
        ask(axes, "tensr")  # type: ignore[operator]


def test_model_cannot_be_combined() -> None:
    with pytest.raises(TopologyError, match="'model' is not an axis"):
        Axes.parse([("data", 2)], 2).groups_over("data", "model")


def test_prints_its_arithmetic() -> None:
    assert str(Axes.parse([("pipe", 2), ("data", 4.0)], 8)) == "pipe 2 × data 4 = 8 ranks"
