"""Epochs over iterable datasets.

Not sliced, every rank runs the whole stream and keeps its rows of each global batch, so the batches are those of a
plain run with the global batch size, with workers too. `io.slicing` says that each share's dataset yields its own rows
already: nothing is divided, but the ranks tell each other their row counts before every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch.utils.data import DataLoader

from epl.data.division import item_rows, item_span
from epl.data.epoch import (
    END,
    Batches,
    Epoch,
    next_or_end,
    own_generator,
    own_stream,
    rows_by_share,
)
from epl.data.exchange import gather_or_fail
from epl.data.inner import CHECKED_BATCHES, CountRows, KeepShare, Lease, make_streaming, whole_share
from epl.data.order import check_places
from epl.data.rng import RngStream, draw_base_seed, running
from epl.data.sampled import take_items
from epl.data.share import DataShare
from epl.data.structure import count_rows, digest, join_rows
from epl.errors import DataError
from epl.plan.batch import divide


def stream_epoch(epoch: Epoch) -> Batches:
    """Every rank runs the whole stream; samples are put into global batches, of which each rank keeps its rows."""
    loader, share = epoch.loader, epoch.share
    assert loader.batch_size is not None
    size = share.group * loader.batch_size
    lease = epoch.inner.lease(
        loader,
        lambda persistent: make_streaming(
            loader,
            batch_size=size,
            collate_fn=KeepShare(loader.collate_fn, share),
            drop_last=epoch.drop,
            generator=loader.generator,
            persistent=persistent,
        ),
    )
    return _kept_rows(epoch, lease, _start_stream(epoch, lease))


def _kept_rows(epoch: Epoch, lease: Lease, inner: Iterator[object]) -> Batches:
    for piece in _compared(epoch, _drawn(epoch, inner)):
        count, _, batch = cast("tuple[int, str, object]", piece)  # as KeepShare returns it
        yield batch, whole_share(count, epoch.share)


def stream_items_epoch(epoch: Epoch) -> Batches:
    """Every rank runs the whole stream of ready batches (`batch_size=None`) and keeps its own."""
    loader = epoch.loader
    lease = epoch.inner.lease(
        loader,
        lambda persistent: make_streaming(
            loader,
            batch_size=None,
            collate_fn=loader.collate_fn,
            drop_last=False,
            generator=loader.generator,
            persistent=persistent,
        ),
    )
    return _kept_items(epoch, lease, _start_stream(epoch, lease))


def _kept_items(epoch: Epoch, lease: Lease, inner: Iterator[object]) -> Batches:
    share = epoch.share

    def groups() -> Iterator[object]:
        group: list[object] = []
        checked = 0
        for item in _drawn(epoch, inner):
            group.append(item)
            if len(group) == share.group:
                checked += 1
                yield len(group), digest(group) if checked <= CHECKED_BATCHES else "", group
                group = []
        if group and not epoch.drop:
            yield len(group), digest(group), group

    for piece in _compared(epoch, groups()):
        _, _, group = cast("tuple[int, str, list[object]]", piece)
        span = item_span(len(group), share.replica, share)
        batch, _ = take_items(group[span.start : span.stop], span, share)
        yield batch, item_rows([count_rows(item) for item in group], share)


def _start_stream(epoch: Epoch, lease: Lease) -> Iterator[object]:
    """The inner loader's iterator: the workers' seed, and what the dataset draws in `__iter__`, are rank 0's."""
    with running(epoch.common_stream()):
        return iter(lease.loader)


def _drawn(epoch: Epoch, inner: Iterator[object]) -> Iterator[object]:
    """What the inner loader yields; a dataset in this process draws from rank 0's stream."""
    if not epoch.in_process:
        yield from inner
        return
    stream = epoch.common_stream()  # where a plain loader would begin to draw
    while True:
        with running(stream):
            piece = next_or_end(inner)
        if piece is END:
            return
        yield piece


def _compared(epoch: Epoch, pieces: Iterator[object]) -> Iterator[object]:
    """`pieces`, the first ones after comparing (count, digest) with all ranks."""
    for _ in range(CHECKED_BATCHES):
        piece: object = END

        def word() -> tuple[str, int, str]:
            nonlocal piece
            piece = next_or_end(pieces)
            return (epoch.place, 0, "") if piece is END else (epoch.place, *piece[:2])  # type: ignore[index]

        words = gather_or_fail(epoch.exchange, word, f"reading {epoch.place}")
        check_places(words)
        if any(w != words[0] for w in words):
            raise _different_streams(epoch, words)
        if piece is END:
            return
        yield piece
    yield from pieces


