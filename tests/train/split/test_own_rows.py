"""Loops over a model whose ranks have rows of their own beside split parts, cut into micro batches of unequal sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import epl
from epl.parallel.split.ownrowsof import OwnRowsOf
from epl.parallel.split.value import SplitTensor
from tests.harness import rank_errors, run_ranks
from tests.parity.compare import Run, assert_same

ROWS, MICRO_BATCHES = 5, 3  # 15 rows on 2 ranks: 8 and 7, in micro batches of 3, 3, 2 and 3, 2, 2


class Net(nn.Module):
    """Replicated, split and replicated again; the split part is called twice, once inside a checkpoint."""

    def __init__(self, annotated: bool) -> None:
        super().__init__()
        with epl.replicate(2) if annotated else contextlib.nullcontext():
            self.first = nn.Linear(6, 8)
        with epl.split(2) if annotated else contextlib.nullcontext():
            self.wide = nn.Sequential(nn.Linear(8, 15), nn.GELU(), nn.Linear(15, 8))
            self.head = nn.Linear(8, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = h + checkpoint(self.wide, h, use_reentrant=False)
        added = self.wide(h)
        added *= 0.5  # what left a part was a view, which torch did not let anybody change
        added += h
        return self.head(added)


Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def plain_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def read_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """All forwards, then all backwards: a checkpoint computes again when another micro batch was the last to run."""
    loss = F.cross_entropy(model(x), y)
    assert loss.item() > 0
    loss.backward()
    return loss


def two_calls(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y) + 0.1 * model(x.flip(1)).square().mean()
    loss.backward()
    return loss


def evaluated_between(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        before = F.cross_entropy(model(x[:1]), y[:1])
    assert bool(before > 0)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert int((model(x).argmax(1) == y).sum()) <= len(y)
    return loss


def changed_in_place(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # The own rows were gathered, and changed, while losses went on with the blocks; or torch refused, since they were a view.
    logits = model(x)
    logits += 1
    logits[:, 3] = -2.0
    logits[:, :2].mul_(3.0)
    loss = F.cross_entropy(logits, y) + 0.1 * logits[torch.arange(len(y)), y].mean()
    loss.backward()
    with torch.no_grad():
        again = model(x)
        again[:, :] = F.one_hot(y, 9)
        assert bool((again.argmax(1) == y).all())
    return loss


def looked_at(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gathered first without a graph, logits had none in the loss."""
    logits = model(x)
    with torch.no_grad():
        assert bool(logits[0].isfinite().all())
    loss = F.cross_entropy(logits, y) + 0.1 * logits[torch.arange(len(y)), y].mean()
    loss.backward()
    return loss


def gradient_penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What crosses the border of a part in the gradient of a gradient was multiplied like a gradient: k² times too much.
    And a checkpoint in a part could compute again only once."""
    x = x.clone().requires_grad_()
    logits = model(x)
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), x, create_graph=True)
    loss = F.cross_entropy(logits, y) + gradient.square().sum(1).mean()
    loss.backward()
    return loss


def parts_alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A part called by the loop was taken for one of the latest call of the model, with its rows."""
    with torch.no_grad():
        model(x[:1])
    h = torch.tanh(model.get_submodule("first")(x))
    loss = F.cross_entropy(model.get_submodule("head")(h + model.get_submodule("wide")(h)), y)
    loss.backward()
    return loss


