"""Divides a DataLoader over the ranks, and leaves it the user's own object.

The loader's class is replaced by a subclass of it that overrides `__iter__` and `__len__`; everything else, attributes
and `isinstance` included, stays as it was.
"""

from __future__ import annotations

import itertools
import logging
from typing import TypeVar, cast

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from epl.data.epoch import Batches, Epoch
from epl.data.exchange import Exchange, NoOthers, gather_or_fail
from epl.data.inner import InnerLoaders
from epl.data.iterable import sliced_batch_size, sliced_epoch, stream_epoch, stream_items_epoch
from epl.data.iterator import BatchIterator
from epl.data.sampled import items_epoch, sampled_epoch
from epl.data.share import DataShare
from epl.errors import DataError, list_problems

Loader = TypeVar("Loader", bound=DataLoader[object])
_ATTRIBUTE = "_epl_division"
_log = logging.getLogger("epl")
_numbers = itertools.count(1)  # rank 0's number names a loader on all ranks


def distribute_loader(loader: Loader, share: DataShare, exchange: Exchange) -> Loader:
    """The same loader, which from now on yields this rank's rows of every global batch. All ranks call it together."""
    found = division_of(loader)
    if found is not None:
        if found.share == share:
            return loader
        raise DataError(
            f"this loader is divided already as {found.share}, and cannot be divided again as {share}. "
            "Make a second DataLoader."
        )
    _refuse_what_cannot_be_divided(loader)
    if share.alone and share.num_micro_batch == 1:
        return loader
    exchange = NoOthers() if share.alone else exchange
    number = cast("int", exchange.broadcast(next(_numbers)))
    division = Division(share, exchange, number=number, user_class=type(loader))
    division.prepare(loader)
    loader.__dict__[_ATTRIBUTE] = division
    loader.__class__ = cast("type[Loader]", _divided_class(type(loader)))
    return loader


def restore_loader(loader: Loader) -> Loader:
    """The same loader, as it was before `distribute_loader`."""
    division = division_of(loader)
    if division is not None:
        division.inner.close()
        del loader.__dict__[_ATTRIBUTE]
        loader.__class__ = cast("type[Loader]", division.user_class)
    return loader


def division_of(loader: DataLoader[object]) -> Division | None:
    """How this loader is divided; None if it is not."""
    return cast("Division | None", loader.__dict__.get(_ATTRIBUTE))


