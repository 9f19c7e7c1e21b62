"""What `iter(loader)` returns for a divided loader."""

from __future__ import annotations

from collections.abc import Iterator

from epl.data.active import active_batches
from epl.data.epoch import Batches
from epl.data.share import BatchShare


class BatchIterator(Iterator[object]):
    """Yields this rank's batches and tells the training side how each is divided."""

    def __init__(self, batches: Batches, steps: int | None) -> None:
        self._batches: Batches | None = batches
        self._steps = steps
        self._active = active_batches()
        self._running = self._active.start()

    @property
    def share(self) -> BatchShare | None:
        """How the batch yielded last is divided."""
        return self._running.share

    def __next__(self) -> object:
        if self._batches is None:
            raise StopIteration
        try:
            batch, share = next(self._batches)
        except BaseException:  # its end, or the user's own error, which passes as it is
            self._end(exhausted=True)
            raise
        self._active.yielded(self._running, share)
        return batch

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("the sampler or dataset of this loader has no length")
        return self._steps

    def close(self) -> None:
        """End the epoch here, as `break` does."""
        self._end(exhausted=False)

    def __del__(self) -> None:
        self._end(exhausted=False)

    def _end(self, *, exhausted: bool) -> None:
        if self._batches is not None:
            self._batches = None
            self._active.ended(self._running, exhausted=exhausted)