def _different_streams(epoch: Epoch, words: list[object]) -> DataError:
    told = [cast("tuple[str, int, str]", word) for word in words]
    found = "\n".join(f"  rank {rank}: {rows} rows or items, digest {d[:8]}" for rank, (_, rows, d) in enumerate(told))
    return DataError(
        f"{epoch.place}: expected an iterable dataset that yields the same stream on every rank, of which each takes "
        f"its rows; found\n{found}\nIf the dataset divides itself between ranks (epl.data.slice_files does), say so: "
        "epl.Config({\"io.slicing\": True}). If it is random, draw from torch's, numpy's or Python's global "
        "generators, which epl seeds alike on all ranks, or seed its own generator with the same number everywhere."
    )


def sliced_epoch(epoch: Epoch) -> Batches:
    """Each share's dataset is its own; ranks that run out early repeat their last batch at weight 0."""
    loader, share = epoch.loader, epoch.share
    before, base_seed = b"", 0
    with running(epoch.common_stream()):
        if not (loader.persistent_workers and epoch.inner.idle_workers):
            before, base_seed = draw_base_seed(loader)
    size = sliced_batch_size(loader, share)
    lease = epoch.inner.lease(
        loader,
        lambda persistent: make_streaming(
            loader,
            batch_size=size,
            collate_fn=loader.collate_fn if size is None else CountRows(loader.collate_fn),
            drop_last=epoch.drop and size is not None,
            generator=own_generator(share, before, base_seed),
            persistent=persistent,
        ),
    )
    augment = own_stream(share, base_seed) if epoch.in_process else None
    with running(augment):
        inner = iter(lease.loader)
    return _own_rows(epoch, augment, lease, inner)


def sliced_batch_size(loader: DataLoader[object], share: DataShare) -> int | None:
    """Rows that this rank reads for a step: M·b, or its part of them; None for ready batches."""
    if loader.batch_size is None:
        return None
    total = share.num_micro_batch * loader.batch_size
    start, stop = divide(total, 1, share.parts)[share.part]
    if start == stop:
        raise DataError(
            f"expected at least one row for each of the {share.parts} ranks of a replica, found a batch of {total} "
            f"(batch_size {loader.batch_size} × num_micro_batch {share.num_micro_batch}). Make batch_size larger."
        )
    return stop - start


def _own_rows(epoch: Epoch, augment: RngStream | None, lease: Lease, inner: Iterator[object]) -> Batches:
    index = epoch.share.index
    last: object = END
    while True:
        batch: object = END

        def word() -> tuple[str, int, int]:
            nonlocal batch
            with running(augment):
                rows, batch = _next_own(epoch, inner)
            return epoch.place, index, rows

        words = gather_or_fail(epoch.exchange, word, f"reading {epoch.place}")
        divided = rows_by_share(epoch, words)
        if divided.total == 0 or (epoch.drop and not all(divided.rows) and last is not END):
            return
        if last is END and not all(divided.rows):
            raise DataError(
                f"{epoch.place}: io.slicing is on, so every rank's dataset must yield rows of its own; found "
                f"{list(divided.rows)} rows for the first step, by share. Give every share at least one row, with "
                "drop_last one full batch (at least as many files as replicas), or set io.slicing to False."
            )
        last = last if batch is END else batch
        yield last, divided


def _next_own(epoch: Epoch, inner: Iterator[object]) -> tuple[int, object]:
    """The next batch of this rank's own stream and its rows; (0, END) behind the last one."""
    if epoch.loader.batch_size is not None:
        piece = next_or_end(inner)
        return (0, END) if piece is END else piece  # type: ignore[return-value]  # as CountRows returns it
    items: list[object] = []
    for _ in range(epoch.share.num_micro_batch):
        if (item := next_or_end(inner)) is END:
            break
        items.append(item)
    if not items or (epoch.drop and len(items) < epoch.share.num_micro_batch):
        return 0, END
    batch = join_rows(items)
    return count_rows(batch), batch
