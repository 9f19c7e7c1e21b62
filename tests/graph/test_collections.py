"""Collections as data: keys, steps, the order of objects, parts of micro batches."""

from __future__ import annotations

import pytest
import torch

from epl.errors import UsageError
from epl.graph.collections import Collections, GraphKeys, Moment, key_of, listener, overheard

MEAN, SUM = GraphKeys.LOCAL_MEAN_OBJECTS, GraphKeys.GLOBAL_SUM_OBJECTS


class Loop:
    """Where a loop is, and its collections."""

    def __init__(self) -> None:
        self.batch = 0
        self.collections = Collections(lambda: Moment(self.batch, (4, 3)))

    def add(self, value: float, key: GraphKeys = MEAN) -> None:
        self.collections.add(key, torch.tensor(value))

    def values(self, key: GraphKeys = MEAN) -> list[list[float]]:
        return [[float(part.value) for part in each.parts] for each in self.collections.objects(key)]


def test_keys_tell_how_and_over_what() -> None:
    assert {(key.how, key.is_global) for key in GraphKeys} == {
        (how, scope) for how in ("CONCAT", "MEAN", "SUM") for scope in (True, False)
    }
    assert key_of("GLOBAL_SUM_OBJECTS") is SUM
    assert SUM.how == "SUM"
    assert SUM.is_global


@pytest.mark.parametrize("name", ["checkpoints", "global_mean_objects", 3, None])
def test_an_unknown_key_is_told_all_six(name: object) -> None:
    with pytest.raises(UsageError) as caught:
        key_of(name)
    assert repr(name) in str(caught.value)
    assert all(key.value in str(caught.value) for key in GraphKeys)


def test_collections_are_apart_and_in_order() -> None:
    loop = Loop()
    loop.add(1.0)
    loop.add(2.0, SUM)
    loop.add(3.0)
    assert loop.values() == [[1.0], [3.0]]
    assert loop.values(SUM) == [[2.0]]
    assert loop.collections.objects(SUM)[0].shares == (4, 3)


def test_reading_does_not_clear_and_the_first_value_of_a_step_does() -> None:
    loop = Loop()
    loop.add(1.0)
    assert loop.values() == loop.values() == [[1.0]]
    loop.add(2.0)
    loop.collections.end_step()
    assert loop.values() == [[1.0], [2.0]]
    loop.add(3.0)
    assert loop.values() == [[3.0]]
    loop.batch += 1
    assert loop.values() == [[3.0]]
    loop.add(4.0, SUM)
    assert loop.values() == []  # a step has all its collections
    assert loop.values(SUM) == [[4.0]]


def test_a_call_of_a_model_alone_does_not_clear() -> None:
    loop = Loop()
    loop.add(1.0)
    loop.collections.end_step()
    loop.collections.call(rows=4)
    assert loop.values() == [[1.0]]


def test_micro_batches_of_a_call_are_parts_of_one_object() -> None:
    loop = Loop()
    call = loop.collections.call(rows=5)
    for start, rows in ((0, 3), (3, 2)):
        with call.micro_batch(1, start, rows):
            loop.add(start + 0.5)
            loop.add(start + 0.25)
    assert loop.values() == [[0.5, 3.5], [0.25, 3.25]]
    first = loop.collections.objects(MEAN)[0]
    assert first.on_stage
    assert first.rows == 5
    assert [(part.start, part.rows) for part in first.parts] == [(0, 3), (3, 2)]


def test_the_order_is_that_of_one_device_whenever_things_run() -> None:
    loop = Loop()
    first = loop.collections.call(rows=2)
    loop.add(10.0)  # between the calls
    second = loop.collections.call(rows=2)
    loop.add(20.0)
    for call, stage, value in ((second, 0, 11.0), (first, 1, 2.0), (first, 0, 1.0)):
        with call.micro_batch(stage, 0, 2):
            loop.add(value)
    assert loop.values() == [[1.0], [2.0], [10.0], [11.0], [20.0]]


def test_what_only_repeats_rows_is_not_added_but_counted() -> None:
    loop = Loop()
    call = loop.collections.call(rows=1)
    with call.micro_batch(0, 0, 1, padded=True):
        loop.add(1.0)
    assert loop.values() == []


def test_a_call_that_runs_later_belongs_to_its_own_step() -> None:
    """A loop that fetches the next batch before backward: the modules run when the loader has moved on."""
    loop = Loop()
    call = loop.collections.call(rows=1)
    loop.add(2.0)
    loop.batch += 1
    with call.micro_batch(0, 0, 1):
        loop.add(1.0)
    assert loop.values() == [[1.0], [2.0]]
    loop.add(3.0)
    assert loop.values() == [[3.0]]


def test_clear_forgets_everything() -> None:
    loop = Loop()
    loop.add(1.0)
    loop.collections.clear()
    assert loop.values() == []


def test_values_that_pile_up_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("epl.graph.collections.warn", told.append)
    loop = Loop()
    for _ in range(1100):
        loop.add(0.0)
    assert len(told) == 1
    assert "LOCAL_MEAN_OBJECTS" in told[0]


def test_who_listens_to_a_forward_is_known_while_it_is_written_down() -> None:
    assert listener() is None
    heard = lambda again, value, key: None  # noqa: E731
    with overheard(heard):
        assert listener() is heard
    assert listener() is None
