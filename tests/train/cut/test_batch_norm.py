"""What couples the rows of a micro batch, or draws at random, inside stages: batch norm as on the micro batches, dropout as ever."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epl
from epl.plan.batch import cut_evenly
from tests.harness import run_ranks
from tests.train.cut.threads import TurnNetwork, cut_in_memory

ROWS, STEPS = 11, 3


def make(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.BatchNorm1d(4, momentum=momentum),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.BatchNorm1d(6, momentum=momentum, affine=False),
        nn.Linear(6, 3),
    ).double()


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.arange(rows * 12, dtype=torch.float64).view(rows, 2, 6) + step
    return start.sin(), (torch.arange(rows) + step) % 3


def train(model: nn.Module, loop: str = "scheduled", rows: int = ROWS) -> list[float]:
    """Losses of some steps and of an evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, rows)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if loop == "read first":
            loss.item()
        if loop == "retained":
            (loss * 0).backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(F.cross_entropy(model(batch(STEPS)[0]), batch(STEPS)[1]).item())
    return losses


def in_chunks(model: nn.Module, spans: list[tuple[int, int]]) -> list[float]:
    """The same, each micro batch by itself, one after the other."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        parts = [F.cross_entropy(model(x[a:b]), y[a:b]) * ((b - a) / ROWS) for a, b in spans]
        loss = torch.stack(parts).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(F.cross_entropy(model(batch(STEPS)[0]), batch(STEPS)[1]).item())
    return losses


@pytest.mark.parametrize(
    ("stages", "micro_batches", "strategy"),
    [(2, 1, "PreferBackward"), (2, 3, "PreferBackward"), (3, 4, "PreferForward"), (3, 2, "ZeroBubble")],
)
@pytest.mark.parametrize("loop", ["scheduled", "read first", "retained"])
def test_batch_norm_is_that_of_the_micro_batches(loop: str, stages: int, micro_batches: int, strategy: str) -> None:
    expected = make(momentum=None if loop == "retained" else 0.1)
    losses = in_chunks(expected, cut_evenly(0, ROWS, micro_batches))
    network = TurnNetwork(stages)

    def on_rank(rank: int) -> tuple[list[float], nn.Module]:
        model = make(momentum=None if loop == "retained" else 0.1)
        return train(cut_in_memory(network, rank, model, micro_batches, strategy), loop), model

    found = network.run(on_rank)
    for rank, (own_losses, model) in enumerate(found):
        assert own_losses == pytest.approx(losses, rel=1e-10)
        for number, (mine, theirs) in enumerate(zip(model, expected, strict=True)):
            if number * stages // len(expected) == rank:  # the part that is on this rank
                for (name, a), b in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
                    torch.testing.assert_close(
                        a, b, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
                    )


def test_one_row_too_few_is_told_as_torch_tells_it() -> None:
    network = TurnNetwork(2)

    def on_rank(rank: int) -> None:
        train(cut_in_memory(network, rank, make(), 4), rows=5)  # micro batches of 2, 1, 1 and 1 rows

    with pytest.raises(Exception, match="more than 1 value per channel"):
        network.run(on_rank)


def _on_ranks(replicas: int, micro_batches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    synced = replicas > 1
    settings = {"pipeline.num_micro_batch": micro_batches, "communication.sync_batch_norm": synced}
    epl.init(epl.Config(settings | {"communication.timeout": 40}))
    replica = epl.Env.get().cluster.rank // 2
    model = make()
    for n, parts in enumerate((model[:3], model[3:])):
        epl.annotate(epl.replicate(1, name=f"stage_{n}"), *parts)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = epl.parallelize(model, optimizer)
    rows = cut_evenly(0, ROWS, replicas)[replica]
    losses = []
    for step in range(STEPS):
        x, y = (t[slice(*rows)] for t in batch(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item() * (rows[1] - rows[0]) / ROWS)
    model.eval()
    with torch.no_grad():
        losses.append(F.cross_entropy(model(batch(STEPS)[0]), batch(STEPS)[1]).item())
    return losses, {name: t.clone() for name, t in epl.full_state_dict(model).items()}


@pytest.mark.parametrize(
    ("replicas", "micro_batches"), [(1, 3), (2, 1)], ids=["micro batches", "synchronised replicas"]
)
def test_batch_norm_on_real_ranks(replicas: int, micro_batches: int) -> None:
    expected = make()
    losses = in_chunks(expected, cut_evenly(0, ROWS, micro_batches))
    found = run_ranks(_on_ranks, 2 * replicas, replicas, micro_batches)
    totals = [sum(some) for some in zip(*(own for own, _ in found[::2]), strict=True)]
    assert totals[:STEPS] == pytest.approx(losses[:STEPS], rel=1e-10)
    for own, state in found:
        assert own[STEPS] == pytest.approx(losses[STEPS], rel=1e-10)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


# ---- dropout -----------------------------------------------------------------------------------------------------------


def dropping() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), nn.Dropout(0.5), nn.Linear(8, 8, bias=False), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(8, 1, bias=False)).double()


@pytest.mark.parametrize("whole", [False, True], ids=["scheduled", "whole batch"])
@pytest.mark.parametrize(("stages", "strategy"), [(2, "PreferBackward"), (3, "ZeroBubble")])
def test_dropout_drops_the_same_in_forward_and_backward(stages: int, strategy: str, whole: bool) -> None:
    """The model is linear in each of its weights, so ⟨w, gradient of w⟩ is the loss, for exactly the masks that were drawn."""
    network, x = TurnNetwork(stages), torch.ones(8, 6, dtype=torch.float64)

    def on_rank(rank: int) -> tuple[float, list[float], list[float], list[float]]:
        model = dropping()
        torch.manual_seed(rank)
        M = cut_in_memory(network, rank, model, 4, strategy)
        out = M(x)
        loss = out.sum()
        if whole:
            loss.item()
        loss.backward()
        products = [(p * p.grad).sum().item() for p in model.parameters() if p.grad is not None]
        model.eval()
        with torch.no_grad():
            evaluated = M(x)
        return loss.item(), products, out.detach().flatten().tolist(), evaluated.flatten().tolist()

    found = network.run(on_rank)
    products = list(itertools.chain.from_iterable(own for _, own, _, _ in found))
    assert len(products) == 3
    plain = dropping().eval()(x).flatten().tolist()
    for loss, _, out, evaluated in found:
        assert loss == found[0][0]
        assert products == pytest.approx([loss] * 3, rel=1e-10)
        assert len({round(v, 9) for v in out}) > 4, "rows and micro batches are dropped by masks of their own"
        assert sum(out) == pytest.approx(loss)
        assert evaluated == pytest.approx(plain)
