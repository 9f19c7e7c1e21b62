"""What goes over the bridges of a plan, and how many bytes."""

from __future__ import annotations

import pytest

from epl.plan import ClusterShape, Plan, PlanSettings, TaskGraphSpec, make_plan
from epl.plan.bridges import LOOP, Crossing


def plan(*strategies: tuple[str, int], world: int, colocate: bool = False) -> Plan:
    specs = [TaskGraphSpec(f"t{n}", kind, count) for n, (kind, count) in enumerate(strategies)]  # type: ignore[arg-type]
    return make_plan(specs, ClusterShape(world, (0,) * world), PlanSettings(colocate=colocate))


CROSSING = Crossing("t0", "t1", 100, 60)


@pytest.mark.parametrize(
    ("first", "second", "forward", "said"),
    [
        (("replicate", 1), ("replicate", 1), 100, "sent"),
        (("replicate", 1), ("replicate", 2), 100, "rows of 1 dealt out to 2"),
        (("replicate", 2), ("replicate", 1), 100, "rows of 2 dealt out to 1"),
        (("replicate", 2), ("split", 3), 300, "all rows to each of 3 ranks"),
        (("split", 2), ("split", 3), 300, "from one of 2"),
        (("split", 2), ("replicate", 1), 100, "from one of 2"),
    ],
)
def test_between_stages(first: tuple[str, int], second: tuple[str, int], forward: int, said: str) -> None:
    (bridge,) = plan(first, second, world=first[1] + second[1]).with_bridges([CROSSING]).bridges
    assert (bridge.forward, bridge.backward) == (forward, forward * 60 // 100)
    assert said in bridge.how


def test_on_shared_devices_rows_come_together_and_part_again() -> None:
    crossings = [CROSSING, Crossing("t1", "t0", 50, 50), Crossing("t1", LOOP, 10, 10), Crossing("t0", LOOP, 7, 7)]
    made = plan(("replicate", 3), ("split", 3), world=3, colocate=True).with_bridges(crossings)
    assert [(b.source, b.target, b.forward, b.backward) for b in made.bridges] == [
        ("t0", "t1", 200, 120),
        ("t1", "t0", 100, 100),
        ("t1", LOOP, 20, 20),
    ]
    assert "all-gather, backward reduce-scatter" in str(made)
    assert Plan.from_dict(made.to_dict()) == made


def test_nothing_to_bridge() -> None:
    for made in (
        plan(("split", 2), ("split", 2), world=2, colocate=True),  # all ranks have the same rows
        plan(("replicate", 2), ("replicate", 2), world=2, colocate=True),
        plan(("replicate", 2), ("split", 2), world=1),
    ):
        assert made.with_bridges([CROSSING]).bridges == ()
        assert "bridge" not in str(made.with_bridges([CROSSING]))
