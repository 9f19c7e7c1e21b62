from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from epl.data import DataShare, distribute_loader
from epl.data.rng import RngState
from epl.errors import DataError
from tests.data.ranks import (
    Exchange,
    Together,
    errors_of,
    global_batches,
    plain,
    read,
    read_divided,
    same,
    shares,
    together,
)


class Shuffled(IterableDataset[Any]):
    """Draws lazily from all three global generators; workers take turns."""

    def __init__(self, n: int = 30) -> None:
        self.n = n

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for i in range(start, self.n, step):
            yield torch.tensor(i * 1000 + int(torch.randint(500, ())) + int(np.random.randint(400)))

    def __len__(self) -> int:
        return self.n


class Eager(IterableDataset[Any]):
    """Draws when asked for its iterator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(20))


class Mine(IterableDataset[Any]):
    """A stream that each rank has for itself."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(v) for v in self.values)

    def __len__(self) -> int:
        return len(self.values)


@pytest.mark.parametrize("dataset", [Shuffled(), Eager()])
@pytest.mark.parametrize(("replicas", "parts", "micro"), [(2, 1, 1), (3, 1, 1), (2, 2, 2), (1, 1, 3)])
def test_batches_are_those_of_a_plain_run_on_every_rank(
    dataset: IterableDataset[Any], replicas: int, parts: int, micro: int
) -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        torch.manual_seed(6 + rank)
        np.random.seed(6 + rank)
        loader = DataLoader(dataset, batch_size=2)
        distribute_loader(loader, shares(replicas, parts, num_micro_batch=micro)[rank], exchange)
        return [list(read(loader)) for _ in range(2)]

    np.random.seed(6)
    big = DataLoader(dataset, batch_size=2 * replicas * micro)
    ranks = together(replicas * parts, rank_main)
    np.random.seed(6)
    assert same(global_batches(ranks), plain(big, epochs=2, seed=6)[0])


