"""What the placing code does: blocks, wholes, and parameters on the meta device that are initialised without memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

import epl
from epl import _torch
from epl.graph import registry
from epl.graph.deferred import defer_meta, deferred_block, is_deferred, materialise_whole, scope, settle_block
from epl.plan.split.cut import Axis, Cut
from epl.plan.split.layout import ParameterLayout
from epl.train.meta import materialise
from tests.graph.deferred.compare import check_blocks, is_unbuilt
from tests.harness import run_ranks


def parameter(*shape: int) -> nn.Parameter:
    torch.manual_seed(2)
    with epl.split(2):
        return nn.Parameter(torch.randn(shape))


def test_rows_longer_than_a_piece_are_cut_within() -> None:
    torch.manual_seed(2)
    expected = torch.randn(3, 5, 1999)
    check_blocks(expected, parameter(3, 5, 1999))


def test_a_rank_without_granules_gets_an_empty_block() -> None:
    layout = ParameterLayout(torch.Size((30, 40)), 0, Cut(Axis("x", 30, 3, (20, 0, 10))))
    assert deferred_block(parameter(30, 40), layout, 1).shape == (0, 40)
    assert deferred_block(parameter(30, 40), layout, 2).shape == (10, 40)


def test_a_layout_of_another_shape_is_a_mistake_of_ours() -> None:
    layout = ParameterLayout(torch.Size((40, 30)), 0, Cut.even("x", 40, 2))
    with pytest.raises(AssertionError, match=r"\(30, 40\) is not \(40, 30\)"):
        deferred_block(parameter(30, 40), layout, 0)


def test_a_block_inside_a_scope_has_memory() -> None:
    layout, own = ParameterLayout(torch.Size((90, 40)), 0, Cut.even("x", 90, 2)), parameter(90, 40)
    with epl.split(2):
        assert type(deferred_block(own, layout, 0)) is torch.Tensor
        materialise_whole(own)
    assert type(own) is nn.Parameter
    assert type(own.data) is torch.Tensor


class Net(nn.Module):
    """Modules with initialisers of torch, of their own and of the module around them, as Hugging Face's have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(120, 37, padding_idx=1), nn.Linear(37, 120), nn.LayerNorm(37)
        self.attention = nn.MultiheadAttention(48, 4)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)


def initialise_deferred(model: nn.Module, path: str, around: nn.Module, seed: int) -> None:
    """As epl/train/meta.py does it, module by module."""
    for name, child in model.named_children():
        initialise_deferred(child, f"{path}.{name}" if path else name, around, seed)
    torch.manual_seed(seed + zlib.crc32(path.encode()))
    if any(True for _ in model.parameters(recurse=False)):
        for reset in _torch.resets_of(model):
            reset()
    around._init_weights(model)


def test_meta_parameters_are_initialised_without_memory_as_with() -> None:
    with torch.device("meta"):
        whole, cut = Net(), Net()
    materialise(whole, list(whole.parameters()), torch.device("cpu"), 7)
    objects = list(cut.parameters())
    assert all(map(defer_meta, objects))
    with torch.no_grad(), torch.random.fork_rng([]):
        initialise_deferred(cut, "", cut, 7)
    for expected, found in zip(whole.parameters(), cut.parameters(), strict=True):
        assert is_unbuilt(found)
        check_blocks(expected, found)
    assert all(one is other for one, other in zip(objects, cut.parameters(), strict=True))
    layout = ParameterLayout(torch.Size((120, 37)), 1, Cut.even("x", 37, 2))
    settle_block(cut.head.weight, layout, 0)
    assert type(cut.head.weight) is nn.Parameter
    assert cut.head.weight.requires_grad
    assert torch.equal(cut.head.weight, whole.head.weight[:, :19])


def test_meta_parameters_that_nothing_fills_are_not_a_number() -> None:
    own = nn.Parameter(torch.empty(90, 40, device="meta"))
    assert defer_meta(own)
    with torch.no_grad():
        own[3:].normal_()
    assert torch.isnan(own).any()
    block = deferred_block(own, ParameterLayout(own.shape, 0, Cut.even("x", 90, 2)), 0)
    assert block[:3].isnan().all()
    assert not block[3:].isnan().any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.ones(3)),
        lambda: nn.Parameter(torch.empty(3, dtype=torch.int64, device="meta"), False),
        lambda: nn.Parameter(torch.empty(3, 4, device="meta").t()),
    ],
    ids=["memory", "integers", "strides"],
)
def test_other_parameters_are_left_alone(make: Callable[[], nn.Parameter]) -> None:
    own = make()
    assert not defer_meta(own)
    assert type(own) is nn.Parameter


def build_on_a_rank() -> tuple[int, bool, torch.Tensor]:
    scope.LEAST = 1024
    epl.init()
    torch.manual_seed(3)
    with epl.split(2):
        head = nn.Linear(37, 120)
    deferred = is_deferred(head.weight)
    settle_block(head.weight, ParameterLayout(head.weight.shape, 0, Cut.even("x", 120, 2)), epl.Env.get().cluster.rank)
    return registry.devices, deferred, head.weight.detach()


def test_ranks_of_a_run_build_their_blocks() -> None:
    torch.manual_seed(3)
    whole = nn.Linear(37, 120).weight.detach()
    for rank, (devices, deferred, block) in enumerate(run_ranks(build_on_a_rank, 2)):
        assert (devices, deferred) == (2, True)
        assert torch.equal(block, whole[60 * rank : 60 * rank + 60])
