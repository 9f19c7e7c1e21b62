from __future__ import annotations

from epl.data.active import ActiveBatches
from epl.data.share import BatchShare

FULL = BatchShare((4, 4), 0)
TAIL = BatchShare((2, 1), 0)


def test_a_nested_loop_is_in_force_until_it_ends() -> None:
    batches = ActiveBatches()
    train = batches.start()
    assert batches.share() is None
    batches.yielded(train, FULL)
    valid = batches.start()
    assert batches.share() is FULL
    batches.yielded(valid, TAIL)
    assert batches.share() is TAIL
    assert batches.disagreeing() == ()  # another loop, not the same step
    batches.ended(valid, exhausted=True)
    assert batches.share() is FULL
    batches.ended(train, exhausted=True)
    assert batches.share() is None


def test_a_nested_loop_that_is_broken_off_gives_way() -> None:
    batches = ActiveBatches()
    train, valid = batches.start(), batches.start()
    batches.yielded(train, FULL)
    batches.yielded(valid, TAIL)
    batches.ended(valid, exhausted=False)
    assert batches.share() is FULL


def test_the_batch_of_a_dropped_iterator_counts_until_another_comes() -> None:
    batches = ActiveBatches()
    only = batches.start()
    batches.yielded(only, TAIL)
    batches.ended(only, exhausted=False)  # x, y = next(iter(loader))
    assert batches.share() is TAIL
    later = batches.start()
    batches.yielded(later, FULL)
    batches.ended(later, exhausted=True)
    assert batches.share() is None


def test_an_iterator_that_is_only_held_does_not_stay_in_force() -> None:
    batches = ActiveBatches()
    train, held = batches.start(), batches.start()
    batches.yielded(train, FULL)
    batches.yielded(held, TAIL)
    batches.yielded(train, FULL)
    batches.yielded(train, FULL)
    assert batches.share() is FULL
    assert batches.disagreeing() == ()


def test_zipped_loaders_that_are_divided_differently_disagree() -> None:
    batches = ActiveBatches()
    one, other = batches.start(), batches.start()
    for divided, expected in ((FULL, ()), (TAIL, (FULL, TAIL)), (BatchShare((2, 2), 0), ())):
        batches.yielded(one, FULL)
        batches.yielded(other, divided)
        assert batches.disagreeing() == expected


def test_an_iterator_that_never_yielded_ends_unnoticed() -> None:
    batches = ActiveBatches()
    train = batches.start()
    batches.yielded(train, FULL)
    batches.ended(batches.start(), exhausted=False)
    assert batches.share() is FULL
