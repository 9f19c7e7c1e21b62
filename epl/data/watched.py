"""A loader that is not divided, since one process reads it all, but tells which batch the loop is at, like one that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.utils.data import DataLoader

from epl.data.active import active_batches
from epl.data.share import BatchShare

_WATCHED = "_epl_watched"
_ALL = BatchShare((1,), 0)


def watch_loader(loader: DataLoader[Any]) -> Callable[[], None]:
    """Have the loader's iterators tell of their batches; call what is returned to give it its own class back."""
    cls = type(loader)
    if _WATCHED in vars(cls):
        return lambda: None
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__iter__": lambda loader: WatchedIterator(cls.__iter__(loader)),
        _WATCHED: True,
    }
    loader.__class__ = cast("type[DataLoader[Any]]", type(cls.__name__, (cls,), namespace))

    def undo() -> None:
        loader.__class__ = cls

    return undo


class WatchedIterator(Iterator[object]):
    """The loader's own iterator, overheard."""

    def __init__(self, inner: Iterator[object]) -> None:
        self._inner = inner
        self._active = active_batches()
        self._running = self._active.start()

    def __next__(self) -> object:
        try:
            batch = next(self._inner)
        except BaseException:
            self._active.ended(self._running, exhausted=True)
            raise
        self._active.yielded(self._running, _ALL)
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def __del__(self) -> None:
        self._active.ended(self._running, exhausted=False)
