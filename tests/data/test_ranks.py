"""The loaders between real processes: what threads that take turns cannot show."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from epl.data import distribute_loader, restore_loader
from tests.data.ranks import numbers, plain, read, shares
from tests.harness import run_ranks


class Collectives:
    def all_gather(self, value: object) -> list[object]:
        values: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: object) -> object:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


class Augmented(Dataset[Any]):
    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + float(np.random.rand()) + float(torch.rand(()))

    def __len__(self) -> int:
        return 21


def epochs_of(workers: int, epochs: int) -> tuple[list[list[list[int]]], list[list[float]], list[tuple[int, ...]]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3 if rank == 0 else 50 + rank)
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)
    distribute_loader(loader, shares(2)[rank], Collectives())
    order, noise, rows = [], [], []
    for _ in range(epochs):
        torch.rand(rank + 1)  # what a model draws, differently on every rank
        epoch = list(read(loader))
        order.append([batch[0].tolist() for batch, _ in epoch])
        noise.append([x for batch, _ in epoch for x in batch[1].tolist()])
        rows += [share.rows for _, share in epoch]
    restore_loader(loader)
    dist.destroy_process_group()
    return order, noise, rows


def check(workers: int, epochs: int) -> None:
    (first, first_noise, rows), (second, second_noise, _) = run_ranks(epochs_of, 2, workers, epochs)
    torch.manual_seed(3)
    big = DataLoader(numbers(21), batch_size=8, shuffle=True)
    for epoch in range(epochs):
        torch.rand(1)
        expected = [batch.tolist() for batch in big]
        assert [a + b for a, b in zip(first[epoch], second[epoch], strict=True)] == expected
    assert rows == [(4, 4), (4, 4), (3, 2)] * epochs
    draws = [x for noise in (first_noise, second_noise) for epoch in noise for x in epoch]
    assert len(set(draws)) == 21 * epochs  # no two samples of any rank or epoch were augmented alike


def test_processes_with_states_of_their_own_see_the_plain_run() -> None:
    state = torch.get_rng_state()
    check(0, epochs=2)
    torch.set_rng_state(state)


def test_processes_with_workers_see_the_plain_run() -> None:
    state = torch.get_rng_state()
    check(1, epochs=1)
    torch.set_rng_state(state)


def test_reference_is_not_trivial() -> None:
    """The plain order really is shuffled, and differs between epochs."""
    epochs, _ = plain(DataLoader(numbers(21), batch_size=21, shuffle=True), epochs=2, seed=3)
    assert epochs[0][0].tolist() != epochs[1][0].tolist() != list(range(21))
