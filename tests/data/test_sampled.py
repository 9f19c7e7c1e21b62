from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from epl.data import distribute_loader
from epl.data.rng import RngState
from epl.errors import DataError
from tests.data.ranks import (
    Exchange,
    Stuck,
    Together,
    errors_of,
    global_batches,
    numbers,
    plain,
    read,
    read_divided,
    same,
    shares,
    together,
)

LAYOUTS = [(2, 1, 1), (3, 1, 1), (1, 1, 4), (1, 2, 1), (2, 2, 2), (4, 1, 2)]  # replicas, parts, micro batches


@pytest.mark.parametrize(("replicas", "parts", "micro"), LAYOUTS)
@pytest.mark.parametrize("drop", [False, True])
def test_global_batches_are_those_of_a_plain_run_over_epochs(replicas: int, parts: int, micro: int, drop: bool) -> None:
    divided = shares(replicas, parts, num_micro_batch=micro, drop_tail=drop)
    ranks = read_divided(lambda: DataLoader(numbers(53), batch_size=4, shuffle=True), divided, epochs=3, seed=7)
    big = DataLoader(numbers(53), batch_size=replicas * micro * 4, shuffle=True, drop_last=drop)
    assert same(global_batches(ranks), plain(big, epochs=3, seed=7)[0])


def test_every_rank_in_step_with_rank_0_ends_with_the_random_state_of_a_plain_run() -> None:
    _, expected = plain(DataLoader(numbers(20), batch_size=4, shuffle=True), epochs=2, seed=3)

    def rank_main(rank: int, exchange: Exchange) -> bool:
        torch.manual_seed(3)
        loader = distribute_loader(DataLoader(numbers(20), batch_size=2, shuffle=True), shares(2)[rank], exchange)
        for _ in range(2):
            list(loader)
        return RngState.capture() == expected

    assert together(2, rank_main) == [True, True]


def test_ranks_with_other_random_states_see_rank_0s_order_and_keep_their_own_state() -> None:
    def rank_main(rank: int, exchange: Exchange) -> tuple[list[int], bool]:
        torch.manual_seed(5 if rank == 0 else 99 + rank)
        before = RngState.capture()
        loader = distribute_loader(DataLoader(numbers(12), batch_size=2, shuffle=True), shares(3)[rank], exchange)
        seen = torch.cat(list(loader)).tolist()
        return seen, RngState.capture() == before

    outcomes = together(3, rank_main)
    expected = torch.cat(plain(DataLoader(numbers(12), batch_size=6, shuffle=True), seed=5)[0][0]).view(2, 3, 2)
    assert [seen for seen, _ in outcomes] == [expected[:, r].flatten().tolist() for r in range(3)]
    assert [kept for _, kept in outcomes] == [False, True, True]


def test_two_shuffled_loaders_zipped_draw_in_the_order_of_a_plain_run() -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[list[list[int]]]:
        torch.manual_seed(1)
        pair = [DataLoader(numbers(n), batch_size=2, shuffle=True) for n in (8, 12)]
        a, b = (distribute_loader(loader, shares(2)[rank], exchange) for loader in pair)
        return [[x.tolist(), y.tolist()] for x, y in zip(a, b, strict=False)]

    first, second = together(2, rank_main)
    found = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    own = RngState.capture()
    torch.manual_seed(1)
    one, other = (DataLoader(numbers(n), batch_size=4, shuffle=True) for n in (8, 12))
    assert found == [[x.tolist(), y.tolist()] for x, y in zip(one, other, strict=False)]
    own.restore()


