"""A module built plainly and the same under `split`, to be compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import epl
from epl.graph.deferred import deferred_block, is_deferred, materialise_whole
from epl.plan.split.cut import Axis, Cut
from epl.plan.split.layout import ParameterLayout

Build = Callable[[], nn.Module]
Act = Callable[[nn.Module], object]


def nothing(module: nn.Module) -> None:
    pass


def build_both(build: Build, act: Act = nothing) -> tuple[nn.Module, nn.Module]:
    """The module built and then acted upon, plainly and under `split`; the random streams end alike."""
    torch.manual_seed(5)
    plain = build()
    act(plain)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with epl.split(2):
        deferred = build()
    act(deferred)
    assert torch.equal(after, torch.get_rng_state())
    return plain, deferred


def is_unbuilt(tensor: torch.Tensor) -> bool:
    """Whether it is deferred, and nothing has built the whole behind the scenes."""
    return is_deferred(tensor) and tensor.epl_cell.whole is None


def layouts(shape: torch.Size) -> list[ParameterLayout]:
    """Along every dim, over 2 and 3 ranks, evenly and not, and in two sections."""
    found = []
    for dim, size in enumerate(shape):
        for ways in (2, 3):
            found.append(ParameterLayout(shape, dim, Cut.even("x", size, ways)))
            if size % 3 == 0:
                found.append(ParameterLayout(shape, dim, Cut(Axis("q|kv", size // 3, ways), (1, 2))))
    return found


def check_blocks(whole: torch.Tensor, deferred: torch.Tensor) -> None:
    for layout in layouts(whole.shape):
        for rank in range(layout.cut.axis.ways):
            block = deferred_block(deferred, layout, rank)
            assert type(block) is torch.Tensor
            assert block.is_contiguous()
            assert not block.requires_grad
            expected = layout.take(whole.detach(), rank)
            assert (block.dtype, block.shape) == (expected.dtype, expected.shape)
            assert torch.equal(block, expected), (layout, rank)


def check_same(plain: nn.Module, deferred: nn.Module, *, unbuilt: bool = True) -> None:
    """All blocks, and then the whole parameters, which are ordinary then."""
    some = False
    for (name, expected), (other, found) in zip(plain.named_parameters(), deferred.named_parameters(), strict=True):
        assert name == other
        assert expected.requires_grad == found.requires_grad
        if is_deferred(found):
            some = True
            assert is_unbuilt(found) == unbuilt, name
            assert isinstance(found, nn.Parameter)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            check_blocks(expected, found)
            assert is_unbuilt(found) == unbuilt, name
            materialise_whole(found)
        assert type(found) is nn.Parameter
        assert torch.equal(found, expected), name
    assert some, "nothing was deferred"
    for expected, found in zip(plain.buffers(), deferred.buffers(), strict=True):
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
