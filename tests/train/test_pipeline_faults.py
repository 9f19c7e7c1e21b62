"""Bad input and faults of epl.forward_backward, on real ranks: who, where and why, on every rank, in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import epl
from epl.errors import ConfigError, PeerLostError, PlanError, RanksDisagreeError, UsageError
from tests.harness import ROOT, finish_ranks, rank_errors, run_ranks

ROWS = 4


def _start(**settings: object) -> tuple[int, int]:
    """This rank, and the number of ranks."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    epl.init(epl.Config({"pipeline.num_micro_batch": 2, "communication.timeout": 30} | named))
    torch.manual_seed(0)
    cluster = epl.Env.get().cluster
    return cluster.rank, cluster.world_size


# ---- what is wrong before anything is sent, and the same on every rank -------------------------------------------------


def _other_rows() -> None:
    rank, _ = _start()
    epl.forward_backward(lambda received, x: x.mean(), torch.ones(ROWS + rank, 2))


def _no_tensors() -> None:
    _start()
    epl.forward_backward(lambda received, x: x, 3)


def _empty_batch() -> None:
    _start()
    epl.forward_backward(lambda received, x: x, torch.ones(0, 2))


def _one_function_for_two_chunks() -> None:
    _start(pipeline__strategy="Interleaved", pipeline__num_chunks=2)
    epl.forward_backward(lambda received, x: x, torch.ones(ROWS, 2))


def _two_functions_for_one_chunk() -> None:
    _start()
    epl.forward_backward([lambda received, x: x] * 2, torch.ones(ROWS, 2))


def _no_function() -> None:
    _start()
    epl.forward_backward(nn.Linear(2, 2).weight, torch.ones(ROWS, 2))


def _chunks_of_a_schedule_without() -> None:
    _start(pipeline__num_chunks=2)
    epl.forward_backward([lambda received, x: x] * 2, torch.ones(ROWS, 2))


def _interleaved_without_chunks() -> None:
    _start(pipeline__strategy="Interleaved")
    epl.forward_backward(lambda received, x: x, torch.ones(ROWS, 2))


def _no_module_for_two_replicas() -> None:
    _start()
    epl.setup_process_groups([("data", 2), ("pipe", 1)])
    layer = nn.Linear(2, 1)
    epl.forward_backward(lambda received, x: layer(x).mean(), torch.ones(ROWS, 2))


def _no_module_on_one_of_two_replicas() -> None:
    rank, _ = _start()
    epl.setup_process_groups([("data", 2), ("pipe", 1)])
    layer = nn.Linear(2, 1)
    epl.forward_backward(lambda received, x: layer(x).mean(), torch.ones(ROWS, 2), module=layer if rank else None)


def _unlike_ties() -> None:
    rank, _ = _start()
    layer = nn.Linear(2, 2 + rank)
    epl.parallel.tie("weight", layer.weight)
    epl.forward_backward(
        lambda received, x: layer(x) if rank == 0 else layer(received).mean(), torch.ones(ROWS, 2), module=layer
    )


def _module_that_is_none() -> None:
    _start()
    epl.forward_backward(lambda received, x: x, torch.ones(ROWS, 2), module=[nn.ReLU(), nn.ReLU()])


def _backward_that_is_no_function() -> None:
    _start()
    epl.forward_backward(lambda received, x: x, torch.ones(ROWS, 2), backward=True)


def _own_backward_in_two_halves() -> None:
    rank, _ = _start(pipeline__strategy="ZeroBubble")
    layer = nn.Linear(2, 2)
    epl.forward_backward(
        lambda received, x: layer(x) if rank == 0 else layer(received).mean(),
        torch.ones(ROWS, 2),
        module=layer,
        backward=torch.autograd.backward,
    )


def _three_stages_on_two_ranks() -> None:
    _start(pipeline__num_stages=3)
    epl.forward_backward(lambda received, x: x, torch.ones(ROWS, 2))


def _unknown_schedule() -> None:
    _start(pipeline__strategy="PreferBackwards")


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (_other_rows, UsageError, ["number of rows", "[4, 5]"]),
        (_no_tensors, UsageError, ["number of rows", "ranks [0, 1]: []"]),
        (_empty_batch, UsageError, ["number of rows", "ranks [0, 1]: []"]),
        (_one_function_for_two_chunks, UsageError, ["pipeline.num_chunks = 2", "found 1"]),
        (_two_functions_for_one_chunk, UsageError, ["pipeline.num_chunks = 1", "found 2"]),
        (_no_function, UsageError, ["found Parameter where a function is expected"]),
        (_chunks_of_a_schedule_without, PlanError, ["pipeline.num_chunks = 2", "'Interleaved'"]),
        (_interleaved_without_chunks, PlanError, ["pipeline.num_chunks = 1", "pipeline.num_chunks = 2"]),
        (_no_module_for_two_replicas, UsageError, ["2 model replicas", "module="]),
        (_no_module_on_one_of_two_replicas, UsageError, ["2 model replicas", "module="]),
        (_unlike_ties, UsageError, ["'weight'", "(2, 2)", "(3, 2)"]),
        (_module_that_is_none, UsageError, ["module", "found 2"]),
        (_backward_that_is_no_function, UsageError, ["backward is a function", "found bool"]),
        (_own_backward_in_two_halves, UsageError, ["backward", "ZeroBubble"]),
        (_three_stages_on_two_ranks, PlanError, ["pipeline.num_stages = 3", "2 ranks", "Start 3"]),
        (_unknown_schedule, ConfigError, ["'PreferBackwards'", "ZeroBubble"]),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) and not isinstance(value, type) else "",
)
def test_bad_input_is_named_on_every_rank(function: Callable[[], None], error: type, words: list[str]) -> None:
    for found in rank_errors(function, 2):
        assert found is not None
        assert found[0] == error.__name__
        for word in words:
            assert word in found[1]