def test_ranks_in_step_with_rank_0_stay_in_step_and_others_are_left_alone() -> None:
    def rank_main(rank: int, exchange: Exchange) -> tuple[RngState, bool]:
        RngState.seeded(rank // 2).restore()
        before = RngState.capture()
        list(distribute_loader(DataLoader(Shuffled(), batch_size=2), shares(3)[rank], exchange))
        return RngState.capture(), RngState.capture() == before

    (first, moved), (second, _), (_, untouched) = together(3, rank_main)
    assert first == second
    assert not moved
    assert untouched


def test_drop_leaves_the_incomplete_global_batch_out() -> None:
    for make, divided in (
        (lambda: DataLoader(Eager(), batch_size=4, drop_last=True), shares(2)),
        (lambda: DataLoader(Eager(), batch_size=4), shares(2, drop_tail=True)),
    ):
        ranks = read_divided(make, divided, seed=0)
        assert [[len(b) for b, _ in epochs[0]] for epochs in ranks] == [[4, 4], [4, 4]]


def test_a_rank_without_rows_repeats_one() -> None:
    ranks = read_divided(lambda: DataLoader(Mine([0, 1, 2, 3, 4]), batch_size=2), shares(2))
    assert [[b.tolist() for b, _ in epochs[0]] for epochs in ranks] == [[[0, 1], [4]], [[2, 3], [4]]]
    assert [share.rows for _, share in ranks[0][0]] == [(2, 2), (1, 0)]
    assert ranks[1][0][1][1].padded


def test_workers_give_the_batches_of_a_plain_run_with_workers() -> None:
    """Two workers interleave their batches; each ends with a smaller one of its own."""

    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        torch.manual_seed(6 + rank)
        loader = DataLoader(Shuffled(), batch_size=2, num_workers=2)
        return [list(read(distribute_loader(loader, shares(2)[rank], exchange)))]

    ranks = together(2, rank_main)
    big = DataLoader(Shuffled(), batch_size=4, num_workers=2)
    assert same(global_batches(ranks), plain(big, seed=6)[0])
    assert [share.rows for _, share in ranks[0][0]][-2:] == [(2, 1), (2, 1)]


@pytest.mark.parametrize("values", [[5, 6, 7, 8], [1, 2, 3, 4, 5, 6], []])
def test_streams_that_differ_between_ranks_are_refused_everywhere(values: list[int]) -> None:
    def rank_main(rank: int, exchange: Exchange) -> None:
        loader = DataLoader(Mine(values if rank else [1, 2, 3, 4]), batch_size=2)
        list(distribute_loader(loader, shares(2)[rank], exchange))

    for error in errors_of(2, rank_main):
        assert isinstance(error, DataError)
        assert "io.slicing" in str(error)
        assert "seed" in str(error)


def ready(values: list[list[int]]) -> IterableDataset[Any]:
    class Ready(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.tensor(v) for v in values)

    return Ready()


def test_ready_batches_of_a_stream_are_dealt_out_and_the_last_is_shared() -> None:
    data = ready([[0, 1], [2, 3, 4], [5], [6, 7, 8], [9, 10]])
    ranks = read_divided(lambda: DataLoader(data, batch_size=None), shares(2))
    assert [[b.tolist() for b, _ in epochs[0]] for epochs in ranks] == [
        [[0, 1], [5], [9]],
        [[2, 3, 4], [6, 7, 8], [10]],
    ]
    assert [share.rows for _, share in ranks[0][0]] == [(2, 3), (1, 3), (1, 1)]
    dropped = read_divided(lambda: DataLoader(data, batch_size=None), shares(2, drop_tail=True))
    assert [len(epochs[0]) for epochs in dropped] == [2, 2]


def test_ready_batches_of_a_stream_with_micro_batches_and_parts() -> None:
    data = ready([[0, 1], [2, 3, 4], [5], [6, 7, 8]])
    ranks = read_divided(lambda: DataLoader(data, batch_size=None), shares(1, 2, num_micro_batch=2))
    assert [[b.tolist() for b, _ in epochs[0]] for epochs in ranks] == [
        [[0, 1, 2], [5, 6]],
        [[3, 4], [7, 8]],
    ]


SLICES = [[0, 1, 2, 3, 4], [10, 11], [20, 21, 22]]


def sliced_main(rank: int, exchange: Exchange, **settings: Any) -> tuple[int, list[Any], list[Any]]:
    drop_last = settings.pop("drop_last", False)
    loader = DataLoader(Mine(SLICES[rank]), batch_size=2, drop_last=drop_last)
    distribute_loader(loader, shares(3, sliced=True, **settings)[rank], exchange)
    length = len(loader)
    seen = list(read(loader))
    return length, [b.tolist() for b, _ in seen], [s.rows for _, s in seen]


def test_sliced_datasets_keep_their_rows_and_short_ones_repeat_at_weight_0() -> None:
    outcomes = together(3, sliced_main)
    assert [seen for _, seen, _ in outcomes] == [
        [[0, 1], [2, 3], [4]],
        [[10, 11], [10, 11], [10, 11]],
        [[20, 21], [22], [22]],
    ]
    assert all(rows == [(2, 2, 2), (2, 0, 1), (1, 0, 0)] for _, _, rows in outcomes)
    assert [length for length, _, _ in outcomes] == [3, 3, 3]


@pytest.mark.parametrize("settings", [{"drop_last": True}, {"drop_tail": True}])
def test_sliced_datasets_with_drop_end_with_the_shortest(settings: dict[str, bool]) -> None:
    outcomes = together(3, lambda rank, exchange: sliced_main(rank, exchange, **settings))
    assert [(length, len(seen)) for length, seen, _ in outcomes] == [(1, 1)] * 3
    assert all(rows == [(2, 2, 2)] for _, _, rows in outcomes)


def test_sliced_parts_read_their_part_of_a_batch() -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        loader = DataLoader(Mine([10 * rank + i for i in range(6)]), batch_size=3)
        divided = shares(1, 2, num_micro_batch=2, sliced=True)[rank]
        return [b.tolist() for b in distribute_loader(loader, divided, exchange)]

    assert together(2, rank_main) == [[[0, 1, 2], [3, 4, 5]], [[10, 11, 12], [13, 14, 15]]]


def test_a_sliced_share_without_any_row_is_refused_everywhere() -> None:
    def rank_main(rank: int, exchange: Exchange) -> None:
        loader = DataLoader(Mine([[1, 2], []][rank]), batch_size=2)
        list(distribute_loader(loader, shares(2, sliced=True)[rank], exchange))

    for error in errors_of(2, rank_main):
        assert isinstance(error, DataError)
        assert "[2, 0]" in str(error)


def test_sliced_datasets_that_are_all_empty_yield_nothing() -> None:
    make = lambda: DataLoader(Mine([]), batch_size=2)  # noqa: E731
    assert read_divided(make, shares(2, sliced=True)) == [[[]], [[]]]


def test_sliced_ready_batches() -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        loader = DataLoader(ready([[[0, 1], [2], [3]], [[4]]][rank]), batch_size=None)
        seen = read(distribute_loader(loader, shares(2, num_micro_batch=2, sliced=True)[rank], exchange))
        return [(b.tolist(), s.rows) for b, s in seen]

    assert together(2, rank_main) == [
        [([0, 1, 2], (3, 1)), ([3], (1, 0))],
        [([4], (3, 1)), ([4], (1, 0))],
    ]


class BreaksLate(IterableDataset[Any]):
    def __init__(self, breaks: bool) -> None:
        self.breaks = breaks

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(4)
        if self.breaks:
            raise OSError("disk is gone")
        yield from torch.arange(4)


def test_a_sliced_dataset_that_fails_on_one_rank_fails_all_at_once() -> None:
    def rank_main(rank: int, exchange: Exchange) -> None:
        loader = DataLoader(BreaksLate(rank == 0), batch_size=2)
        list(distribute_loader(loader, shares(2, sliced=True)[rank], exchange))

    first, second = errors_of(2, rank_main)
    assert isinstance(first, OSError)
    assert isinstance(second, DataError)
    assert "disk is gone" in str(second)


def test_sliced_has_no_meaning_for_one_share_alone() -> None:
    outcome = Together(1).run(
        lambda rank, exchange: [
            b.tolist()
            for b in distribute_loader(
                DataLoader(Mine([1, 2, 3]), batch_size=1), DataShare(num_micro_batch=2, sliced=True), exchange
            )
        ]
    )
    assert outcome == [[[1, 2], [3]]]
