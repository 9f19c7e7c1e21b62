"""epl.forward_backward on real ranks: parity with one device, replicas, ties, evaluation, errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import epl
from epl.parallel.pipeline.ties import _keys, tie
from epl.train.micro import cut_batch
from tests.harness import run_ranks
from tests.parallel.pipeline.models import MODELS, run_stage
from tests.parity.cover import name_of, pairwise

ROWS, STEPS = 10, 3
CHUNKS = {"Interleaved": 2}


def _optimizer(kind: str, parameters) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01)


def _train(case: dict[str, object]):
    """The user's script on one rank."""
    schedule, devices, replicas = str(case["schedule"]), int(case["devices"]), int(case["replicas"])
    chunks = CHUNKS.get(schedule, 1)
    settings = {"pipeline.num_micro_batch": case["micro_batches"], "pipeline.strategy": schedule}
    settings |= {"pipeline.num_chunks": chunks, "communication.timeout": 40}
    epl.init(epl.Config(settings))
    topology = epl.setup_process_groups([("data", replicas), ("pipe", devices)])
    staged = MODELS[str(case["model"])]
    whole = [m.double() for m in staged.stages(devices * chunks)]
    own = nn.ModuleList(_own_copy(whole[s]) for s in range(topology.rank("pipe"), devices * chunks, devices))
    if topology.rank("data"):
        with torch.no_grad():
            for p in own.parameters():
                p.add_(1.0)  # replicas begin apart: they must become the first one's
    optimizer = _optimizer(str(case["optimizer"]), own.parameters())
    batch = staged.batch(ROWS)
    start = ROWS * topology.rank("data") // replicas
    stop = ROWS * (topology.rank("data") + 1) // replicas
    batch = tuple(t[start:stop] for t in batch)
    functions = [lambda received, *mb, stage=stage: run_stage(stage, received, mb) for stage in own]
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = epl.forward_backward(functions if chunks > 1 else functions[0], *batch, module=list(own))
        norm = clip_grad_norm_(own.parameters(), 0.5)
        optimizer.step()
        losses.append((found.tolist(), norm.item()))
    stages = {s: own[i] for i, s in enumerate(range(topology.rank("pipe"), devices * chunks, devices))}
    return losses, {s: {n: t.clone() for n, t in m.state_dict().items()} for s, m in stages.items()}


def _own_copy(stage: nn.Module) -> nn.Module:
    made = copy.deepcopy(stage)
    for p, q in zip(stage.parameters(), made.parameters(), strict=True):
        if p in _keys:
            tie(_keys[p], q)
    return made


def _reference(case: dict[str, object]):
    """One device: every replica's rows over the same micro batches, gradients of the mean over all rows."""
    replicas, schedule = int(case["replicas"]), str(case["schedule"])
    stages = int(case["devices"]) * CHUNKS.get(schedule, 1)
    staged = MODELS[str(case["model"])]
    whole = [m.double() for m in staged.stages(stages)]
    parameters = list(dict.fromkeys(p for m in whole for p in m.parameters()))
    optimizer = _optimizer(str(case["optimizer"]), parameters)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_step = []
        for replica in range(replicas):
            start, stop = ROWS * replica // replicas, ROWS * (replica + 1) // replicas
            batch = tuple(t[start:stop] for t in staged.batch(ROWS))
            of_replica = []
            for piece in cut_batch(batch, stop - start, min(int(case["micro_batches"]), stop - start)):
                received = None
                for stage in whole:
                    received = run_stage(stage, received, piece)
                (received * len(piece[1]) / ROWS).backward()
                of_replica.append(received.item())
            of_step.append(of_replica)
        norm = clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        losses.append((of_step, norm.item()))
    return losses, {s: m.state_dict() for s, m in enumerate(whole)}


AXES = {
    "model": list(MODELS),
    "schedule": ["PreferForward", "PreferBackward", "PreferBackwardOptimizer", "Interleaved", "ZeroBubble"],
    "devices": [2, 3, 4],
    "micro_batches": [1, 2, 4, 7],
    "replicas": [1, 2],
    "optimizer": ["sgd", "adamw"],
}


@pytest.mark.parametrize("case", pairwise(AXES), ids=name_of)
def test_parity(case):
    expected_losses, expected_state = _reference(case)
    devices = int(case["devices"])
    for rank, (losses, state) in enumerate(run_ranks(_train, devices * int(case["replicas"]), case)):
        replica = rank // devices
        for (found, norm), (of_step, expected_norm) in zip(losses, expected_losses, strict=True):
            assert found == pytest.approx(of_step[replica], abs=1e-10)
            assert norm == pytest.approx(expected_norm, abs=1e-10)
        for stage, tensors in state.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(
                    tensor, expected_state[stage][name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
                )
