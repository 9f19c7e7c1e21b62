"""A loader on one process tells which batch the loop is at, and is otherwise the user's."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from epl.data.active import active_batches, active_share
from epl.data.watched import watch_loader


class Own(DataLoader):  # type: ignore[type-arg]
    tag = "mine"


def _loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return Own(TensorDataset(torch.arange(5)), batch_size=2)


def test_every_batch_has_a_number_of_its_own() -> None:
    loader = _loader()
    undo = watch_loader(loader)
    seen, rows = [], []
    for (x,) in loader:
        seen.append(active_batches().number())
        rows.append(x.tolist())
    assert rows == [[0, 1], [2, 3], [4]]
    assert len(set(seen)) == 3
    assert active_batches().number() == -1
    assert active_share() is None
    undo()


def test_the_loader_stays_the_users_object() -> None:
    loader = _loader()
    undo = watch_loader(loader)
    assert isinstance(loader, Own)
    assert (loader.tag, type(loader).__name__, len(loader), len(iter(loader))) == ("mine", "Own", 3, 3)  # type: ignore[arg-type]
    assert iter(loader)._num_yielded == 0  # type: ignore[attr-defined]
    watch_loader(loader)()  # a second time: nothing changes, and nothing is undone
    assert type(loader) is not Own
    undo()
    assert type(loader) is Own


def test_a_broken_off_loop_and_an_error_end_the_batch() -> None:
    loader = _loader()
    undo = watch_loader(loader)
    for _ in loader:
        break
    number = active_batches().number()
    assert number >= 0  # its batch may still be in use
    next(iter(loader))
    assert active_batches().number() != number
    failing = DataLoader([1, 2], collate_fn=lambda rows: 1 / 0)  # type: ignore[arg-type, var-annotated]
    watch_loader(failing)
    with pytest.raises(ZeroDivisionError):
        next(iter(failing))
    undo()
    for _ in loader:
        assert active_batches().number() == number + 2