def _one_rank_does_something_else(steps: int = 1) -> None:
    rank, _ = _start()
    x = torch.ones(ROWS, 2)
    for _ in range(steps):
        epl.forward_backward(lambda received, x: x.mean(), x)
    if rank == 0:
        epl.forward_backward(lambda received, x: x, x)
    else:
        epl.global_mean(1.0)


def _one_rank_does_something_else_at_once() -> None:
    _one_rank_does_something_else(steps=0)


def _one_rank_evaluates() -> None:
    rank, _ = _start()
    x = torch.ones(ROWS, 2)
    (epl.forward_backward if rank == 0 else epl.forward_eval)(lambda received, x: x.mean(), x)


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (_one_rank_does_something_else, "epl.global_mean"),
        (_one_rank_does_something_else_at_once, "epl.global_mean"),
        (_one_rank_evaluates, "epl.forward_eval"),
    ],
)
def test_a_rank_that_does_not_take_part_is_named_on_every_rank(function: Callable[[], None], other: str) -> None:
    first, second = rank_errors(function, 2)
    assert first == second
    assert first is not None
    assert first[0] == RanksDisagreeError.__name__
    for word in ("rank 0: epl.forward_backward", f"rank 1: {other}", "test_pipeline_faults.py:"):
        assert word in first[1]


def _one_rank_is_wrong() -> None:
    rank, _ = _start()
    functions = [lambda received, x: x.mean()] * (1 + rank)
    epl.forward_backward(functions, torch.ones(ROWS, 2))


def test_what_is_wrong_on_one_rank_ends_the_others() -> None:
    first, second = rank_errors(_one_rank_is_wrong, 2)
    assert second is not None
    assert second[0] == UsageError.__name__
    assert first is not None
    assert first[0] == PeerLostError.__name__


def _goes_on_after_bad_input() -> list[float]:
    rank, _ = _start()
    layer = nn.Linear(2, 2)

    def stage(received, x):
        return layer(x) if rank == 0 else layer(received).mean()

    with pytest.raises(UsageError):
        epl.forward_backward(stage, torch.ones(ROWS + rank, 2), module=layer)
    return epl.forward_backward(stage, torch.ones(ROWS, 2), module=layer).tolist()


def test_bad_input_that_was_named_leaves_the_pipeline_whole() -> None:
    first, second = run_ranks(_goes_on_after_bad_input, 2)
    assert first == second
    assert len(first) == 2


# ---- what goes wrong inside the schedule -------------------------------------------------------------------------------


class _Odd:
    def __reduce__(self):
        raise TypeError("an odd thing stays where it is")