def test_shuffled_ready_batches_zipped_draw_in_the_order_of_a_plain_run() -> None:
    def make() -> list[DataLoader[Any]]:
        data = [torch.full((2,), i) for i in range(8)]
        return [DataLoader(data, batch_size=None, shuffle=True) for _ in range(2)]  # type: ignore[arg-type]

    def rank_main(rank: int, exchange: Exchange) -> list[list[int]]:
        torch.manual_seed(1)
        a, b = (distribute_loader(loader, shares(2)[rank], exchange) for loader in make())
        return [[int(x[0]), int(y[0])] for x, y in zip(a, b, strict=True)]

    first, second = together(2, rank_main)
    found = [pair for pairs in zip(first, second, strict=True) for pair in pairs]
    own = RngState.capture()
    torch.manual_seed(1)
    assert found == [[int(x[0]), int(y[0])] for x, y in zip(*make(), strict=True)]
    own.restore()


class Lazy(Sampler[int]):
    """Draws each index from the process's generator when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(3000):
            yield int(torch.randint(50, ()))

    def __len__(self) -> int:
        return 3000


def test_later_windows_count_for_ranks_in_step_too() -> None:
    big = DataLoader(numbers(50), batch_size=500, sampler=Lazy())
    expected, state = plain(big, epochs=2, seed=9)
    kept = []

    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        torch.manual_seed(9)
        loader = DataLoader(numbers(50), batch_size=250, sampler=Lazy())
        seen = [list(read(distribute_loader(loader, shares(2)[rank], exchange))) for _ in range(2)]
        kept.append(RngState.capture() == state)
        return seen

    assert same(global_batches(together(2, rank_main)), expected)
    assert kept == [True, True]


class EagerBatches(Sampler[list[int]]):
    """Draws when asked for its iterator, which torch does twice where there are workers."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(12).view(6, 2).tolist())

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_sampler_that_draws_at_once_draws_as_in_a_plain_run(workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(numbers(12), batch_sampler=EagerBatches(), num_workers=workers)

    found = global_batches(read_divided(make, shares(2), epochs=2, seed=4))
    expected, _ = plain(make(), epochs=2, seed=4)
    assert [torch.cat(epoch).tolist() for epoch in found] == [torch.cat(epoch).tolist() for epoch in expected]


@pytest.mark.parametrize("generator_of", ["loader", "sampler"])
def test_a_generator_of_the_users_is_put_where_rank_0s_is(generator_of: str) -> None:
    def make(seed: int, size: int) -> DataLoader[Any]:
        generator = torch.Generator()
        generator.manual_seed(seed)
        if generator_of == "loader":
            return DataLoader(numbers(16), batch_size=size, shuffle=True, generator=generator)
        sampler = RandomSampler(range(16), generator=generator)
        return DataLoader(numbers(16), batch_size=size, sampler=sampler)

    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        loader = distribute_loader(make(rank, 2), shares(2)[rank], exchange)
        return [list(read(loader)) for _ in range(2)]

    assert same(global_batches(together(2, rank_main)), plain(make(0, 4), epochs=2)[0])


def test_loaders_built_differently_are_told_so() -> None:
    def rank_main(rank: int, exchange: Exchange) -> None:
        generator = torch.Generator() if rank else None
        loader = DataLoader(numbers(8), batch_size=2, shuffle=True, generator=generator)
        list(distribute_loader(loader, shares(2)[rank], exchange))

    assert isinstance(Together(2).run(rank_main)[1], DataError)


class Counting(Sampler[int]):
    """Infinite, without a length; draws from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(50)


def test_a_sampler_without_end_or_length_is_read_lazily_and_alike() -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[int]:
        random.seed(rank)
        loader = distribute_loader(DataLoader(numbers(50), batch_size=4, sampler=Counting()), shares(2)[rank], exchange)
        with pytest.raises(TypeError):
            len(loader)
        seen = []
        for _, batch in zip(range(300), loader, strict=False):  # beyond the first window
            seen += batch.tolist()
        return seen

    first, second = together(2, rank_main)
    random.seed(0)
    expected = [random.randrange(50) for _ in range(2400)]
    assert [expected[i] for i in range(2400) if i % 8 < 4] == first
    assert [expected[i] for i in range(2400) if i % 8 >= 4] == second


class Hidden(Sampler[int]):
    """Draws from a generator that nobody knows of."""

    def __init__(self, seed: int, sized: bool) -> None:
        self.random = random.Random(seed)
        self.sized = sized

    def __iter__(self) -> Iterator[int]:
        for _ in range(3000):
            yield self.random.randrange(50)

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("no length")
        return 3000


def test_hidden_randomness_in_a_finite_sampler_uses_rank_0s_order(caplog: pytest.LogCaptureFixture) -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        loader = distribute_loader(
            DataLoader(numbers(50), batch_size=500, sampler=Hidden(rank, True)), shares(2)[rank], exchange
        )
        return [list(read(loader)) for _ in range(2)]

    found = [torch.cat(epoch).tolist() for epoch in global_batches(together(2, rank_main))]
    sampler = Hidden(0, True)
    assert found == [list(sampler), list(sampler)]
    assert caplog.text.count("rank 0's is used") == 2  # once on each rank


def test_hidden_randomness_without_a_length_is_refused_on_every_rank() -> None:
    def rank_main(rank: int, exchange: Exchange) -> None:
        loader = distribute_loader(
            DataLoader(numbers(50), batch_size=5, sampler=Hidden(rank, False)), shares(3)[rank], exchange
        )
        next(iter(loader))

    for error in errors_of(3, rank_main):
        assert isinstance(error, DataError)
        assert "ranks [1, 2]" in str(error)
        assert "__len__" in str(error)


def test_ranks_whose_samplers_have_other_lengths_take_rank_0s() -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        data = numbers(2000)
        sampler = SequentialSampler(range(1600 + rank))  # the first windows are alike
        loader = distribute_loader(DataLoader(data, batch_size=100, sampler=sampler), shares(2)[rank], exchange)
        return [list(read(loader))]

    assert torch.cat(global_batches(together(2, rank_main))[0]).tolist() == list(range(1600))


class Failing(Sampler[int]):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[int]:
        if self.fails:
            raise KeyError("sampler broke")
        return iter(range(8))

    def __len__(self) -> int:
        return 8


def test_a_sampler_that_fails_on_one_rank_fails_all() -> None:
    def rank_main(rank: int, exchange: Exchange) -> None:
        loader = DataLoader(numbers(8), batch_size=2, sampler=Failing(rank == 1))
        list(distribute_loader(loader, shares(2)[rank], exchange))

    first, second = errors_of(2, rank_main)
    assert isinstance(second, KeyError)
    assert isinstance(first, DataError)
    assert "rank 1" in str(first)
    assert "sampler broke" in str(first)


def test_ranks_that_iterate_different_loaders_are_told_so() -> None:
    def rank_main(rank: int, exchange: Exchange) -> None:
        pair = [DataLoader(numbers(8), batch_size=2) for _ in range(2)]
        loaders = [distribute_loader(loader, shares(2)[rank], exchange) for loader in pair]
        list(loaders[rank])

    for error in errors_of(2, rank_main):
        assert isinstance(error, DataError)
        assert "same loader" in str(error)


@pytest.mark.parametrize(
    ("n", "rows", "seen"),
    [
        (10, (3, 2, 3, 2), [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]),
        (3, (1, 1, 1, 0), [[0], [1], [2], [2]]),
        (1, (1, 0, 0, 0), [[0], [0], [0], [0]]),
    ],
)
def test_the_tail_is_divided_evenly_and_an_empty_rank_repeats_a_row(
    n: int, rows: tuple[int, ...], seen: list[list[int]]
) -> None:
    ranks = read_divided(lambda: DataLoader(numbers(n), batch_size=4), shares(2, 2, num_micro_batch=2))
    steps = [epochs[0] for epochs in ranks]
    assert [len(step) for step in steps] == [1, 1, 1, 1]
    assert [step[0][0].tolist() for step in steps] == seen
    assert [step[0][1].rows for step in steps] == [rows] * 4
    assert sum(step[0][1].fraction for step in steps) == pytest.approx(1)


@pytest.mark.parametrize("dropper", ["drop_last", "drop_tail"])
def test_a_dataset_smaller_than_a_dropped_global_batch_yields_nothing(dropper: str) -> None:
    divided = shares(2, drop_tail=dropper == "drop_tail")
    make = lambda: DataLoader(numbers(3), batch_size=2, drop_last=dropper == "drop_last")  # noqa: E731
    assert read_divided(make, divided) == [[[]], [[]]]


def test_an_empty_dataset_yields_nothing() -> None:
    assert read_divided(lambda: DataLoader([], batch_size=2), shares(2)) == [[[]], [[]]]


class Buckets(Sampler[list[int]]):
    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_batch_samplers_give_each_replica_its_own_batches() -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6, 7], [8, 9, 10, 11], [12], [13, 14]]
    ranks = read_divided(lambda: DataLoader(numbers(15), batch_sampler=Buckets(batches)), shares(2, num_micro_batch=2))
    assert [[b.tolist() for b, _ in epochs[0]] for epochs in ranks] == [
        [[0, 1, 2, 3], [8, 9, 10, 11]],
        [[4, 5, 6, 7], [12, 13, 14]],
    ]
    assert [share.rows for _, share in ranks[0][0]] == [(4, 4), (4, 3)]


def test_batch_samplers_divide_a_replicas_rows_over_its_parts() -> None:
    batches = [[0, 1, 2], [3], [4, 5, 6, 7]]
    ranks = read_divided(lambda: DataLoader(numbers(8), batch_sampler=Buckets(batches)), shares(2, 2))
    assert [[b.tolist() for b, _ in epochs[0]] for epochs in ranks] == [
        [[0, 1], [4]],
        [[2], [5]],
        [[3], [6]],
        [[3], [7]],
    ]
    assert [share.rows for _, share in ranks[0][0]] == [(2, 1, 1, 0), (1, 1, 1, 1)]


def test_a_shuffling_batch_sampler_draws_as_in_a_plain_run() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(numbers(16), batch_sampler=BatchSampler(RandomSampler(range(16)), 2, False))

    ranks = read_divided(make, shares(2), epochs=2, seed=4)
    expected, _ = plain(make(), epochs=2, seed=4)
    assert [torch.cat(e).tolist() for e in global_batches(ranks)] == [torch.cat(e).tolist() for e in expected]


class Ready(Dataset[Any]):
    """Each item is a batch of its own size."""

    sizes = (4, 2, 6, 4, 3, 5, 1)

    def __getitem__(self, index: int) -> Any:
        rows = torch.arange(self.sizes[index]) + 10 * index
        return {"x": rows, "names": [f"n{r}" for r in rows.tolist()], "scale": 0.5}

    def __len__(self) -> int:
        return len(self.sizes)


def rows_of(items: list[int]) -> list[int]:
    return [10 * i + row for i in items for row in range(Ready.sizes[i])]


def test_ready_batches_go_to_replicas_whole_and_the_last_is_shared_by_rows() -> None:
    ranks = read_divided(lambda: DataLoader(Ready(), batch_size=None), shares(3))
    seen = [[b["x"].tolist() for b, _ in epochs[0]] for epochs in ranks]
    assert seen == [[rows_of([i]), rows_of([i + 3]), [60]] for i in range(3)]
    assert [share.rows for _, share in ranks[1][0]] == [(4, 2, 6), (4, 3, 5), (1, 0, 0)]
    assert ranks[2][0][1][0]["names"] == [f"n{r}" for r in rows_of([5])]


def test_ready_batches_are_put_together_and_cut_for_micro_batches_and_parts() -> None:
    ranks = read_divided(lambda: DataLoader(Ready(), batch_size=None), shares(2, 2, num_micro_batch=2))
    first = [epochs[0][0][0] for epochs in ranks]
    assert [b["x"].tolist() for b in first] == [
        rows_of([0, 1])[:3],
        rows_of([0, 1])[3:],
        rows_of([2, 3])[:5],
        rows_of([2, 3])[5:],
    ]
    assert first[1]["names"] == [f"n{r}" for r in rows_of([0, 1])[3:]]
    assert first[1]["scale"] == 0.5
    assert [share.rows for _, share in ranks[0][0]] == [(3, 3, 5, 5), (4, 4, 1, 0)]


def test_ready_batches_that_cannot_be_put_together_are_refused() -> None:
    data = [torch.zeros(2, 3), torch.zeros(2, 4)]
    with pytest.raises(DataError, match=r"shapes \[\(2, 3\), \(2, 4\)\]"):
        read_divided(lambda: DataLoader(data, batch_size=None), shares(1, num_micro_batch=2))


class Noise(Dataset[Any]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())

    def __len__(self) -> int:
        return 8


def test_augmentation_in_the_process_differs_between_shares_and_epochs_and_repeats_with_the_seed() -> None:
    def rank_main(rank: int, exchange: Exchange) -> tuple[list[list[float]], bool]:
        torch.manual_seed(11)
        divided = [*shares(2, copies=2), *shares(2, copies=2)][rank]
        loader = distribute_loader(DataLoader(Noise(), batch_size=4), divided, exchange)
        seen = [torch.cat(list(loader)).tolist() for _ in range(2)]
        return seen, exchange.calls > 0

    ranks = [seen for seen, _ in together(4, rank_main)]
    assert ranks == [seen for seen, _ in together(4, rank_main)]
    assert ranks[0] == ranks[2]  # copies of one share see the same bits
    assert ranks[1] == ranks[3]
    assert len({str(epoch) for rank in ranks[:2] for epoch in rank}) == 4


def test_alone_with_micro_batches_everything_is_drawn_as_in_a_plain_run() -> None:
    class NoisyOrder(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return (int(torch.randint(8, ())) for _ in range(8))

        def __len__(self) -> int:
            return 8

    ranks = read_divided(
        lambda: DataLoader(Noise(), batch_size=2, sampler=NoisyOrder()), shares(1, num_micro_batch=2), seed=2
    )
    expected, _ = plain(DataLoader(Noise(), batch_size=4, sampler=NoisyOrder()), seed=2)
    assert same(global_batches(ranks), expected)


def test_collate_is_called_once_with_all_the_samples_of_a_rank() -> None:
    calls: list[int] = []

    def collate(samples: list[torch.Tensor]) -> dict[str, Any]:
        calls.append(len(samples))
        return {"x": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), "count": len(samples)}

    data = [torch.arange(i % 5 + 1) for i in range(24)]
    ranks = read_divided(lambda: DataLoader(data, batch_size=3, collate_fn=collate), shares(2, num_micro_batch=2))
    assert calls == [6] * 4
    assert ranks[1][0][0][0]["count"] == 6
    assert torch.equal(ranks[1][0][0][0]["x"], torch.nn.utils.rnn.pad_sequence(data[6:12], batch_first=True))


class Breaking(Dataset[Any]):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise ZeroDivisionError("sample 5")
        return torch.tensor(index)

    def __len__(self) -> int:
        return 8


def test_an_error_of_the_dataset_passes_unchanged() -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[int]:
        loader = distribute_loader(DataLoader(Breaking(), batch_size=2), shares(2)[rank], exchange)
        return [len(batch) for batch in loader]

    first, second = Together(2).run(rank_main)
    assert isinstance(first, ZeroDivisionError)
    assert str(first) == "sample 5"
    assert second == [2, 2]
    assert not isinstance(second, Stuck)


def test_breaking_off_and_two_iterators_at_once() -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[list[int]]:
        torch.manual_seed(0)
        loader = distribute_loader(DataLoader(numbers(12), batch_size=2), shares(2)[rank], exchange)
        for _ in loader:
            break
        a, b = iter(loader), iter(loader)
        return [next(i).tolist() for i in (a, b, a, b, a)] + [batch.tolist() for batch in loader]

    assert together(2, rank_main)[0] == [[0, 1], [0, 1], [4, 5], [4, 5], [8, 9], [0, 1], [4, 5], [8, 9]]
