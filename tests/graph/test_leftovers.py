"""What runs on fake tensors leave in caches outside of modules is taken away; what was there before stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from epl import _torch
from epl.graph.leftovers import leaving_no_fakes
from epl.parallel.split.choose import choose

TABLE: dict[int, Any] = {}
LISTED: list[Any] = []
LAST: torch.Tensor | None = None


def mask(size: int) -> torch.Tensor:
    return torch.ones(size, size).tril()


@functools.lru_cache
def bounded(size: int) -> torch.Tensor:
    return mask(size)


@functools.cache
def unbounded(size: int) -> tuple[torch.Tensor, int]:
    return mask(size), size


def by_default(size: int, known: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    return known.setdefault(size, mask(size))


def on_itself(size: int) -> torch.Tensor:
    if not hasattr(on_itself, "known"):
        on_itself.known = mask(size)  # type: ignore[attr-defined]
    return on_itself.known  # type: ignore[attr-defined, no-any-return]


class Keeper:
    """An object that is no module."""

    def __init__(self) -> None:
        self.known: dict[int, torch.Tensor] = {}

    def __call__(self, size: int) -> torch.Tensor:
        return self.known.setdefault(size, mask(size))


KEEPER = Keeper()


class Masked(nn.Module):
    shared: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.keeper, self.layer = how, Keeper(), nn.Linear(4, 4)
        self.cached = functools.lru_cache(mask)

    @staticmethod
    @functools.lru_cache(maxsize=10)
    def static(size: int) -> torch.Tensor:
        return mask(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KEPT[self.how](self, len(x)) @ self.layer(x)


def _last(_: Any, size: int) -> torch.Tensor:
    global LAST
    if LAST is None or len(LAST) != size:
        LAST = mask(size)
    return LAST


def _listed(_: Any, size: int) -> torch.Tensor:
    for each in LISTED:
        if len(each["mask"]) == size:
            return each["mask"]  # type: ignore[no-any-return]
    LISTED.append({"mask": mask(size)})
    return LISTED[-1]["mask"]  # type: ignore[no-any-return]


KEPT: dict[str, Callable[[Any, int], torch.Tensor]] = {
    "lru_cache": lambda _, size: bounded(size),
    "cache": lambda _, size: unbounded(size)[0],
    "held cache": lambda m, size: m.cached(size),
    "method": lambda m, size: m.static(size),
    "dict": lambda _, size: TABLE.setdefault(size, mask(size)),
    "list": _listed,
    "global": _last,
    "class": lambda m, size: m.shared.setdefault(size, mask(size)),
    "object": lambda _, size: KEEPER(size),
    "held object": lambda m, size: m.keeper(size),
    "default": lambda _, size: by_default(size),
    "function": lambda _, size: on_itself(size),
}


@pytest.mark.parametrize("how", KEPT)
def test_planning_leaves_no_fakes(how: str) -> None:
    # A mask in a cache was a fake in the loop: DataDependentOutputException from a line that is right.
    model, x = Masked(how), torch.randn(3, 4)
    kept = KEPT[how](model, 5) if how != "function" else None  # of before
    choose(model, 2, (x,))
    assert not _torch.is_fake(KEPT[how](model, 3))
    assert not _torch.is_fake(model(x))
    if how in ("dict", "class", "object", "held object", "default"):
        assert KEPT[how](model, 5) is kept


def test_a_cache_without_fakes_is_left_alone() -> None:
    bounded.cache_clear()
    first = bounded(7)
    with leaving_no_fakes(Masked("dict")):
        second = bounded(8)
        TABLE[-1] = second
    assert bounded(7) is first
    assert bounded(8) is second
    assert TABLE.pop(-1) is second
