from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from epl.data import DataShare, active_share, distribute_loader, restore_loader
from epl.data.exchange import NoOthers
from epl.errors import DataError
from tests.data.ranks import Exchange, Together, global_batches, numbers, plain, read, same, shares, together


class Tagged(DataLoader[Any]):
    tag = "mine"


TWO_MICRO = DataShare(num_micro_batch=2)


def test_the_loader_stays_the_users_object() -> None:
    data = numbers(10)
    loader = Tagged(data, batch_size=2)
    loader.note = "kept"  # type: ignore[attr-defined]
    divided = distribute_loader(loader, TWO_MICRO, NoOthers())
    assert divided is loader
    assert isinstance(loader, Tagged)
    assert type(loader).__name__ == "Tagged"
    assert (loader.tag, loader.note, loader.batch_size) == ("mine", "kept", 2)  # type: ignore[attr-defined]
    assert loader.dataset is data
    assert len(loader) == 3
    assert [b.tolist() for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(iter(loader)) == 3
    assert restore_loader(loader) is loader
    assert type(loader) is Tagged
    assert [len(b) for b in loader] == [2] * 5
    assert restore_loader(loader) is loader


def test_one_rank_with_one_micro_batch_is_left_as_it_is() -> None:
    loader = DataLoader(numbers(4), batch_size=2)
    assert distribute_loader(loader, DataShare(), NoOthers()) is loader
    assert type(loader) is DataLoader


def test_dividing_again_alike_changes_nothing_and_otherwise_is_refused() -> None:
    loader = distribute_loader(DataLoader(numbers(4), batch_size=2), TWO_MICRO, NoOthers())
    assert distribute_loader(loader, TWO_MICRO, NoOthers()) is loader
    with pytest.raises(DataError, match="second DataLoader"):
        distribute_loader(loader, DataShare(num_micro_batch=3), NoOthers())


@pytest.mark.parametrize(
    ("replicas", "parts", "micro", "n", "drop", "steps"),
    [
        (2, 1, 1, 16, False, 2),
        (2, 1, 1, 17, False, 3),
        (2, 1, 1, 17, True, 2),
        (2, 2, 2, 33, False, 3),
        (1, 4, 1, 3, False, 1),
    ],
)
def test_lengths(replicas: int, parts: int, micro: int, n: int, drop: bool, steps: int) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(numbers(n))

        def __len__(self) -> int:
            return n

    share = shares(replicas, parts, num_micro_batch=micro)[0]
    batches = [list(range(i, min(i + 4, n))) for i in range(0, n, 4)]
    loaders = [
        DataLoader(numbers(n), batch_size=4, drop_last=drop),
        DataLoader(Stream(), batch_size=4, drop_last=drop),
    ]
    for loader in loaders:
        assert len(distribute_loader(loader, share, NoOthers())) == steps
    if not drop:
        by_batch = DataLoader(numbers(n), batch_sampler=batches)
        assert len(distribute_loader(by_batch, share, NoOthers())) == -(-len(batches) // (replicas * micro))
        ready = DataLoader(numbers(n), batch_size=None)
        assert len(distribute_loader(ready, share, NoOthers())) == -(-n // (replicas * micro))


def test_what_cannot_be_divided_is_refused_all_at_once() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

        def __len__(self) -> int:
            return 1

    data = numbers(8)
    loader = Own(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))  # type: ignore[arg-type]
    with pytest.raises(DataError) as caught:
        distribute_loader(loader, TWO_MICRO, NoOthers())
    text = str(caught.value)
    assert "2 problems" in text
    assert "Own with its own __iter__ and __len__" in text
    assert "shuffle=True" in text
    assert type(loader) is Own


def test_a_divided_sampler_inside_a_batch_sampler_is_refused() -> None:
    data = numbers(8)
    sampler = DistributedSampler(data, num_replicas=2, rank=0)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False))
    with pytest.raises(DataError, match="DistributedSampler"):
        distribute_loader(loader, TWO_MICRO, NoOthers())


def test_settings_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "epl"):
        distribute_loader(DataLoader(numbers(8), batch_size=2, in_order=False), shares(1, 4)[0], NoOthers())
    assert "in_order=False has no effect" in caplog.text
    assert "less than the 4 ranks" in caplog.text


