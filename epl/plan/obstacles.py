"""What keeps an assignment of nodes from being a pipeline, in words for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from epl.plan.assignment import Assignment


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
    """Changes in place that would not be seen where the program sees them, or be seen where it does not.

    A stage gets a value as it is when the stage that makes it is done, and changes its own copy:

        a change where the value was made     is seen by the other stages: they must come after it in the program
        a change in a stage that received it  is seen there only: the others must come before it

    Values that share memory no longer do so where they have been received.
    """
    problems = []
    for values, effects in assignment.memory.changed_groups():
        if assignment.free.issuperset(effects):
            continue  # every rank changes its own copy alike
        made = {assignment.stage[v] for v in values if v in assignment.stage and v not in effects}
        for effect in effects:
            others = dict.fromkeys(_strangers(assignment, values, effect))
            if len(made) > 1 or _arrivals(assignment, values, effect) > 1:
                others["parts of it are made in one stage and used in another"] = None
            if others:
                node, stage = assignment.nodes[effect], assignment.stage[effect]
                problems.append(
                    f"{node.title} in {assignment.order[stage]!r} changes a value in place that another stage uses too: "
                    f"{'; '.join(others)}. Write it without changing the value (`x = x + y` for `x += y`), or use it in "
                    "one TaskGraph only"
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
        same = [i for i in assignment.nodes[around].inputs if assignment.stage.get(i) == assignment.stage[index]]
        if not same:
            return node.title
        around = max(same)
    return node.title if around == index else f"{node.title} after {assignment.nodes[around].name!r}"


def _arrivals(assignment: Assignment, values: Sequence[int], effect: int) -> int:
    """How many of the values come into the stage of the effect from outside, where they no longer share memory."""
    members, stage = set(values), assignment.stage[effect]
    used = {value for value, used_in, _ in assignment.uses() if value in members and used_in == stage}
    return sum(assignment.stage.get(value) != stage for value in used)


def _strangers(assignment: Assignment, values: Sequence[int], effect: int) -> Iterator[str]:
    """Who uses one of the values in another stage and would see it with the change, or without it, against the program."""
    members, stage = set(values), assignment.stage[effect]
    for value, used_in, user in assignment.uses():
        if value not in members or used_in == stage or user == effect:
            continue
        after = user is None or user > effect
        if value in assignment.stage:
            astray = after != (assignment.stage[value] == stage)
        else:  # every rank has its own; of what lasts beyond the call, all must stay alike
            astray = after or assignment.nodes[value].kind in ("constant", "parameter")
        if astray:
            what = "the code after the last module" if user is None else assignment.nodes[user].title
            yield f"{what} in {assignment.order[used_in]!r}"
