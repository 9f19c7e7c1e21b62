"""How parts are split, as a plan lists it."""

from __future__ import annotations

import json

from epl.plan import ClusterShape, Plan, PlanSettings, TaskGraphSpec, make_plan
from epl.plan.splits import ParameterCut, PartSplit, Sent
from epl.plan.table import compact_paths

CUTS = tuple(
    ParameterCut(f"layers.{n}.{name}", shape, how, "columns")
    for n in range(3)
    for name, shape, how in (("up.weight", (8, 4), "dim 0: 8 parts"), ("norm.weight", (4,), "whole"))
)
SPLIT = PartSplit(
    "stage_0", 2, (*CUTS, ParameterCut("head", (9, 4), "dim 0: 9 parts", "")), (Sent("all-reduce", 64, "a"),) * 3
)


def test_repeated_layers_have_one_row() -> None:
    assert SPLIT.describe() == (
        "stage_0, split over 2 ranks:\n"
        "parameter               shape   cut             why\n"
        "----------------------  ------  --------------  -------\n"
        "layers.0-2.up.weight    (8, 4)  dim 0: 8 parts  columns\n"
        "layers.0-2.norm.weight  (4,)    whole           columns\n"
        "head                    (9, 4)  dim 0: 9 parts\n"
        "\n"
        "sent        times  bytes each  why\n"
        "----------  -----  ----------  ---\n"
        "all-reduce      3        64 B  a"
    )


def test_a_layer_that_is_cut_otherwise_has_a_row_of_its_own() -> None:
    odd = ParameterCut("layers.1.up.weight", (8, 4), "whole", "small")
    shown = PartSplit("", 2, (CUTS[0], odd, CUTS[4]), ()).describe().splitlines()
    assert [line.split()[0] for line in shown[3:]] == ["layers.0,2.up.weight", "layers.1.up.weight"]
    assert shown[0] == "split over 2 ranks:"


def test_names_are_joined_over_one_number() -> None:
    names = [f"h.{n}.experts.{e}.w" for n in range(2) for e in range(4)] + ["w.10", "odd.x"]
    assert compact_paths(names) == [
        ("h.0.experts.0-3.w", "h.0.experts.0.w"),
        ("h.1.experts.0-3.w", "h.1.experts.0.w"),
        ("w.10", "w.10"),
        ("odd.x", "odd.x"),
    ]


def test_a_plan_lists_and_keeps_them() -> None:
    plan = make_plan([TaskGraphSpec("stage_0", "split", 2)], ClusterShape.of(1, 4), PlanSettings()).with_splits([SPLIT])
    assert SPLIT.describe() in plan.describe()
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