class Division:
    """How one loader is divided."""

    def __init__(
        self, share: DataShare, exchange: Exchange, *, number: int, user_class: type[DataLoader[object]]
    ) -> None:
        self.share, self.exchange, self.number, self.user_class = share, exchange, number, user_class
        self.inner = InnerLoaders()
        self._epochs = itertools.count(1)
        self._agreed_steps: int | None = None
        self._said: set[str] = set()

    def prepare(self, loader: DataLoader[object]) -> None:
        """What is settled once: the common length of sliced datasets, and what the user should know."""
        if not loader.in_order:
            _log.warning(
                "in_order=False has no effect: the ranks' batches of a step belong together, so they come in order."
            )
        if self._is_sliced(loader):
            self._agree_on_steps(loader)
        elif loader.batch_size is not None and loader.batch_size * self.share.num_micro_batch < self.share.parts:
            _log.warning(
                "batch_size %d × num_micro_batch %d is less than the %d ranks of a replica: some of them get no rows. "
                "Make batch_size larger.",
                loader.batch_size,
                self.share.num_micro_batch,
                self.share.parts,
            )

    def iterate(self, loader: DataLoader[object]) -> BatchIterator:
        """The next epoch."""
        if self._is_sliced(loader):
            self._agree_on_steps(loader)
        steps = self._steps_if_known(loader)
        place = f"epoch {next(self._epochs)} of loader {self.number} ({type(loader.dataset).__name__})"
        epoch = Epoch(loader, self.share, self.exchange, self.inner, place, steps, self._said)
        return BatchIterator(self._start(epoch), steps)

    def count_steps(self, loader: DataLoader[object]) -> int:
        """Optimizer steps in an epoch."""
        if self._is_sliced(loader):
            if self._agreed_steps is None:
                raise TypeError(f"the {type(loader.dataset).__name__} has no length on some rank")
            return self._agreed_steps
        group = self.share.group
        if isinstance(loader.dataset, IterableDataset):
            return self._whole_or_begun(loader, _length(loader.dataset), group * (loader.batch_size or 1))
        if loader.batch_size is None and loader.batch_sampler is not None:
            return self._whole_or_begun(loader, _length(loader.batch_sampler), group)
        return self._whole_or_begun(loader, _length(loader.sampler), group * (loader.batch_size or 1))

    def _start(self, epoch: Epoch) -> Batches:
        ready = epoch.loader.batch_size is None and epoch.loader.batch_sampler is None
        if not isinstance(epoch.loader.dataset, IterableDataset):
            return items_epoch(epoch) if ready else sampled_epoch(epoch)
        if self._is_sliced(epoch.loader):
            return sliced_epoch(epoch)
        return stream_items_epoch(epoch) if ready else stream_epoch(epoch)

    def _is_sliced(self, loader: DataLoader[object]) -> bool:
        return self.share.sliced and self.share.shares > 1 and isinstance(loader.dataset, IterableDataset)

    def _agree_on_steps(self, loader: DataLoader[object]) -> None:
        """Sliced datasets have lengths of their own: an epoch lasts as long as the longest, with drop the shortest."""
        words = gather_or_fail(self.exchange, lambda: self._own_steps(loader), f"the length of loader {self.number}")
        lengths = [word for word in words if isinstance(word, int)]
        drop = loader.drop_last or self.share.drop_tail
        self._agreed_steps = (min(lengths) if drop else max(lengths)) if len(lengths) == len(words) else None

    def _own_steps(self, loader: DataLoader[object]) -> int | None:
        size = sliced_batch_size(loader, self.share)
        try:
            length = _length(loader.dataset)
        except (TypeError, NotImplementedError):
            return None
        return self._whole_or_begun(loader, length, self.share.num_micro_batch if size is None else size)

    def _steps_if_known(self, loader: DataLoader[object]) -> int | None:
        try:
            return self.count_steps(loader)
        except (TypeError, NotImplementedError):
            return None

    def _whole_or_begun(self, loader: DataLoader[object], length: int, size: int) -> int:
        return length // size if loader.drop_last or self.share.drop_tail else -(-length // size)


def _divided_class(cls: type[DataLoader[object]]) -> type[DataLoader[object]]:
    """The user's class with our `__iter__` and `__len__`. No second base: Python would refuse its layout."""
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__iter__": lambda loader: _division(loader).iterate(loader),
        "__len__": lambda loader: _division(loader).count_steps(loader),
    }
    return type(cls.__name__, (cls,), namespace)


def _division(loader: DataLoader[object]) -> Division:
    division = division_of(loader)
    assert division is not None, "a divided class without its division"
    return division


def _length(sized: object) -> int:
    return len(sized)  # type: ignore[arg-type]  # a TypeError of its own says what has no length


def _refuse_what_cannot_be_divided(loader: DataLoader[object]) -> None:
    problems = []
    cls = type(loader)
    overridden = [name for name in ("__iter__", "__len__") if getattr(cls, name) is not getattr(DataLoader, name)]
    if overridden:
        problems.append(
            f"expected a loader that iterates as torch's DataLoader does, found {cls.__name__} with its own "
            f"{' and '.join(overridden)}. Give epl.parallelize the DataLoader inside it, or move what it does into the "
            "dataset, the sampler or collate_fn."
        )
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        problems.append(
            "expected a sampler over the whole dataset, found a DistributedSampler, which has divided it already. Use "
            "DataLoader(dataset, batch_size, shuffle=True): epl divides the rows itself."
        )
    if problems:
        raise DataError(list_problems("this loader cannot be divided", problems))
