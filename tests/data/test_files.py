from __future__ import annotations

import logging
import math
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epl.data.files import FilePlace, replica_plan, set_file_place, slice_files, slice_plan
from epl.errors import DataError, NotInitializedError

FILES = [f"part-{i}" for i in range(10)]
WORKERS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("files", "replicas", "unbalanced", "drop_last", "plans"),
    [
        (6, (1, 1), False, False, [[0, 2, 4], [1, 3, 5]]),
        (6, (2, 2), False, False, [[0, 2, 4], [1, 3, 5]]),  # gcd 2: one slot each
        (6, (1, 2), False, False, [[0, 3], [1, 2, 4, 5]]),  # in proportion to the replicas
        (7, (1, 1), False, False, [[0, 1, 2, 3, 4, 5, 6]] * 2),  # does not divide: not sliced
        (7, (1, 1), True, False, [[0, 2, 4, 6], [1, 3, 5]]),
        (7, (1, 1), False, True, [[0, 2, 4], [1, 3, 5]]),
        (7, (1, 1), True, True, [[0, 2, 4, 6], [1, 3, 5]]),  # unbalanced comes first
        (7, (1, 2), False, False, [list(range(7)), list(range(7)) * 2]),  # not sliced: in proportion by repeating
        (2, (1, 2), True, True, [[0, 1], [0, 1, 0, 1]]),  # fewer files than slots: the flags do not matter
        (5, (3,), False, False, [[0, 1, 2, 3, 4]]),
        (0, (1, 1), False, False, [[], []]),
    ],
)
def test_the_manuals_rule_for_workers(
    files: int, replicas: tuple[int, ...], unbalanced: bool, drop_last: bool, plans: list[list[int]]
) -> None:
    assert [slice_plan(files, replicas, w, unbalanced, drop_last) for w in range(len(replicas))] == plans


@given(st.integers(0, 40), WORKERS, st.booleans(), st.booleans())
def test_workers_and_replicas_share_every_kept_file_once(
    files: int, replicas: list[int], unbalanced: bool, drop_last: bool
) -> None:
    slots = sum(replicas) // math.gcd(*replicas)
    sliced = files >= slots and (files % slots == 0 or unbalanced or drop_last)
    plans = [slice_plan(files, replicas, w, unbalanced, drop_last) for w in range(len(replicas))]
    if not sliced:
        assert plans == [list(range(files)) * (r // math.gcd(*replicas)) for r in replicas]
    else:
        kept = files - files % slots if drop_last and not unbalanced else files
        assert Counter(f for plan in plans for f in plan) == Counter(range(kept))
    for worker, count in enumerate(replicas):
        parts = [replica_plan(files, replicas, worker, r, unbalanced, drop_last) for r in range(count)]
        if not sliced:
            assert parts == [list(range(files))] * count
        elif len(plans[worker]) >= count and (unbalanced or len(plans[worker]) % count == 0):
            assert Counter(f for part in parts for f in part) == Counter(plans[worker])


def test_replicas_of_a_worker_get_one_slot_each_where_there_are_as_many() -> None:
    plans = [replica_plan(9, (1, 2), w, r, False, False) for w, r in ((0, 0), (1, 0), (1, 1))]
    assert plans == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_replicas_share_the_slot_of_their_worker() -> None:
    plans = [replica_plan(8, (2, 2), w, r, False, False) for w in range(2) for r in range(2)]
    assert plans == [[0, 4], [2, 6], [1, 5], [3, 7]]


@pytest.mark.parametrize(("worker", "replica"), [(2, 0), (-1, 0), (0, 1)])
def test_a_place_that_does_not_exist_is_refused(worker: int, replica: int) -> None:
    with pytest.raises((DataError, IndexError)):
        replica_plan(8, (1, 1), worker, replica, False, False)


def place(**settings: bool) -> FilePlace:
    return FilePlace(replicas_per_worker=(1, 1, 1), worker=1, **settings)


def test_the_list_is_settled_when_first_read() -> None:
    asked: list[int] = []

    def find() -> FilePlace:
        asked.append(1)
        return place(slicing=True, drop_last=True)

    files = slice_files(FILES, find)
    assert "not read yet" in repr(files)
    assert asked == []
    assert len(files) == 3
    assert list(files) == ["part-1", "part-4", "part-7"]
    assert files[0] == "part-1"
    assert files[1:] == ["part-4", "part-7"]
    assert files == ["part-1", "part-4", "part-7"]
    assert files != ["part-1"]
    assert "part-7" in files
    assert asked == [1]


def test_without_slicing_it_is_the_whole_list() -> None:
    assert list(slice_files(FILES, lambda: place(drop_last=True))) == FILES


def test_a_copy_for_another_process_is_settled_first() -> None:
    files = slice_files(FILES, lambda: place(slicing=True, unbalanced=True))
    assert pickle.loads(pickle.dumps(files)) == ["part-1", "part-4", "part-7"]


@pytest.mark.parametrize(
    ("count", "settings", "text"),
    [
        (2, {}, "too few for 3"),
        (10, {}, "do not divide over 3"),
        (10, {"unbalanced": True}, "dealt unevenly"),
        (10, {"drop_last": True}, "drops the last 1 of 10"),
        (9, {}, ""),
    ],
)
def test_what_is_out_of_the_ordinary_is_said(
    count: int, settings: dict[str, bool], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "epl"):
        len(slice_files(FILES[:count], lambda: place(slicing=True, **settings)))
    assert text in caplog.text
    assert bool(caplog.text) == bool(text)


def test_what_happens_inside_a_worker_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    inside = FilePlace(replicas_per_worker=(2, 2), worker=1, local_replica=0, slicing=True)
    with caplog.at_level(logging.WARNING, "epl"):
        assert list(slice_files(FILES, lambda: inside)) == ["part-1", "part-3", "part-5", "part-7", "part-9"]
    assert "5 files do not divide over 2 replicas of worker 1" in caplog.text


def test_a_single_name_is_refused() -> None:
    with pytest.raises(DataError, match=r"\['data.txt'\]"):
        slice_files("data.txt")


def test_one_process_alone_reads_everything() -> None:
    set_file_place(None)
    assert list(slice_files(FILES)) == FILES


def test_reading_too_early_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    set_file_place(None)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    files = slice_files(FILES)
    with pytest.raises(NotInitializedError, match=r"epl.init\(\) and epl.parallelize"):
        len(files)
    assert "not read yet" in repr(files)


def test_epl_says_where_this_replica_stands() -> None:
    set_file_place(lambda: place(slicing=True, unbalanced=True))
    try:
        assert list(slice_files(FILES)) == ["part-1", "part-4", "part-7"]
    finally:
        set_file_place(None)
