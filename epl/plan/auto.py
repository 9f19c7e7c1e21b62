"""Automatic stages: the parts of a model, in order of execution, cut into contiguous groups of nearly equal time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from epl.errors import PlanError
from epl.plan.table import compact_names, size

_Cost = Callable[[int, int, int], float]
"""Of (stage, first part, part after the last): what a stage of these parts costs; infinite if there cannot be one."""


@dataclass(frozen=True)
class Part:
    """A module call as automatic stages see it; the smallest thing that has a stage."""

    name: str
    time: float
    """Of one micro batch, in any unit."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each parameter it uses, with gradient and optimizer state: a stage holds each of them once."""
    activations: int = 0
    """Bytes it keeps of one micro batch for the backward."""


@dataclass(frozen=True)
class AutoCut:
    """Parts grouped into stages."""

    stages: tuple[tuple[int, int], ...]
    """For every stage its parts, [start, stop)."""
    times: tuple[float, ...]
    """For every stage its share of the whole time."""
    memory: tuple[int, ...]
    """For every stage the bytes it holds: weights, and activations of the micro batches it keeps."""
    reason: str
    """The choice in words, a line for each stage."""

    def stage_of(self, part: int) -> int:
        """The stage of a part."""
        return next(stage for stage, (start, stop) in enumerate(self.stages) if start <= part < stop)


def cut_parts(
    parts: Sequence[Part], num_stages: int, *, live: Sequence[int] | None = None, memory_limit: int | None = None
) -> AutoCut:
    """The stages whose slowest takes the least time; of these, those that need the least memory at most; of these, the
    most even ones. Exact, for any number of parts and stages; PlanError if there are fewer parts than stages.

    `live` is how many micro batches' activations each stage keeps (default: 1). `memory_limit` is what a stage may hold.
    """
    if not 1 <= num_stages <= len(parts):
        raise PlanError(
            f"automatic stages: {num_stages} stages are asked for, and the model has {len(parts)} parts that can be stages "
            f"({compact_names([part.name for part in parts])}): every stage needs at least one. "
            f"Set pipeline.num_stages (times pipeline.num_chunks) to 1-{len(parts)}, or annotate smaller parts yourself"
            if parts
            else "automatic stages: the forward of the model calls no module, so there is nothing to cut: "
            "annotate the model with scopes inside its forward"
        )
    kept = [1] * num_stages if live is None else list(live)
    assert len(kept) == num_stages, f"{len(kept)} numbers of live micro batches for {num_stages} stages"
    upto = [0.0, *accumulate(part.time for part in parts)]
    weights = _weights(parts)
    activations = [0, *accumulate(part.activations for part in parts)]

    def time(stage: int, start: int, stop: int) -> float:
        return upto[stop] - upto[start]

    def memory(stage: int, start: int, stop: int) -> int:
        return weights[start][stop] + kept[stage] * (activations[stop] - activations[start])

    limit = math.inf if memory_limit is None else memory_limit
    least_time, _ = _best(len(parts), num_stages, _where(time, memory, limit), max)
    if math.isinf(least_time):
        assert memory_limit is not None, "without a limit every cut is possible"
        least_memory, _ = _best(len(parts), num_stages, memory, max)
        raise PlanError(
            f"automatic stages: {num_stages} stages of at most {size(memory_limit)} cannot hold the model; "
            f"the best cut needs {size(int(least_memory))} in one of them. Use more stages (pipeline.num_stages), "
            "or smaller micro batches (the loader's batch_size)"
        )
    in_time = _where(memory, time, least_time)
    least_memory, _ = _best(len(parts), num_stages, in_time, max)
    even = _where(_where(lambda *of: time(*of) ** 2, time, least_time), memory, least_memory)
    _, stages = _best(len(parts), num_stages, even, lambda a, b: a + b)
    whole = upto[-1] or 1.0
    times = tuple(time(0, *stage) / whole for stage in stages)
    held = tuple(memory(number, *stage) for number, stage in enumerate(stages))
    return AutoCut(tuple(stages), times, held, _reason(parts, stages, times, held))


def _weights(parts: Sequence[Part]) -> list[list[int]]:
    """Bytes of the distinct parameters of parts [start, stop), as a table."""
    table = []
    for start in range(len(parts)):
        found: dict[str, int] = {}
        row = [0] * (start + 1)
        total = 0
        for part in parts[start:]:
            for name, each in part.weights.items():
                total += each if name not in found else 0
                found[name] = each
            row.append(total)
        table.append(row)
    return table


def _where(cost: _Cost, other: _Cost, limit: float) -> _Cost:
    """A cost that is infinite where another one is above a limit."""
    return lambda *of: cost(*of) if other(*of) <= limit else math.inf


def _best(
    count: int, num_stages: int, cost: _Cost, join: Callable[[float, float], float]
) -> tuple[float, list[tuple[int, int]]]:
    """The smallest joined cost of cutting `count` parts into `num_stages` groups that are not empty, and the groups.

    best[s][j]: the first j parts as s stages. Stage s takes parts [i, j) after the best cut of the first i parts.
    """
    best = [0.0] + [math.inf] * count
    choices: list[list[int]] = []
    for stage in range(num_stages):
        row, chosen = [math.inf] * (count + 1), [stage] * (count + 1)
        for stop in range(stage + 1, count + 1 - (num_stages - 1 - stage)):
            for start in range(stage, stop):
                if best[start] < row[stop]:  # joining never makes it smaller: costs are not negative
                    joined = join(best[start], cost(stage, start, stop))
                    if joined < row[stop]:
                        row[stop], chosen[stop] = joined, start
        best = row
        choices.append(chosen)
    groups: list[tuple[int, int]] = []
    stop = count
    for chosen in reversed(choices):
        groups.append((chosen[stop], stop))
        stop = chosen[stop]
    return best[count], groups[::-1]


def _reason(
    parts: Sequence[Part], stages: Sequence[tuple[int, int]], times: Sequence[float], memory: Sequence[int]
) -> str:
    even = 1 / len(stages)
    lines = [
        f"automatic stages: {len(parts)} parts cut into {len(stages)} so that the slowest takes {max(times):.0%} of the "
        f"time (all alike: {even:.0%})"
    ]
    for number, (start, stop) in enumerate(stages):
        names = compact_names(list(dict.fromkeys(part.name for part in parts[start:stop])))
        lines.append(f"stage_{number}: {names}: {times[number]:.0%} of the time, {size(memory[number])}")
    return "\n".join(lines)