ODD = {
    "generator": (lambda: (n for n in range(3)), "generator"),
    "function": (lambda: {"f": lambda: 3}, "dict with something else in it"),
    "own reason": (_Odd, "an odd thing stays where it is"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo tensor"),
    "nested sparse": (lambda: [None, {"x": torch.eye(2).to_sparse()}], "torch.sparse_coo tensor"),
    "meta": (lambda: torch.empty(2, device="meta"), "on meta"),
}


def _returns(kind: str, good_steps: int) -> None:
    rank, _ = _start()
    make, _ = ODD[kind]
    for step in range(good_steps + 1):
        epl.forward_backward(
            lambda received, x, now=step == good_steps: make() if rank == 0 and now else x.mean(), torch.ones(ROWS, 2)
        )


@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_travel_is_named_on_every_rank_before_anything_is_sent(kind: str) -> None:
    first, second = rank_errors(_returns, 2, kind, 0)
    assert first == second
    assert first is not None
    assert first[0] == UsageError.__name__
    for word in (ODD[kind][1], "Returned by stage 0 (rank 0)", "nothing has been sent"):
        assert word in first[1]


@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_travel_in_a_later_step_is_named_where_it_was_returned(kind: str) -> None:
    ranks = finish_ranks(_returns, 2, kind, 1)
    (outcome, (name, message, trace), _) = ranks[0].outcome
    assert (outcome, name) == ("error", UsageError.__name__)
    assert ODD[kind][1] in message
    assert "sending the output to stage 1 of stage 0, micro batch 0 (0SF0>1)" in trace
    assert ranks[1].outcome[0] == "error", "the other rank does not wait for ever"


def _last_returns(kind: str, good_steps: int) -> None:
    rank, _ = _start()
    values = {"rows": torch.ones(2, 3), "number": 0.5, "nothing": None, "text": "0.5", "pair": (torch.ones(()), 1)}
    for step in range(good_steps + 1):
        epl.forward_backward(
            lambda received, x, now=step == good_steps: x if rank == 0 else values[kind] if now else x.mean(),
            torch.ones(ROWS, 2),
        )


NO_LOSS = [
    ("rows", "a tensor of shape (2, 3)"),
    ("number", "float"),
    ("nothing", "None"),
    ("text", "str"),
    ("pair", "tuple"),
]


@pytest.mark.parametrize(("kind", "found"), NO_LOSS)
def test_a_last_stage_without_a_loss_is_named_on_every_rank_before_anything_is_sent(kind: str, found: str) -> None:
    first, second = rank_errors(_last_returns, 2, kind, 0)
    assert first == second
    assert first is not None
    assert first[0] == UsageError.__name__
    for word in ("the last stage (stage 1) must return the loss", f"found {found}", "nothing has been sent"):
        assert word in first[1]


@pytest.mark.parametrize(("kind", "found"), NO_LOSS)
def test_a_last_stage_without_a_loss_in_a_later_step_is_named(kind: str, found: str) -> None:
    ranks = finish_ranks(_last_returns, 2, kind, 1)
    (outcome, (name, message, trace), _) = ranks[1].outcome
    assert (outcome, name) == ("error", UsageError.__name__)
    assert "the last stage (stage 1) must return the loss of the micro batch" in message
    assert f"found {found}" in message
    assert "stage 1, micro batch 0 (1F0)" in trace
    assert ranks[0].outcome[0] == "error"


SCRIPT = """
    import os
    import sys
    import torch
    from torch import nn
    import epl

    epl.init(epl.Config({"pipeline.num_micro_batch": 4}))
    rank, ranks = epl.Env.get().cluster.rank, epl.Env.get().cluster.world_size
    stage = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    calls = 0

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if calls > 10:
                raise ArithmeticError("the backward's own cause")
            return gradient

    def my_stage(received, x):
        global calls
        calls += 1
        y = stage(x if received is None else received)
        if rank == 1 and calls == 11:  # the third micro batch of the third step
            FAULT
        return y.square().mean() if rank == ranks - 1 else y

    for step in range(1000):
        optimizer.zero_grad()
        epl.forward_backward(my_stage, torch.ones(8, 8), module=stage)
        optimizer.step()
"""


def _launch(folder: Path, fault: str, ranks: int = 3) -> tuple[int, str, dict[int, str], float]:
    """The exit code, what the launcher said, the error output of every rank, and the seconds it took."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("FAULT", fault))
    command = [sys.executable, "-m", "epl.launch", "--num_workers", "1", "--gpu_per_worker", str(ranks)]
    command += ["--log_dir", str(folder / "logs"), str(script)]
    start = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, env=environment)
    seconds = time.monotonic() - start
    logs = {r: (folder / f"logs/attempt_0/rank_{r}/stderr.log").read_text() for r in range(ranks)}
    return done.returncode, done.stderr, logs, seconds


@pytest.mark.parametrize(
    ("fault", "cause", "where"),
    [
        (
            "y = stage(torch.ones(2, 7))",
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
            "the forward of stage 1, micro batch 2 (1F2), which received float32 (2, 8) from stage 0",
        ),
        (
            "y = Fails.apply(y)",
            "ArithmeticError: the backward's own cause",
            "the backward of stage 1, micro batch 2 (1B2)",
        ),
    ],
    ids=["forward", "backward"],
)
def test_an_error_in_the_users_function_ends_the_job_with_its_traceback(
    tmp_path: Path, fault: str, cause: str, where: str
) -> None:
    code, stderr, logs, seconds = _launch(tmp_path, fault)
    assert code == 1
    for text in (stderr, logs[1]):
        assert cause in text
        assert where in text
        assert "train.py" in text
    assert "rank 1" in stderr
    for rank in (0, 2):
        # Ended by its own error, which quotes the cause; or by the launcher, which had waited long enough.
        if "Error" in logs[rank]:
            assert "PeerLostError" in logs[rank]
            assert cause in logs[rank]
            assert where in logs[rank]
    assert "PeerLostError" in logs[0] + logs[2]
    assert seconds < 60


def test_a_rank_killed_inside_a_schedule_ends_the_job(tmp_path: Path) -> None:
    code, stderr, _, seconds = _launch(tmp_path, "os.kill(os.getpid(), 9)", ranks=2)
    assert code == 128 + 9
    assert "rank 1" in stderr
    assert "SIGKILL" in stderr
    assert seconds < 60


def test_a_rank_that_leaves_inside_a_schedule_ends_the_job(tmp_path: Path) -> None:
    code, stderr, _, seconds = _launch(tmp_path, "sys.exit(0)", ranks=2)
    assert code == 1
    assert "rank 1 has ended" in stderr
    assert seconds < 60
