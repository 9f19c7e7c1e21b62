"""Tries the chain of stage functions before the first real step: what does not fit is named on every rank, before anything is sent.

Each rank tries its stages on micro batch 0 in a copy of its process (epl/train/trial.py), one stage after the other, with all ranks in
step; what a stage returned is told to the next one as a form. A correct program must not fail here, so there are two trials:

    1. tensors without numbers    what raises cannot depend on a number; asking for one ends the rehearsal
    2. real tensors, of zeros     only after an error: what raises again, at the same lines, is not about the lack of numbers;
                                  and all stages before it must return what they returned in the first trial

An error counts if both trials agree, and if it is torch's, or epl's about what was returned, or Python's about types or unpacking. Any
other error of Python code (an assertion, a key) counts only in a process without further Python threads, which its copy would miss.
Whatever else happens, the rehearsal is inconclusive: training simply begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch

from epl import _torch
from epl.cluster.communication import Job
from epl.errors import UsageError
from epl.parallel.pipeline.parcel import Form, in_words
from epl.parallel.pipeline.stage import StageProgram
from epl.train.place import PipelinePlace
from epl.train.trial import Made, Outcome, Raised, Trial

_SECONDS, _SECONDS_WITH_NUMBERS = 5.0, 20.0
_ENOUGH = 8  # forms of batches for the same functions; where every batch has another length there is no end of them

Told = Mapping[int, Outcome]
"""By rank, what became of one stage."""


class Signature(NamedTuple):
    """What is rehearsed: the code of this rank's functions, and the form of its batch."""

    code: tuple[object, ...]
    batch: tuple[object, ...]

    @staticmethod
    def of(functions: Sequence[Callable[..., object]], batch: Sequence[object], *, trains: bool) -> Signature:
        forms = [(t.shape, t.dtype) if isinstance(t, torch.Tensor) else _form(t) for t in batch]
        return Signature((trains, *map(_code, functions)), tuple(forms))


class Rehearsed:
    """What has been rehearsed."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], set[object]] = {}
        self._settled: set[tuple[object, ...]] = set()

    def has(self, signature: Signature) -> bool:
        """Whether there is no need to rehearse it (again)."""
        return signature.code in self._settled or signature.batch in self._known.get(signature.code, ())

    def add(self, signature: Signature, *, conclusive: bool) -> None:
        """It has been rehearsed; these functions will not be again if it came to nothing, or often enough."""
        known = self._known.setdefault(signature.code, set())
        known.add(signature.batch)
        if not conclusive or len(known) == _ENOUGH:
            self._settled.add(signature.code)


def rehearse(
    what: str, job: Job, place: PipelinePlace, programs: Mapping[int, StageProgram], micro_batch: tuple[object, ...]
) -> bool:
    """Whether all stages came through; what does not fit is raised on every rank. All ranks call it together."""
    first = _try_chain(what, job, place, programs, place.num_stages, numbers=False)
    if _came_through(first[-1]):
        return True
    if any(isinstance(outcome, Raised) for outcome in first[-1].values()):
        second = _try_chain(what, job, place, programs, len(first), numbers=True)
        found = confirmed(first, second)
        if found:
            batches = cast("list[str]", job.gather(what, ", ".join(map(in_words, micro_batch))))
            raise UsageError(complaint(what, len(first) - 1, found, batches))
    return False


def _try_chain(
    what: str, job: Job, place: PipelinePlace, programs: Mapping[int, StageProgram], stages: int, *, numbers: bool
) -> list[Told]:
    """What became of the stages, up to the first that did not come through on every rank that has it."""
    seconds = min(_SECONDS_WITH_NUMBERS if numbers else _SECONDS, job.timeout.total_seconds() / 4)
    received: dict[int, dict[int, Form]] = {stage: {} for stage in range(place.num_stages)}
    chain: list[Told] = []
    with Trial(programs, numbers=numbers, seconds=seconds) as trial:
        for stage in range(stages):
            own = trial.stage(stage, received[stage]) if stage in programs else None
            told = cast("list[Outcome | None]", job.gather(what, own))
            chain.append({rank: outcome for rank, outcome in enumerate(told) if outcome is not None})
            if not _came_through(chain[-1]):
                break
            made = next(chain[-1][rank] for rank in place.pipe_ranks if rank in chain[-1])
            for user, form in cast("Made", made).forms.items():
                received[user][stage] = form
    return chain


def _came_through(told: Told) -> bool:
    return all(isinstance(outcome, Made) for outcome in told.values())


def confirmed(first: Sequence[Told], second: Sequence[Told]) -> dict[int, Raised]:
    """The errors of the stage that the first trial ended with which the second confirms, by rank."""
    if len(first) != len(second) or any(a != b for a, b in zip(first[:-1], second[:-1], strict=True)):
        return {}
    found = {}
    for rank, expected in first[-1].items():
        real = second[-1][rank]
        if isinstance(expected, Raised) and isinstance(real, Raised) and expected.lines == real.lines:
            same = expected.kind == real.kind or expected.whose == real.whose == "torch"  # they say it in other words
            if same and expected.whose == real.whose:
                found[rank] = real
    return found


def complaint(what: str, stage: int, found: Mapping[int, Raised], batches: Sequence[str]) -> str:
    """The error that every rank raises, of the first rank that has one."""
    ranks = sorted(found)
    error, batch = found[ranks[0]], batches[ranks[0]]
    where = f"stage {stage} (rank {', '.join(map(str, ranks))})"
    if error.whose == "epl":
        return f"{what}: {error.message}. Returned by {where}; nothing has been sent yet."
    remedy = "Change the function of stage 0, or the batch it is given."
    if stage:
        remedy = f"Change what stage {stage - 1} returns, or what the function of stage {stage} does with it."
    return (
        f"{what}: {where} cannot work with what it is given; nothing has been sent yet.\n"
        f"  received: {error.received or 'nothing, it is the first stage'}\n"
        f"  its part of the batch: {batch or 'nothing'}\n"
        f"  raised: {error.kind}: {error.message}\n"
        f"{error.trace}{remedy}"
    )


def _form(value: object) -> object:
    leaves = _torch.tree_leaves(value)
    return tuple((t.shape, t.dtype) if isinstance(t, torch.Tensor) else type(t) for t in leaves)


def _code(function: object) -> object:
    """What stays the same when a program makes its function anew for every step."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))
