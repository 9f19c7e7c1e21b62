"""Loops on a model in stages that go wrong: ranks part ways, a stage raises, a rank dies, what cannot be. On real ranks, in seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epl
from epl.errors import (
    CommunicationError,
    LazyValueError,
    NotBuiltError,
    PeerLostError,
    PlanError,
    RanksDisagreeError,
    UsageError,
)
from tests.harness import finish_ranks, rank_errors, run_ranks

ROWS, MICRO_BATCHES = 6, 2
X = torch.linspace(-1, 1, ROWS * 8, dtype=torch.float64).view(ROWS, 8)
Y = torch.arange(ROWS) % 3


class _Fails(torch.autograd.Function):
    """Its backward fails the second time."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _Fails.calls += 1
        if _Fails.calls == 2:
            raise ArithmeticError("the backward's own cause")
        return gradient


class _Faulty(nn.Module):
    """Runs once for each micro batch where it lives; the fault is in the second micro batch of the second step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:  # while the model is recorded
            return x
        self.calls += 1
        if self.kind == "forward" and self.calls == 4:
            raise ArithmeticError("the forward's own cause")
        if self.kind == "killed" and self.calls == 4:
            os._exit(9)
        return _Fails.apply(x) if self.kind == "backward" and self.calls > 2 else x


class Net(nn.Module):
    """Its parts are stages."""

    def __init__(self, stages: int = 2, width: int = 3, faulty: int | None = None, kind: str = "") -> None:
        super().__init__()
        widths = [8] * stages + [width]
        self.parts = nn.ModuleList()
        for number in range(stages):
            with epl.replicate(1, name=f"stage_{number}"):
                first = _Faulty(kind) if number == faulty else nn.Tanh()
                self.parts.append(nn.Sequential(first, nn.Linear(widths[number], widths[number + 1])).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def _start(**of_net: Any) -> tuple[int, Net, torch.optim.Optimizer]:
    """This rank, the model and its optimizer."""
    epl.init(epl.Config({"pipeline.num_micro_batch": MICRO_BATCHES, "communication.timeout": 30}))
    torch.manual_seed(0)
    net = Net(**of_net)
    model, optimizer = epl.parallelize(net, torch.optim.SGD(net.parameters(), 0.1))
    return epl.Env.get().cluster.rank, model, optimizer


def _loss(model: nn.Module, x: torch.Tensor = X, y: torch.Tensor = Y) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


# ---- ranks that part ways ----------------------------------------------------------------------------------------------


def _reads_logits_alone() -> None:
    rank, model, _ = _start()
    out = model(X)
    loss = F.cross_entropy(out, Y)
    if rank == 0:
        out.sum().item()
    loss.backward()


def _prints_the_loss_alone_before_backward() -> None:
    rank, model, _ = _start()
    _loss(model).backward()
    loss = _loss(model)
    if rank == 0:
        print(f"{loss:.3f}")
    loss.backward()


def _reads_large_logits_alone_after_backward() -> None:
    rank, model, _ = _start(width=200)
    out = model(X)
    F.cross_entropy(out, Y).backward()
    if rank == 0:
        out.detach().numpy()
    _loss(model).backward()


def _evaluates_alone() -> None:
    rank, model, optimizer = _start()
    _loss(model).backward()
    optimizer.step()
    if rank == 0:
        with torch.no_grad():
            model(X)
    _loss(model).backward()


def _evaluates_alone_before_training() -> None:
    rank, model, _ = _start()
    if rank == 0:
        with torch.inference_mode():
            model(X)
    _loss(model).backward()


def _takes_another_branch() -> None:
    rank, model, _ = _start()
    out = model(X)
    (F.cross_entropy(out, Y) if rank == 0 else out.pow(2).mean()).backward()


def _gives_other_rows() -> None:
    rank, model, _ = _start()
    _loss(model).backward()
    _loss(model, X[: ROWS - rank], Y[: ROWS - rank]).backward()


def _gives_other_rows_at_first() -> None:
    rank, model, _ = _start()
    _loss(model, X[: ROWS - rank], Y[: ROWS - rank]).backward()


def _gives_other_inputs() -> None:
    rank, model, _ = _start()
    _loss(model, X[torch.randperm(ROWS, generator=torch.Generator().manual_seed(rank))]).backward()


def _skips_a_backward() -> None:
    rank, model, _ = _start()
    for step in range(3):
        loss = _loss(model)
        if rank == 0 or step != 1:
            loss.backward()


def _calls_the_model_once_more() -> None:
    rank, model, _ = _start()
    if rank == 0:
        model(X)
    _loss(model).backward()


def _clips_alone() -> None:
    rank, model, _ = _start()
    _loss(model).backward()
    if rank == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    _loss(model).backward()


def _saves_alone() -> None:
    rank, model, _ = _start()
    _loss(model).backward()
    if rank == 0:
        epl.full_state_dict(model)
    _loss(model).backward()


def _means_alone() -> None:
    rank, model, _ = _start()
    loss = _loss(model)
    loss.backward()
    if rank == 0:
        epl.global_mean(loss)
    _loss(model).backward()


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (_reads_logits_alone, ["reading a value (item)", "loss.backward()"]),
        (_prints_the_loss_alone_before_backward, ["reading a value (__format__)", "loss.backward()"]),
        (_reads_large_logits_alone_after_backward, ["reading a value (numpy)", "loss.backward()"]),
        (_evaluates_alone, ["model(x) without gradients", "loss.backward()"]),
        (_evaluates_alone_before_training, ["model(x) without gradients", "loss.backward()"]),
        (_takes_another_branch, ["loss.backward()", "6 rows", "same code"]),
        (_gives_other_rows, ["6 rows", "5 rows", "same batches"]),
        (_gives_other_rows_at_first, ["6 rows", "5 rows", "same batches"]),
        (_gives_other_inputs, ["inputs of the model or tensors beside its outputs", "same seed"]),
        (_skips_a_backward, ["loss.backward()", "same code"]),
        (_calls_the_model_once_more, ["loss.backward()", "same code"]),
        (_clips_alone, ["the norm of gradients", "loss.backward()"]),
        (_saves_alone, ["epl.full_state_dict", "loss.backward()"]),
        (_means_alone, ["epl.global_mean", "loss.backward()"]),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_ranks_that_part_ways_get_the_same_error_with_both_places(loop: Callable[[], None], words: list[str]) -> None:
    first, second = rank_errors(loop, 2, timeout=25)
    assert first is not None
    assert first == second
    assert first[0] == RanksDisagreeError.__name__
    for word in ("rank 0: ", "rank 1: ", "test_own_loop_faults.py:", "if rank == 0:", *words):
        assert word in first[1]


# ---- a stage raises, a rank dies ---------------------------------------------------------------------------------------


def _raises(kind: str, faulty: int, stages: int, evaluates: bool = False) -> None:
    _, model, _ = _start(stages=stages, faulty=faulty, kind=kind)
    with torch.no_grad() if evaluates else torch.enable_grad():
        for _ in range(3):
            loss = _loss(model)
            if not evaluates:
                loss.backward()


WHERE = {
    "forward": "the forward of stage {}, micro batch 1 ({}F1)",
    "backward": "the backward of stage {}, micro batch 1 ({}B1)",
}


@pytest.mark.parametrize(
    ("kind", "faulty", "stages", "evaluates"),
    [
        ("forward", 0, 2, False),
        ("forward", 1, 2, False),
        ("forward", 2, 3, False),
        ("forward", 1, 2, True),
        ("backward", 1, 3, False),
        ("backward", 1, 2, False),
    ],
)
def test_a_stage_that_raises_ends_every_rank_with_its_cause(
    kind: str, faulty: int, stages: int, evaluates: bool
) -> None:
    start = time.monotonic()
    ranks = finish_ranks(_raises, stages, kind, faulty, stages, evaluates, timeout=28)
    where, cause = WHERE[kind].format(faulty, faulty), f"the {kind}'s own cause"
    for rank in ranks:
        outcome, (name, message, trace), _ = rank.outcome
        assert outcome == "error"
        if rank.rank == faulty:
            assert name == "ArithmeticError"
            assert where in trace
            assert "test_own_loop_faults.py" in trace
        else:
            assert name == PeerLostError.__name__
            for words in (cause, where, "test_own_loop_faults.py", f"rank {faulty}: "):
                assert words in message
    assert time.monotonic() - start < 25


def _has_a_wrong_target() -> None:
    _, model, _ = _start()
    _loss(model).backward()
    _loss(model, X, Y + 2).backward()


def test_an_error_in_the_loops_own_code_names_its_line() -> None:
    first, second = (rank.outcome[1] for rank in finish_ranks(_has_a_wrong_target, 2, timeout=28))
    assert second[0] == "IndexError"
    assert first[0] == PeerLostError.__name__
    for text in (first[1], second[2]):
        assert "in cross_entropy, recorded at" in text
        assert "test_own_loop_faults.py" in text
        assert "the forward of stage 1, micro batch 0 (1F0)" in text


def _catches_and_goes_on() -> None:
    _, model, _ = _start()
    for step in range(3):
        try:
            _loss(model, X, Y + (3 if step == 1 else 0)).backward()
        except IndexError:
            continue


def test_a_rank_that_goes_on_after_an_error_that_the_others_wait_in_is_told_so() -> None:
    first, second = rank_errors(_catches_and_goes_on, 2, timeout=28)
    assert first is not None
    assert second is not None
    assert first[0] == PeerLostError.__name__
    assert second[0] == CommunicationError.__name__
    for message in (first[1], second[1]):
        assert "IndexError: Target" in message


@pytest.mark.parametrize(("faulty", "stages"), [(0, 2), (1, 2), (1, 3)])
def test_a_rank_killed_inside_a_step_is_noticed_at_once(faulty: int, stages: int) -> None:
    start = time.monotonic()
    for rank in finish_ranks(_raises, stages, "killed", faulty, stages, timeout=28):
        if rank.rank == faulty:
            assert rank.outcome[0] == "died"
        else:
            outcome, (name, message, _), _ = rank.outcome
            assert (outcome, name) == ("error", PeerLostError.__name__)
            assert "(stage_" in message  # the TaskGraph
    assert time.monotonic() - start < 25


# ---- what cannot be, on every rank alike -------------------------------------------------------------------------------


def _changes_the_input() -> None:
    _, model, _ = _start()
    x = X.clone()
    loss = _loss(model, x)
    x.zero_()
    loss.backward()


def _steps_before_backward() -> None:
    _, model, optimizer = _start()
    _loss(model).backward()
    loss = _loss(model)
    optimizer.step()
    loss.backward()


def _changes_the_target() -> None:
    _, model, _ = _start()
    y = Y.clone()
    loss = _loss(model, X, y)
    y.zero_()
    loss.backward()


def _penalises_gradients() -> None:
    _, model, _ = _start()
    x = X.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def _creates_a_graph() -> None:
    _, model, _ = _start()
    _loss(model).backward(create_graph=True)


class _Cycle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with epl.replicate(1, name="outer"):
            self.first, self.last = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        with epl.replicate(1, name="inner"):
            self.middle = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def _goes_in_a_circle() -> None:
    epl.init()
    epl.parallelize(_Cycle())(X)


def _takes_three_ranks() -> None:
    _start(stages=3)


def _reads_a_part_of_another_rank() -> None:
    rank, model, _ = _start()
    _loss(model).backward()
    model.parts[1 - rank](X).sum().item()


def _prints_a_parameter() -> None:
    rank, model, _ = _start()
    _loss(model).backward()
    print(model.parts[1 - rank][1].weight)


def _averages_weights() -> None:
    _, model, _ = _start()
    average = [p.detach().clone() for p in model.parameters()]
    _loss(model).backward()
    with torch.no_grad():
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.mul_(0.9).add_(p, alpha=0.1)


@pytest.mark.parametrize(
    ("loop", "error", "words"),
    [
        (_changes_the_input, UsageError, ["(6, 8)", "changed in place between model(x)", "call backward()"]),
        (_steps_before_backward, UsageError, ["changed in place between model(x)", "before optimizer.step()"]),
        (_changes_the_target, LazyValueError, ["changed in place", "cross_entropy", "Change a clone"]),
        (_penalises_gradients, NotBuiltError, ["create_graph=True", "finite differences"]),
        (_creates_a_graph, NotBuiltError, ["create_graph=True", "finite differences"]),
        (
            _goes_in_a_circle,
            PlanError,
            ["'inner' runs after 'outer'", "'middle'", "'last'", "test_own_loop_faults.py:"],
        ),
        (_takes_three_ranks, PlanError, ["= 3 devices", "2 devices", "start 3"]),
        (_reads_a_part_of_another_rank, LazyValueError, ["lives on rank", "when the whole model is called"]),
        (_prints_a_parameter, LazyValueError, ["lives on rank", "epl.full_state_dict(model)"]),
        (_averages_weights, LazyValueError, ["lives on rank", "epl.full_state_dict(model)"]),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) and not isinstance(value, type) else "",
)
def test_what_cannot_be_is_refused_with_the_remedy(loop: Callable[[], None], error: type, words: list[str]) -> None:
    for found in rank_errors(loop, 2, timeout=25):
        assert found is not None
        assert found[0] == error.__name__
        for word in words:
            assert word in found[1]


@pytest.mark.parametrize("ranks", [3, 5])
def test_ranks_that_do_not_make_whole_replicas_are_refused(ranks: int) -> None:
    for found in rank_errors(_start, ranks, timeout=25):
        assert found is not None
        assert found[0] == PlanError.__name__
        assert f"start {ranks - 1} or {ranks + 1} devices" in found[1]


def _one_is_enough() -> list[float]:
    _, model, optimizer = _start()
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_one_rank_runs_all_stages_with_the_numbers_of_two() -> None:
    (alone,), pair = run_ranks(_one_is_enough, 1), run_ranks(_one_is_enough, 2)
    assert pair[0] == pair[1] == pytest.approx(alone, rel=1e-12)


# ---- parts of the model, called by the loop ----------------------------------------------------------------------------


def _calls_parts(parallelized: bool) -> dict[str, Any]:
    if parallelized:
        rank, model, _ = _start()
        whole = model.parts[1](model.parts[0](X)).sum().item()  # nothing is placed yet: every rank has all of it
        _loss(model).backward()
        model.zero_grad()
    else:
        torch.manual_seed(0)
        rank, model = 0, Net()
        whole = model(X).sum().item()
    outputs = [part(X).detach() for n, part in enumerate(model.parts) if n == rank or not parallelized]
    model.parts[0](X).pow(2).mean().backward()  # its owner has the gradient, the others have nothing to do
    gradient = model.parts[0][1].weight.grad
    return {"whole": whole, "outputs": outputs, "gradient": gradient}


def test_a_part_of_the_model_runs_on_its_own_parameters_or_not_at_all() -> None:
    (plain,) = run_ranks(_calls_parts, 1, False)
    for rank, found in enumerate(run_ranks(_calls_parts, 2, True)):
        assert found["whole"] == pytest.approx(plain["whole"])
        torch.testing.assert_close(found["outputs"], [plain["outputs"][rank]])
        torch.testing.assert_close(found["gradient"], plain["gradient"] if rank == 0 else None)