def another_call_before_backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A checkpoint that ran again took the rows of the latest call for its own."""
    loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        model(x[:1])
    loss.backward()
    return loss


IN_MICRO_BATCHES = plain_loss, read_first, two_calls, evaluated_between, changed_in_place, looked_at
IN_ONE = changed_in_place, looked_at, gradient_penalty, parts_alone, another_call_before_backward
STEPS: dict[str, Step] = {step.__name__: step for step in (*IN_MICRO_BATCHES, *IN_ONE)}


def _train(name: str, annotated: bool, batch_size: int) -> Run:
    torch.manual_seed(3)
    model = Net(annotated).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randn(40, 6, dtype=torch.float64), torch.randint(0, 9, (40,))  # the last batch is smaller
    loader: Any = DataLoader(TensorDataset(*rows), batch_size=batch_size)
    mean: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss  # noqa: E731
    if annotated:
        model, optimizer, loader = epl.parallelize(model, optimizer, loader)
        mean = epl.global_mean
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = STEPS[name](model, x, y)
        optimizer.step()
        losses.append(mean(loss).item())
    return Run(losses, epl.full_state_dict(model) if annotated else model.state_dict())


def _on_a_rank(name: str, micro_batches: int) -> Run:
    settings = {
        "cluster.colocate_split_and_replicate": True,
        "pipeline.num_micro_batch": micro_batches,
        "communication.timeout": 60,
    }
    epl.init(epl.Config(settings))
    return _train(name, True, ROWS)


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [
        *((step.__name__, MICRO_BATCHES) for step in IN_MICRO_BATCHES),
        *((step.__name__, 1) for step in IN_ONE),
    ],
)
def test_equals_one_device(name: str, micro_batches: int) -> None:
    expected = _train(name, False, ROWS * micro_batches)
    for found in run_ranks(_on_a_rank, 2, name, micro_batches):
        assert_same(found, expected)


def _whole_logits() -> tuple[tuple[int, ...], bool]:
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
    rank = epl.Env.get().cluster.rank
    torch.manual_seed(0)
    model = Net(True)
    epl.parallelize(model)
    x = torch.randn(4, 6)[rank::2]
    logits = model(x)
    return tuple(epl.whole(logits).shape), bool(torch.equal(epl.whole(logits).argmax(1), logits.argmax(1)))


def test_whole_logits_are_those_of_the_own_rows() -> None:
    # epl.whole once gave the rows of all ranks, beside labels of this one's.
    assert run_ranks(_whole_logits, 2) == [((2, 9), True)] * 2


def _gathered_in_the_third_step(colocated: bool) -> list[tuple[int, ...]]:
    settings: dict[str, object] = {"pipeline.num_micro_batch": 2, "communication.timeout": 60}
    epl.init(epl.Config(settings | {"cluster.colocate_split_and_replicate": colocated}))
    torch.manual_seed(0)
    with epl.replicate(2) if colocated else contextlib.nullcontext():
        body = nn.Linear(6, 8)
    with epl.split(2):
        head = nn.Linear(8, 50)
    model = epl.parallelize(nn.Sequential(body, head))
    gathered: list[tuple[int, ...]] = []
    original = SplitTensor.gathered, OwnRowsOf.gathered

    def note(value: SplitTensor, why: str = "") -> torch.Tensor:
        gathered.append(tuple(value.shape))
        return original[isinstance(value, OwnRowsOf)](value, why)

    SplitTensor.gathered = OwnRowsOf.gathered = note  # type: ignore[method-assign]
    try:
        for _ in range(3):  # the first has the check of a new loss
            gathered.clear()
            loss = F.cross_entropy(model(torch.randn(8, 6)), torch.arange(8))
            loss.backward()
    finally:
        SplitTensor.gathered, OwnRowsOf.gathered = original  # type: ignore[method-assign]
    return [shape for shape in gathered if 50 in shape]


@pytest.mark.parametrize("colocated", [True, False])
def test_logits_of_micro_batches_stay_cut(colocated: bool) -> None:
    assert run_ranks(_gathered_in_the_third_step, 2, colocated) == [[], []]


class Reading(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.wide(self.first(x))
        return self.head(h * 2 if h.abs().sum().item() > 0 else h)


def _reads_between() -> str:
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
    model: Any = epl.parallelize(Reading(True))
    with pytest.raises(epl.errors.RecordingError) as caught:
        model(torch.randn(4, 6))
    return str(caught.value)


def test_a_value_read_between_taskgraphs_is_refused_with_what_is_true_here() -> None:
    # The error told of other stages and of micro batches, and of epl.forward_backward; there are none on shared devices.
    for said in run_ranks(_reads_between, 2):
        assert "have rows of their own, so each would read another value" in said
        assert not any(word in said for word in ("stage", "micro batch", "forward_backward"))


def _lengths_of_their_own() -> None:
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "communication.timeout": 30}))
    model: Any = epl.parallelize(Net(True))
    model(torch.randn(4, 3, 6))
    model(torch.randn(4, 3 + epl.Env.get().cluster.rank, 6))


def test_ranks_that_pad_to_lengths_of_their_own_are_refused() -> None:
    # What they sent did not fit, and Gloo ended the process: no error of Python's, and nothing said why.
    for rank, error in enumerate(rank_errors(_lengths_of_their_own, 2)):
        assert error is not None
        kind, text = error
        assert kind == "SplitError"
        assert (
            f"wide, which is under split, is given (rows, {3 + rank}, 8) then (rows, {3 + rank}, 8) on this rank"
            in text
        )
        assert "pad to one fixed length" in text
