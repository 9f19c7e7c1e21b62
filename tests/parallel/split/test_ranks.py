"""The collectives of a split over a process group: two ranks swap what is small, others run Gloo's; all give the same numbers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epl.parallel.split.ranks import SWAPPED, GroupRanks
from tests.harness import run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def _numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What that rank has."""
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _sums(ranks: GroupRanks, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    everywhere = [_numbers(rank, shape, dtype) for rank in range(ranks.ways)]
    own = everywhere[ranks.rank]
    total, top = torch.stack(everywhere).sum(0).to(dtype), torch.stack(everywhere).amax(0)
    given = own.clone()
    assert torch.equal(ranks.all_reduce(given), total), (shape, dtype)
    assert torch.equal(given, own), "it has memory of its own"
    if given.ndim > 1:
        turned = ranks.all_reduce(given.transpose(0, 1))
        assert turned.is_contiguous()
        assert torch.equal(turned, total.transpose(0, 1))
    changed = ranks.all_reduce_(given)
    assert changed.data_ptr() == given.data_ptr()
    assert torch.equal(given, total)
    assert torch.equal(ranks.all_reduce_(own.clone(), "max"), top)


def _blocks(ranks: GroupRanks, lengths: list[int]) -> None:
    """Of any lengths, also none."""
    blocks = [_numbers(rank, (3, length, 2)) for rank, length in enumerate(lengths)]
    for own in (blocks[ranks.rank], blocks[ranks.rank].transpose(0, 2).contiguous().transpose(0, 2)):
        for found, expected in zip(ranks.all_gather(own, lengths, 1), blocks, strict=True):
            assert torch.equal(found, expected), lengths
    addends = [_numbers(rank, (3, sum(lengths), 2)) for rank in range(ranks.ways)]
    own = ranks.reduce_scatter(addends[ranks.rank].split(lengths, 1))
    assert torch.equal(own, torch.stack(addends).sum(0).split(lengths, 1)[ranks.rank]), lengths
    assert own.untyped_storage().nbytes() == own.nbytes, "it keeps no other memory"


def _collectives() -> None:
    dist.init_process_group("gloo")
    ranks = GroupRanks(dist.group.WORLD)  # type: ignore[arg-type]
    for dtype in DTYPES:
        _sums(ranks, (5, 3), dtype)
    for shape in ((), (0, 4), (1,), (SWAPPED // 8,), (SWAPPED // 8 + 1,)):
        _sums(ranks, shape, torch.float64)
    for first in (2, 1, 0, SWAPPED // 48 + 1):
        _blocks(ranks, [first, *range(3, 2 + ranks.ways)])
        _blocks(ranks, [*range(3, 2 + ranks.ways), first])
    _blocks(ranks, [0] * ranks.ways)
    if ranks.ways == 2:
        with mock.patch.object(dist, "all_reduce"), mock.patch.object(dist, "all_gather"):
            _sums(ranks, (5, 3), torch.float32)
            _blocks(ranks, [2, 3])
    dist.destroy_process_group()


@pytest.mark.parametrize("ways", [2, 3])
def test_collectives(ways: int) -> None:
    run_ranks(_collectives, ways)
