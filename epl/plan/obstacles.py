"""What keeps an assignment of nodes from being a pipeline, in words for the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epl.plan.assignment import Assignment
from epl.plan.memory import Sight, false_sights


def never_executed(assignment: Assignment, taskgraphs: Sequence[str]) -> list[str]:
    """TaskGraphs in which nothing is computed."""
    busy = {assignment.order[stage] for stage in assignment.stage.values()}
    problems = []
    for name in dict.fromkeys((*taskgraphs, *assignment.order)):
        if name not in busy:
            owned = [parameter for parameter, owner in assignment.owners.items() if owner == name]
            holds = f" (it holds {', '.join(owned[:3])}{', …' * (len(owned) > 3)})" if owned else ""
            problems.append(
                f"the forward never executes TaskGraph {name!r}{holds}, so it would be a stage with nothing to do: "
                "remove its scope, or put what it holds into the scope of what uses it"
            )
    return problems


def cycles(assignment: Assignment) -> list[str]:
    """Values that a later stage makes and an earlier one uses."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for value, stage, user in assignment.uses():
        if user is not None and assignment.stage.get(value, 0) > stage:
            found.setdefault((assignment.stage[value], stage), []).append((user, value))
    problems = []
    for (made, used), uses in sorted(found.items()):
        user, value = min(uses)
        first, second = assignment.order[used], assignment.order[made]
        others = len(uses) - 1
        problems.append(
            f"{second!r} runs after {first!r}, but {_module(assignment, value)} of {second!r} feeds "
            f"{_module(assignment, user)} of {first!r}"
            + (f" (and {others} more value{'s' * (others > 1)} go the same way)" if others else "")
            + ": on devices of their own, stages pass values forward only. Change the scopes so that each is left before "
            "the next is needed, put both parts into one scope, or let all TaskGraphs share the same devices "
            "(cluster.colocate_split_and_replicate)"
        )
    return problems


def effects_astray(assignment: Assignment) -> list[str]:
    """Changes in place that would not be seen where the program sees them, or be seen where it does not; to be asked when
    there are no cycles."""
    if all(assignment.free.issuperset(effects) for _, effects in assignment.memory.changed_groups()):
        return []
    found: dict[int, list[Sight]] = {}
    for sight in false_sights(
        assignment.nodes, assignment.memory, assignment.stages, sorted(assignment.home), assignment.last
    ):
        found.setdefault(assignment.memory.group(sight.value), []).append(sight)
    problems = []
    for sights in found.values():
        changes = dict.fromkeys(_in_stage(assignment, effect) for effect in assignment.memory.effects(sights[0].value))
        users = dict.fromkeys(_user(assignment, sight) for sight in sights)
        if changes:  # else it only follows from a change of something else
            problems.append(
                f"{' and '.join(changes)} {'changes' if len(changes) == 1 else 'change'} a value in place that another "
                f"stage uses too: {'; '.join(users)} would not see it as on one device. Write it without changing the value "
                "(`x = x + y` for `x += y`), or use the value in one TaskGraph only"
            )
    assert bool(problems) == bool(found), "a value that nothing changes is the same everywhere"
    return problems


def changed_twice(assignment: Assignment, num_devices: int) -> list[str]:
    """Changes of inputs and buffers that every rank makes for itself, where several stages are on one rank."""
    problems = []
    for values, effects in assignment.memory.changed_groups():
        lasting = any(assignment.nodes[value].is_everywhere for value in values)
        for effect in effects if lasting else ():
            devices = [stage % num_devices for stage in assignment.stages[effect]]
            if len(set(devices)) < len(devices):
                problems.append(
                    f"{_in_stage(assignment, effect)} would change an input or a buffer once for each of the stages that are "
                    "on one device (pipeline.num_chunks): write it without changing the value, or move it into a module"
                )
    return problems


def moved(
    assignment: Assignment, holders: Mapping[str, Sequence[int]], placed: Mapping[str, Sequence[int]]
) -> list[str]:
    """What another recording of a placed model uses where it is not."""
    new = dict.fromkeys(n.taskgraph for n in assignment.nodes.values() if n.taskgraph not in (None, *assignment.order))
    problems = [f"this call of the model executes TaskGraph {name!r}, which the first call did not" for name in new]
    for name, stages in holders.items():
        for stage in sorted(set(stages) - set(placed.get(name, stages))):
            there = ", ".join(repr(assignment.order[each]) for each in placed[name])
            problems.append(
                f"this call of the model uses {name!r} in {assignment.order[stage]!r}, but the first call placed it in "
                f"{there}: put it into one scope with what uses it"
            )
    return problems


def _module(assignment: Assignment, index: int) -> str:
    """A node by its module; glue with the module before it in the same stage."""
    node, around = assignment.nodes[index], index
    while assignment.nodes[around].kind != "leaf":
        same = [
            i for i in assignment.nodes[around].inputs if assignment.stage.get(i, -1) == assignment.stage.get(index)
        ]
        if not same:
            return node.title
        around = max(same)
    return node.title if around == index else f"{node.title} after {assignment.nodes[around].name!r}"


def _in_stage(assignment: Assignment, index: int) -> str:
    stages = " and ".join(repr(assignment.order[stage]) for stage in assignment.stages[index])
    return f"{assignment.nodes[index].title} in {stages}"


def _user(assignment: Assignment, sight: Sight) -> str:
    stage = assignment.order[sight.stage]
    if sight.user is not None:
        return f"{assignment.nodes[sight.user].title} in {stage!r}"
    if sight.value in assignment.home:
        return f"the code after the last module in {stage!r}"
    return f"the next call of the model in {stage!r}"
