"""Before the first step the chain of stages is rehearsed: what does not fit is named on every rank before anything is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import epl
import epl.train.pipeline
from epl.cluster.communication import Job
from epl.errors import UsageError
from epl.parallel.pipeline.parcel import take_apart
from epl.parallel.pipeline.transport import GroupTransport
from epl.train.rehearsal import Rehearsed, Signature, complaint, confirmed
from epl.train.trial import Made, Outcome, Raised, Unknown
from tests.harness import run_ranks

Function = Callable[..., Any]
ROWS = 6


def _start(**settings: object) -> tuple[int, int]:
    """This rank, and the number of ranks."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    epl.init(epl.Config({"pipeline.num_micro_batch": 3, "communication.timeout": 40} | named))
    torch.manual_seed(0)
    cluster = epl.Env.get().cluster
    return cluster.rank, cluster.world_size


# ---- what does not fit -------------------------------------------------------------------------------------------------


def _layer(received: Any, x: torch.Tensor, *, width: int = 4) -> torch.Tensor:
    return nn.Linear(width, 4)(x if received is None else received)


def _loss(received: Any, x: torch.Tensor, *, width: int = 4) -> torch.Tensor:
    return _layer(received, x, width=width).square().mean()


def _three(received: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x, x, x


def _of_two(received: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = received
    return (first + second).mean()


def _dict(received: Any, x: torch.Tensor) -> dict[str, Any]:
    return {"hidden": x, "length": 4}


def _of_other_key(received: Any, x: torch.Tensor) -> torch.Tensor:
    return received["h"].mean()


def _embed(received: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.Embedding(9, 4)(received).mean()


def _double(received: Any, x: torch.Tensor) -> torch.Tensor:
    return x.double()


def _asserts(received: Any, x: torch.Tensor) -> torch.Tensor:
    assert received.shape[-1] == 7, "seven features"
    return received.mean()


def _nothing(received: Any, x: torch.Tensor) -> None:
    return None


def _only_received(received: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.relu(received).mean()


def _image(received: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.Conv2d(3, 4, 1)(received[:, None, :, None]).mean()


wide = functools.partial(_loss, width=9)
wide_layer = functools.partial(_layer, width=9)
FAULTS: dict[str, tuple[Sequence[Function], int, list[str]]] = {
    # the functions of all stages, which of them is at fault, what is said
    "width": ((_layer, wide), 1, ["float32 (2, 4) from stage 0", "RuntimeError: mat1 and mat2 shapes", "2x4 and 9x4"]),
    "number of tensors": (
        (_three, _of_two),
        1,
        ["(float32 (2, 4), float32 (2, 4), float32 (2, 4))", "unpack", "first, sec"],
    ),
    "a dict": ((_dict, _loss), 1, ["{'hidden': float32 (2, 4), 'length': 4}", "must be Tensor, not dict"]),
    "another key": ((_dict, _of_other_key), 1, ["{'hidden': float32 (2, 4), 'length': 4}", "KeyError: 'h'"]),
    "an index of another dtype": ((_layer, _embed), 1, ["float32 (2, 4)", "Expected tensor for argument #1 'indices'"]),
    "another dtype": ((_double, _loss), 1, ["float64 (2, 4)", "must have the same dtype"]),
    "nothing": ((_nothing, _only_received), 1, ["received: None from stage 0", "not NoneType"]),
    "channels": ((_layer, _image), 1, ["channels"]),
    "an assertion": ((_layer, _asserts), 1, ["AssertionError: seven features", "assert received.shape"]),
    "the batch": ((wide_layer, _loss), 0, ["nothing, it is the first stage", "Change the function of stage 0"]),
    "three stages, the second": ((_layer, wide_layer, _loss), 1, ["from stage 0", "Change what stage 0 returns"]),
    "three stages, the last": ((_layer, _layer, wide), 2, ["from stage 1", "Change what stage 1 returns"]),
}


def _run_faulty(name: str, call: str) -> tuple[str, int, int]:
    """What was raised, and how often this rank's function was called and something was sent or received."""
    rank, _ = _start()
    return _raised_by(FAULTS[name][0][rank], call)


def _raised_by(function: Function | list[Function], call: str, **named: object) -> tuple[str, int, int]:
    calls, messages = [], []
    GroupTransport.send = GroupTransport.receive = lambda *args: messages.append(args)  # type: ignore[method-assign]

    def counted(one: Function) -> Function:
        return lambda *args: (calls.append(args), one(*args))[1]

    functions = [counted(f) for f in function] if isinstance(function, list) else counted(function)
    with pytest.raises(UsageError) as caught:
        getattr(epl, call)(functions, torch.ones(ROWS, 4), **named)
    return str(caught.value), len(calls), len(messages)


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_named_on_every_rank_before_anything_is_sent(name: str) -> None:
    functions, stage, words = FAULTS[name]
    first, *others = run_ranks(_run_faulty, len(functions), name, "forward_backward")
    assert all(other == first for other in others)
    message, calls, messages = first
    assert (calls, messages) == (0, 0)
    for word in (f"epl.forward_backward: stage {stage} (rank {stage})", "test_rehearsal.py", *words):
        assert word in message


def test_what_does_not_fit_in_an_evaluation_is_named_too():
    for message, calls, messages in run_ranks(_run_faulty, 2, "width", "forward_eval"):
        assert (calls, messages) == (0, 0)
        assert "epl.forward_eval: stage 1 (rank 1)" in message


def _interleaved() -> tuple[str, int, int]:
    rank, _ = _start(pipeline__strategy="Interleaved", pipeline__num_chunks=2)
    return _raised_by([_layer, wide_layer if rank == 0 else _loss], "forward_backward")


def test_what_does_not_fit_between_chunks_is_named():
    for message, calls, messages in run_ranks(_interleaved, 2):
        assert (calls, messages) == (0, 0)
        assert "stage 2 (rank 0)" in message
        assert "from stage 1" in message


def _two_replicas(wrong: list[int]) -> tuple[str, int, int]:
    rank, _ = _start()
    epl.setup_process_groups([("data", 2), ("pipe", 2)])
    stage = nn.Linear(9 if rank in wrong else 4, 4)

    def function(received, x):
        return stage(x) if received is None else stage(received).mean()

    return _raised_by(function, "forward_backward", module=stage)


@pytest.mark.parametrize("wrong", [[1, 3], [3]])
def test_the_ranks_of_all_replicas_are_named(wrong: list[int]) -> None:
    first, *others = run_ranks(_two_replicas, 4, wrong)
    assert all(other == first for other in others)
    assert first[1:] == (0, 0)
    assert f"stage 1 (rank {', '.join(map(str, wrong))})" in first[0]


def _goes_on() -> list[float]:
    """The same fault twice, then another function: the losses of its micro batches."""
    rank, _ = _start()
    layer = nn.Linear(4, 4)
    for _ in range(2):
        with pytest.raises(UsageError, match="cannot work with what it is given"):
            epl.forward_backward(FAULTS["width"][0][rank], torch.ones(ROWS, 4), module=layer)

    def stage(received, x):
        return layer(x) if rank == 0 else layer(received).mean()

    return epl.forward_backward(stage, torch.ones(ROWS, 4), module=layer).tolist()


def test_after_a_fault_the_pipeline_is_whole():
    first, second = run_ranks(_goes_on, 2)
    assert first == second
    assert len(first) == 3


# ---- how often ---------------------------------------------------------------------------------------------------------


def _count(lengths: list[int], asks: bool) -> tuple[int, list[int]]:
    """How many rehearsals there were for batches of these lengths, and how often ranks met in every step."""
    rank, _ = _start()
    count, meetings = [], [0]
    real, meet = epl.train.pipeline.rehearse, Job.meet
    epl.train.pipeline.rehearse = lambda *args: (count.append(args), real(*args))[1]
    Job.meet = lambda *args, **named: (meetings.append(meetings.pop() + 1), meet(*args, **named))[1]
    found = []

    def stage(received, x):
        if rank == 1:
            return received.mean()
        return x * x.sum().item() if asks else x * 2

    for length in lengths:
        meetings[:] = [0]
        epl.forward_backward(stage, torch.ones(ROWS, length) if rank == 0 else None)
        found += meetings
    return len(count), found


def test_a_signature_is_rehearsed_once_and_a_step_without_has_one_meeting():
    for count, meetings in run_ranks(_count, 2, [3, 3, 5, 5, 3], False):
        assert count == 2
        assert [meetings[n] for n in (1, 3, 4)] == [1, 1, 1]


def test_there_is_an_end_to_rehearsals():
    for count, meetings in run_ranks(_count, 2, list(range(1, 14)), False):
        assert count == 8
        assert meetings[8:] == [1] * 5


def test_what_could_not_be_told_once_is_not_asked_again():
    for count, meetings in run_ranks(_count, 2, [3, 4, 5], True):
        assert count == 1
        assert meetings[1:] == [1, 1]


# ---- decisions ---------------------------------------------------------------------------------------------------------


def _error(kind: str = "RuntimeError", whose: Any = "torch", line: int = 3, message: str = "") -> Raised:
    return Raised(kind, message, whose, (("train.py", line),), "", "float32 (2, 4) from stage 0")


MADE = Made({1: take_apart(torch.ones(2))[0]})
OTHER = Made({1: take_apart(torch.ones(3))[0]})


@pytest.mark.parametrize(
    ("without_numbers", "with_numbers", "counts"),
    [
        ([MADE, _error()], [MADE, _error(message="in other words")], True),
        (
            [MADE, _error("ValueError")],
            [MADE, _error("RuntimeError")],
            True,
        ),  # both torch's: a rule for shapes says it otherwise
        ([MADE, _error("KeyError", "python")], [MADE, _error("KeyError", "python")], True),
        ([MADE, _error("KeyError", "python")], [MADE, _error("IndexError", "python")], False),
        ([MADE, _error(line=3)], [MADE, _error(line=4)], False),
        ([MADE, _error(whose="torch")], [MADE, _error(whose="python")], False),
        ([MADE, _error()], [MADE, MADE], False),
        ([MADE, _error()], [MADE, Unknown("it took too long")], False),
        ([MADE, _error()], [OTHER, _error()], False),
        ([MADE, _error()], [_error()], False),
        ([MADE, Unknown("it needs numbers")], [MADE, _error()], False),
    ],
)
def test_an_error_counts_if_both_trials_agree(
    without_numbers: list[Outcome], with_numbers: list[Outcome], counts: bool
) -> None:
    found = confirmed([{7: o} for o in without_numbers], [{7: o} for o in with_numbers])
    assert found == ({7: with_numbers[-1]} if counts else {})


def test_the_complaint_names_every_rank_and_shows_the_first():
    found = {5: _error(message="of rank 5"), 2: _error(message="of rank 2")}
    text = complaint("epl.forward_backward", 1, found, [f"batch of rank {rank}" for rank in range(6)])
    for word in (
        "stage 1 (rank 2, 5)",
        "of rank 2",
        "batch of rank 2",
        "float32 (2, 4) from stage 0",
        "stage 0 returns",
    ):
        assert word in text
    assert "of rank 5" not in text


def test_functions_made_anew_are_known_by_their_code():
    def make() -> Function:
        return lambda received, x: x

    batch = [torch.ones(2, 3), {"n": 1}]
    known = Rehearsed()
    known.add(Signature.of([make()], batch, trains=True), conclusive=True)
    assert known.has(Signature.of([make()], batch, trains=True))
    assert known.has(Signature.of([functools.partial(make(), None)], batch, trains=True))
    others = [
        Signature.of([make()], batch, trains=False),
        Signature.of([make(), make()], batch, trains=True),
        Signature.of([lambda received, x: -x], batch, trains=True),
        Signature.of([nn.Linear(2, 2)], batch, trains=True),
        Signature.of([make()], [torch.ones(2, 4), {"n": 1}], trains=True),
        Signature.of([make()], [torch.ones(2, 3).double(), {"n": 1}], trains=True),
        Signature.of([make()], [torch.ones(2, 3), {"n": 1.0}], trains=True),
    ]
    assert not any(known.has(other) for other in others)
