"""Loops that people write, on a model whose last stage, or all of which, is split over two ranks. These compute the loss, and what else the loop
makes of logits, together, each on its part: logits that were gathered for the loss took as much memory and time as a head that is not split."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epl
from epl.parallel.split.value import SplitTensor
from epl.train.lazy import Node
from tests.harness import run_ranks
from tests.train.lazy.cases import Outcome, differences, run
from tests.train.own_loop import Script
from tests.train.test_own_loop import LOOPS, MICRO_BATCHES, ROWS, STAGES, plainly

NOT_HERE = {
    **dict.fromkeys(
        (
            "autograd_grad_whole",
            "gradients_of_everything",
            "gradients_of_everything_and_logits",
            "gradients_materialized",
        ),
        "returns gradients of parameters, of which a lane sees its block",
    ),
    **dict.fromkeys(
        ("model_fed_with_outer_weights_between", "a_critic_that_every_rank_has_whole"),
        "its second model has one TaskGraph: it would need two ranks, not three",
    ),
    **dict.fromkeys(("gan", "gan_in_stages"), "its second model has one output, which cannot be cut"),
}
NAMES = [name for name in LOOPS if name not in NOT_HERE]
ALWAYS = [
    "the_plain_loop",
    "metric_before",
    "metric_before_without_grad",
    "metric_after",
    "item_first",
    "two_calls",
    "two_batch_sizes",
    "l2_backward_by_itself",
    "lazy_mask",
    "grad_wrt_logits",
    "logits_inplace",
    "weighted_mse",
    "no_grad",
    "detach_inplace",
    "lbfgs",
]
"""What was wrong once, and what nearly everybody writes; the others only in `make test-full`."""
OTHERS = [name for name in NAMES if name not in ALWAYS]
GROUPS = [ALWAYS, *(OTHERS[group::5] for group in range(5))]
BLOCKS = {"l2_in_evaluation", "l2_alone", "autograd_grad", "gradients_after_reading"}
"""Where each rank has all TaskGraphs it reads blocks of parameters here: without grad mode, and from autograd.grad."""


def _settings() -> epl.Config:
    return epl.Config({"pipeline.num_micro_batch": MICRO_BATCHES, "communication.timeout": 40})


def _cut_logits() -> None:
    """So small a head would be cut along its inputs, and its outputs be whole."""
    epl.split_rule(nn.Linear)(lambda layer: {"weight": 0, "bias": 0})


def _loops(names: list[str], stages: int) -> dict[str, Outcome]:
    torch.set_default_dtype(torch.float64)
    _cut_logits()
    found = {}
    for name in names:
        epl.init(_settings())
        try:
            found[name] = run(LOOPS[name], Script(ROWS, MICRO_BATCHES, stages, split=2))
        except Exception as error:
            error.add_note(f"in the loop {name}")
            raise
    return found


@pytest.mark.parametrize("stages", [STAGES, 1], ids=["last stage", "all"])
@pytest.mark.parametrize("group", [pytest.param(n, marks=[pytest.mark.full] if n else []) for n in range(len(GROUPS))])
def test_a_loop_is_right_on_every_rank(stages: int, group: int) -> None:
    names = [name for name in GROUPS[group] if stages > 1 or name not in BLOCKS]
    outcomes = run_ranks(_loops, 1 + stages, names, stages, timeout=110)
    wrong = {}
    for name in names:
        expected = plainly(name)
        for rank, found in enumerate(outcomes):
            if problems := differences(found[name], expected):
                wrong[f"{name}, rank {rank}"] = problems
    assert wrong == {}


# ---- what travels between the lanes ----------------------------------------------------------------------------------

CLASSES = 64


@contextlib.contextmanager
def _counting() -> Iterator[list[int]]:
    """The numbers of elements of values that were gathered."""
    found: list[int] = []
    original = SplitTensor.gathered

    def gathered(self: SplitTensor, why: str = "") -> torch.Tensor:
        if not self.is_partial:
            found.append(self.numel())
        return original(self, why)

    SplitTensor.gathered = gathered  # type: ignore[method-assign]
    try:
        yield found
    finally:
        SplitTensor.gathered = original  # type: ignore[method-assign]


class Head(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        with epl.replicate(1) if stages > 1 else contextlib.nullcontext():
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        with epl.split(2):
            self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
    return []


def _held(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    logits = model(x)
    loss = F.cross_entropy(logits, y) + 0.01 * sum(p.norm() for p in model.parameters())
    loss.backward()
    return [loss.item()]


def _hits_before(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    logits = model(x)
    hits = (logits.argmax(1) == y).sum()
    best = logits.detach().topk(5).indices.eq(y[:, None]).any(1).float().mean()
    F.cross_entropy(logits, y).backward()
    return [hits.item(), best.item()]


def _hits_after(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    logits = model(x)
    F.cross_entropy(logits, y).backward()
    return [(logits.argmax(1) == y).sum().item(), F.nll_loss(logits.log_softmax(1), y).item()]


def _evaluation(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    hits, loss = torch.tensor(0), 0.0
    with torch.no_grad():
        for part, labels in zip(x.split(5), y.split(5), strict=True):
            logits = model(part)
            hits = hits + (logits.argmax(1) == labels).sum()
            loss += F.cross_entropy(logits, labels).item()
    F.cross_entropy(model(x), y).backward()
    return [hits.item(), loss]


def _three_terms(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Terms were gathered in the order of a set, which differs between processes: ranks waited in unlike collectives."""
    holes = [Node.__new__(Node) for _ in range(random.randrange(400))]  # sets are ordered by addresses
    del holes[:: random.randrange(2, 5)]
    logits = model(x)
    hot = F.one_hot(y, CLASSES).to(logits.dtype)
    terms = [F.binary_cross_entropy(logits.sigmoid(), hot), logits.square().mean() * 0.1, logits.sigmoid().mean()]
    loss = sum(terms[1:], terms[0])
    del logits
    loss.backward()
    return [loss.item(), *(term.item() for term in terms)]


USES: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], list[float]]] = {
    "plain": _plain,
    "held": _held,
    "hits before": _hits_before,
    "hits after": _hits_after,
    "evaluation": _evaluation,
    "three terms": _three_terms,
}


def _use(name: str, stages: int) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    _cut_logits()
    epl.init(_settings())
    return _steps(name, stages, epl.parallelize, epl.full_state_dict)


def _steps(
    name: str, stages: int, ready: Callable[..., Any], state: Callable[[nn.Module], Any]
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model: nn.Module = Head(stages)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ready(model, optimizer)
    numbers = []
    with _counting() as gathered:
        for _ in range(3):
            optimizer.zero_grad()
            x, y = torch.randn(10, 6), torch.randint(0, CLASSES, (10,))
            numbers += USES[name](model, x, y)
            optimizer.step()
    return numbers, {key: value.clone() for key, value in state(model).items()}, gathered


@pytest.mark.parametrize("stages", [STAGES, 1], ids=["last stage", "all"])
@pytest.mark.parametrize("name", USES)
def test_logits_of_a_split_head_are_not_gathered(name: str, stages: int) -> None:
    try:
        numbers, state, _ = _steps(name, stages, lambda *_: None, nn.Module.state_dict)
    finally:
        torch.set_default_dtype(torch.float32)
    for found, theirs, gathered in run_ranks(_use, 1 + stages, name, stages):
        assert found == pytest.approx(numbers, abs=1e-9)
        for key, value in state.items():
            torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-9)
        assert [size for size in gathered if size >= 3 * CLASSES] == [], "logits of a micro batch, or more"