def test_settings_changed_after_dividing_are_honoured() -> None:
    loader = distribute_loader(DataLoader(numbers(4), batch_size=1), TWO_MICRO, NoOthers())
    loader.collate_fn = lambda samples: [int(s) for s in samples]
    assert list(loader) == [[0, 1], [2, 3]]


def test_the_loop_is_told_the_division_of_its_batch() -> None:
    loader = distribute_loader(DataLoader(numbers(6), batch_size=2), shares(1, 1, num_micro_batch=2)[0], NoOthers())
    inner = distribute_loader(DataLoader(numbers(3), batch_size=1), TWO_MICRO, NoOthers())
    seen = []
    for _ in loader:
        for _ in inner:
            share = active_share()
            assert share is not None
            seen.append(share.rows)
        outer = active_share()
        assert outer is not None
        seen.append(outer.rows)
    assert seen == [(2,), (1,), (4,), (2,), (1,), (2,)]
    assert active_share() is None


class Seeds(Dataset[Any]):
    """The seed of the worker that loads it, and a draw."""

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        info = get_worker_info()
        assert info is not None
        return index, info.seed - info.id, int(torch.randint(1 << 30, ()))

    def __len__(self) -> int:
        return 12


_started: list[int] = []


def note_start(worker: int) -> None:
    _started.append(worker)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers(persistent: bool) -> None:
    """Order and base seeds of a plain run on rank 0; other replicas have seeds of their own; new ones every epoch."""

    def make(size: int) -> DataLoader[Any]:
        return DataLoader(
            Seeds(),
            batch_size=size,
            shuffle=True,
            num_workers=1,
            persistent_workers=persistent,
            prefetch_factor=3,
            timeout=30,
            worker_init_fn=note_start,
        )

    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        torch.manual_seed(8 + rank)
        loader = distribute_loader(make(2), shares(2)[rank], exchange)
        epochs = [list(read(loader)) for _ in range(2)]
        for _ in loader:
            break
        assert len(list(loader)) == 3
        restore_loader(loader)
        return epochs

    ranks = together(2, rank_main)
    own = torch.get_rng_state()
    torch.manual_seed(8)
    plain_loader = make(4)
    expected = [list(plain_loader) for _ in range(2)]
    torch.set_rng_state(own)
    for epoch in range(2):
        order = [torch.cat([b[0] for b, _ in step]) for step in zip(*(r[epoch] for r in ranks), strict=True)]
        assert [o.tolist() for o in order] == [b[0].tolist() for b in expected[epoch]]
        assert ranks[0][epoch][0][0][1][0] == expected[epoch][0][1][0]  # rank 0's base seed is the plain one
        assert ranks[0][epoch][0][0][1][0] != ranks[1][epoch][0][0][1][0]
    draws = [ranks[r][epoch][0][0][2].tolist() for r in range(2) for epoch in range(2)]
    assert len({str(d) for d in draws}) == 4


class BreaksInWorker(Dataset[Any]):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            raise LookupError("sample 3")
        return torch.tensor(index)

    def __len__(self) -> int:
        return 8


def test_an_error_in_a_worker_passes_unchanged_and_two_iterators_share_no_workers() -> None:
    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        loader = DataLoader(BreaksInWorker(), batch_size=1, num_workers=1, persistent_workers=True)
        distribute_loader(loader, DataShare(num_micro_batch=2), exchange)
        a, b = iter(loader), iter(loader)
        seen = [next(a).tolist(), next(b).tolist()]
        with pytest.raises(LookupError, match="sample 3"):
            next(a)
        del a, b
        restore_loader(loader)
        return seen

    assert Together(1).run(rank_main) == [[[0, 1], [0, 1]]]


def test_kept_workers_of_a_stream_begin_anew_each_epoch() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.randperm(9))

    def make(size: int) -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=size, num_workers=1, persistent_workers=True)

    def rank_main(rank: int, exchange: Exchange) -> list[Any]:
        torch.manual_seed(4)
        loader = distribute_loader(make(2), shares(2)[rank], exchange)
        epochs = [list(read(loader)) for _ in range(2)]
        restore_loader(loader)
        return epochs

    ranks = together(2, rank_main)
    assert same(global_batches(ranks), plain(make(4), epochs=2, seed=4)[0])
