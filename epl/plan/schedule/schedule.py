"""A pipeline schedule: what every device does, in order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from epl.errors import PlanError, list_problems
from epl.plan.schedule.action import MESSAGES, Action, ActionKind
from epl.plan.schedule.insert import insert_messages, insert_reductions

Edge = tuple[int, int]
"""The stage that makes a value and a later stage that uses it."""

_HEADING = re.compile(
    r"(?P<name>[^:]+): (?P<stages>\d+) stages? on (?P<devices>\d+) devices?, (?P<micro_batches>\d+) micro batch(es)?"
    r"(?P<home>; home)?(; edges(?P<edges>( \d+>\d+)*))?(; bridged(?P<bridged>( \d+>\d+)*))?"
)


def chain(num_stages: int) -> tuple[Edge, ...]:
    """The edges of a plain pipeline: every stage feeds the next."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


@dataclass(frozen=True)
class Schedule:
    """The actions of every device, in the order in which it takes them.

    Stages go round the devices: stage s is on device s mod `num_devices` (so with as many stages as devices, one each).
    """

    name: str
    num_devices: int
    num_stages: int
    num_micro_batch: int
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)
    """For each device its actions."""
    edges: tuple[Edge, ...]
    """Which stage feeds which, sorted; of a plain pipeline `chain(num_stages)`."""
    home: bool = False
    """Whether the last stage is a home, see `with_home`."""
    bridged: tuple[Edge, ...] = ()
    """Edges between stages of one device that travel all the same, since the device is several ranks and these differ."""

    def __post_init__(self) -> None:
        problems = []
        if not self.name or ":" in self.name or "\n" in self.name:
            problems.append(f"its name must be one line without a colon; found {self.name!r}")
        if self.num_devices < 1 or self.num_stages < self.num_devices or self.num_micro_batch < 1:
            problems.append(
                "it needs at least one device, a stage for every device and one micro batch; found "
                f"{self.num_devices} devices, {self.num_stages} stages, {self.num_micro_batch} micro batches"
            )
        if len(self.actions) != self.num_devices:
            problems.append(f"it needs a list for each of {self.num_devices} devices; found {len(self.actions)} lists")
        problems += [
            f"edge {made}>{used}: a value goes to a later stage of 0 to {self.num_stages - 1}"
            for made, used in self.edges
            if not 0 <= made < used < self.num_stages
        ]
        if problems:
            raise PlanError(list_problems("a schedule that cannot be", problems))

    def device_of(self, stage: int) -> int:
        """The device that computes a stage."""
        is_home = self.home and stage == self.num_stages - 1
        return (stage - is_home) % self.num_devices

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages that a device computes."""
        return tuple(stage for stage in range(self.num_stages) if self.device_of(stage) == device)

    def crosses(self, edge: Edge) -> bool:
        """Whether the values of an edge must travel: its ends are on different devices, or on different ranks of one."""
        return self.device_of(edge[0]) != self.device_of(edge[1]) or edge in self.bridged

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.actions for action in actions)

    def has(self, kinds: Iterable[ActionKind]) -> bool:
        """Whether any action is of one of these kinds."""
        kinds = frozenset(kinds)
        return any(action.kind in kinds for action in self)

    def compute_only(self) -> Schedule:
        """The same computations without messages and reductions."""
        return replace(self, actions=tuple(tuple(a for a in actions if a.is_compute) for actions in self.actions))

    def with_home(self) -> Schedule:
        """The same computations and one more stage on the last one's device, for what follows the model (the loss).

        It computes right after the last stage, and backwards right before it. Of a wide last stage it is one rank's, where the
        others' values come together: its edges from stages of the same device are then `bridged`.
        """
        last, home = self.num_stages - 1, self.num_stages
        after = {ActionKind.FORWARD: ActionKind.FORWARD}
        before = {ActionKind.BACKWARD: ActionKind.BACKWARD, ActionKind.INPUT_GRAD: ActionKind.BACKWARD}

        def beside(action: Action, kinds: dict[ActionKind, ActionKind]) -> list[Action]:
            found = action.stage == last and action.kind in kinds
            return [Action(kinds[action.kind], home, action.micro_batch)] if found else []

        actions = tuple(
            tuple(
                step
                for action in own
                if action.is_compute
                for step in (*beside(action, before), action, *beside(action, after))
            )
            for own in self.actions
        )
        edges = (*self.edges, (last, home))
        return replace(self, num_stages=home + 1, actions=actions, edges=edges, home=True)

    def with_communication(self, edges: Iterable[Edge] | None = None, bridged: Iterable[Edge] = ()) -> Schedule:
        """The same computations with the messages for these edges (default: the schedule's own, a plain pipeline's).

        A receive stands directly before the computation that needs the value, and means that the value must have arrived
        (whoever runs the list is free to post it earlier); a send stands directly after the one that makes it. Stages on
        one device hand values over without messages, but for those in `bridged`.
        """
        chosen = replace(self, bridged=tuple(sorted(set(bridged))))
        chosen = chosen if edges is None else replace(chosen, edges=tuple(sorted(set(edges))))
        bare = tuple(tuple(a for a in actions if a.kind not in MESSAGES) for actions in chosen.actions)
        travelling = [edge for edge in chosen.edges if chosen.crosses(edge)]
        return replace(chosen, actions=tuple(insert_messages(actions, travelling) for actions in bare))

    def with_reduce(self) -> Schedule:
        """The same actions with a reduction for every stage, as soon as its last weight gradient is there."""
        return replace(self, actions=tuple(insert_reductions(actions) for actions in self.actions))

    def timeline(self, *, svg: bool = False) -> str:
        """A drawing of the schedule with its bubble, as text or as SVG; `epl.report.timeline` has it with more choices."""
        from epl.report.timeline import timeline_svg, timeline_text  # drawing is the report's; plan only offers it

        return timeline_svg(self) if svg else timeline_text(self)

    def __str__(self) -> str:
        heading = (
            f"{self.name}: {_count(self.num_stages, 'stage')} on {_count(self.num_devices, 'device')}, "
            f"{_count(self.num_micro_batch, 'micro batch', 'micro batches')}"
        )
        if self.home:
            heading += "; home"
        if self.edges != chain(self.num_stages):
            heading += f"; edges{_edges(self.edges)}"
        if self.bridged:
            heading += f"; bridged{_edges(self.bridged)}"
        lines = [" ".join([f"{device}:", *map(str, actions)]) for device, actions in enumerate(self.actions)]
        return "\n".join([heading, *lines])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that `str` writes as this text."""
        heading, *lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        found = _HEADING.fullmatch(heading)
        if found is None:
            raise PlanError(
                f"expected a heading like 'PreferBackward: 4 stages on 4 devices, 8 micro batches'; found {heading!r}"
            )
        lists = []
        for device, line in enumerate(lines):
            label, *words = line.split()
            if label != f"{device}:":
                raise PlanError(f"expected the actions of device {device} as '{device}: …'; found {line!r}")
            lists.append(tuple(map(Action.parse, words)))
        devices, stages, micro_batches = (int(found[name]) for name in ("devices", "stages", "micro_batches"))
        edges = chain(stages) if found["edges"] is None else _parse_edges(found["edges"])
        bridged = _parse_edges(found["bridged"] or "")
        return cls(found["name"], devices, stages, micro_batches, tuple(lists), edges, bool(found["home"]), bridged)


def _edges(edges: Iterable[Edge]) -> str:
    return "".join(f" {made}>{used}" for made, used in edges)


def _parse_edges(text: str) -> tuple[Edge, ...]:
    pairs = [word.split(">") for word in text.split()]
    return tuple(sorted({(int(made), int(used)) for made, used in pairs}))


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
