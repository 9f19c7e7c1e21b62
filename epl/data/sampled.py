"""Epochs over map-style datasets: every rank draws the same order and loads its own rows of it.

What is drawn when follows torch's own loader to the letter, so rank 0, and all ranks in step with it, end an epoch with
the random state of a plain run:

    iter(loader)    the iterator of a batch sampler is asked for (a sampler inside torch's own batch sampler waits)
                    the base seed of the workers is drawn, unless workers are kept from the last epoch
                    with workers, the iterator is asked for again, and first batches are drawn at once
    first next()    without workers, the first batches are drawn here
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from epl.data.division import ItemSpan, item_span, take_batches, take_samples
from epl.data.epoch import END, Batches, Epoch, gather_rows, next_or_end, own_generator, own_stream
from epl.data.inner import Feed, Lease, make_indexed, start_feed
from epl.data.order import Order, lazily, warn_taken
from epl.data.rng import draw_base_seed, running
from epl.data.share import BatchShare, DataShare
from epl.data.structure import count_rows, cut_rows, join_rows


@dataclasses.dataclass(frozen=True)
class _Start:
    """What is ready when `iter(loader)` returns."""

    order: Order
    lease: Lease
    base_seed: int


def sampled_epoch(epoch: Epoch) -> Batches:
    """Batches of samples: `batch_size` or `batch_sampler`."""
    share = epoch.share
    by_batch = epoch.loader.batch_size is None
    size = share.group if by_batch else share.group * (epoch.loader.batch_size or 1)
    start = _start(epoch, size, items=False, batches=by_batch)

    def pieces() -> Iterator[tuple[list[object], BatchShare]]:
        for group in start.order.groups():
            if epoch.drop and len(group) < size:
                return
            if by_batch:
                own, divided = take_batches(group, share)  # type: ignore[arg-type]  # lists, by `batches=True`
            else:
                own, divided = take_samples(group, share)
            yield [own], divided

    feed = Feed(pieces())
    if epoch.in_process:
        return _samples_here(epoch, start, feed)
    _agree(epoch, start.order)
    return _samples(start.lease, start_feed(start.lease, feed), feed)


def _samples(lease: Lease, inner: Iterator[object], feed: Feed[BatchShare]) -> Batches:
    """From workers; `lease` is held as long as the epoch runs."""
    for batch in inner:
        yield batch, feed.notes.popleft()


def _samples_here(epoch: Epoch, start: _Start, feed: Feed[BatchShare]) -> Batches:
    start.order.stream = epoch.common_stream()
    _agree(epoch, start.order)
    inner = start_feed(start.lease, feed)
    augment = own_stream(epoch.share, start.base_seed)
    while True:
        feed.fill()  # the order is drawn from rank 0's stream, outside this share's own
        with running(augment):
            batch = next_or_end(inner)
        if batch is END:
            return
        yield batch, feed.notes.popleft()


def items_epoch(epoch: Epoch) -> Batches:
    """Ready batches (`batch_size=None`): the dataset's items, M for each replica."""
    start = _start(epoch, epoch.share.group, items=True, batches=False)

    def pieces() -> Iterator[tuple[list[object], ItemSpan]]:
        for group in start.order.groups():
            if epoch.drop and len(group) < epoch.share.group:
                return
            span = item_span(len(group), epoch.share.replica, epoch.share)
            yield group[span.start : span.stop], span

    feed = Feed(pieces())
    if epoch.in_process:
        return _items(epoch, start, None, feed)
    _agree(epoch, start.order)
    return _items(epoch, start, start_feed(start.lease, feed), feed)


def _items(epoch: Epoch, start: _Start, inner: Iterator[object] | None, feed: Feed[ItemSpan]) -> Batches:
    augment = None
    if inner is None:
        start.order.stream = epoch.common_stream()
        _agree(epoch, start.order)
        inner = start_feed(start.lease, feed)
        augment = own_stream(epoch.share, start.base_seed)
    while True:
        if epoch.in_process:
            feed.fill()
        with running(augment):
            item = next_or_end(inner)
            if item is END:
                return
            span = feed.notes.popleft()
            items = [item, *(next(inner) for _ in range(span.stop - span.start - 1))]
        batch, rows = take_items(items, span, epoch.share)
        yield batch, gather_rows(epoch, rows)


def take_items(items: list[object], span: ItemSpan, share: DataShare) -> tuple[object, int]:
    """This rank's part of its replica's ready batches, and how many of its rows count."""
    batch = join_rows(items)
    rows = count_rows(batch)
    start, stop, counted = span.rows_of(rows, share.parts, share.part)
    own = batch if (start, stop) == (0, rows) else cut_rows(batch, start, stop)
    return own, stop - start if counted else 0


def _start(epoch: Epoch, group: int, *, items: bool, batches: bool) -> _Start:
    """What torch does in `iter(loader)`: see the table above."""
    loader, share = epoch.loader, epoch.share
    before, base_seed = b"", 0
    stream = epoch.common_stream()
    with running(stream):
        source = _source(epoch, items=items, batches=batches)
        if not (loader.persistent_workers and epoch.inner.idle_workers):
            before, base_seed = draw_base_seed(loader)
            if loader.num_workers:
                source = _source(epoch, items=items, batches=batches)
    order = Order(source, stream, group=group, batches=batches, ahead=not share.alone)
    lease = epoch.inner.lease(
        loader,
        lambda persistent: make_indexed(
            loader, items=items, generator=own_generator(share, before, base_seed), persistent=persistent
        ),
    )
    return _Start(order, lease, base_seed)


def _source(epoch: Epoch, *, items: bool, batches: bool) -> Iterator[object]:
    if batches:
        assert epoch.loader.batch_sampler is not None
        return iter(epoch.loader.batch_sampler)
    return iter(epoch.loader.sampler) if items else lazily(epoch.loader.sampler)


def _agree(epoch: Epoch, order: Order) -> None:
    agreed = order.agree(epoch.exchange, place=epoch.place, steps=epoch.steps)
    if not agreed and "order" not in epoch.said:
        epoch.said.add("order")
        warn_taken(epoch.place)
