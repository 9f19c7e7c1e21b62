"""Numbers made in pieces are those of one device, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.graph.deferred.compare import build_both, check_same

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Bare(nn.Module):
    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(tensor, tensor.is_floating_point()) for tensor in tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "build",
    [
        lambda dtype: nn.Linear(37, 301, dtype=dtype),
        lambda dtype: nn.Linear(64, 96, dtype=dtype),
        lambda dtype: nn.Embedding(301, 37, padding_idx=3, dtype=dtype),
        lambda dtype: nn.Conv2d(30, 42, 3, dtype=dtype),
        lambda dtype: nn.Conv1d(30, 45, 3, groups=3, dtype=dtype),
        lambda dtype: nn.MultiheadAttention(48, 4, dtype=dtype),
        lambda dtype: nn.TransformerEncoderLayer(48, 4, 99, dtype=dtype),
        lambda dtype: nn.LSTM(40, 33, dtype=dtype),
        lambda dtype: nn.Bilinear(10, 11, 33, dtype=dtype),
    ],
    ids=["linear", "linear, even", "embedding", "conv2d", "conv1d", "attention", "encoder layer", "lstm", "bilinear"],
)
def test_modules(build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype) -> None:
    check_same(*build_both(lambda: build(dtype)))


@pytest.mark.parametrize(
    "size", [(2047,), (2048,), (2049,), (2063, 1), (4095,), (63, 65), (6, 2051), (4096 + 7,)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_around_pieces_and_blocks_of_normals(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check_same(*build_both(lambda: Bare(torch.randn(size, dtype=dtype), torch.rand(size, dtype=dtype))))


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.ones_,
        nn.init.zeros_,
        lambda w: nn.init.constant_(w, 0.3),
        lambda w: nn.init.normal_(w, std=0.02),
        lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu"),
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.xavier_uniform_,
        lambda w: nn.init.trunc_normal_(w, std=0.02),
        lambda w: nn.init.trunc_normal_(w, std=1.0),
        lambda w: w.data.log_normal_(),
        lambda w: w.data.cauchy_(),
        lambda w: w.data.uniform_(-0.9, 0.9).erfinv_().mul_(0.7).add_(0.1).clamp_(-1, 1),
        lambda w: w.data.normal_().div_(3).neg_().abs_().sub_(0.25).clamp_(min=0.0),
        lambda w: [rows.data.normal_() for rows in w.data.chunk(3)],
        lambda w: w.data[7:].normal_(),
        lambda w: w.data[:, 3:9].fill_(2),
        lambda w: w.data[5:90:7, 1::5].mul_(2),
        lambda w: w.data.t().mul_(3),
        lambda w: w.data[0].copy_(w.data[1]),
        lambda w: w.data.diagonal().fill_(1),
        lambda w: w.data[100:100].normal_(),
    ],
    ids=range(24),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_initialisers(fill: Callable[[torch.Tensor], object], dtype: torch.dtype) -> None:
    check_same(*build_both(lambda: nn.Linear(37, 120, dtype=dtype), lambda module: fill(module.weight)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(100, 33) * 0.02,
        lambda: torch.randn(100, 33) / 33**0.5,
        lambda: torch.rand(100, 33) * 2 - 1,
        lambda: 1 - torch.rand(100, 33),
        lambda: torch.Tensor(100, 33).normal_(),
        lambda: torch.FloatTensor(100, 33).uniform_(-1, 1),
        lambda: torch.normal(0.5, 2.0, size=(100, 33)),
        lambda: torch.full((100, 33), 2.0) / 3,
        lambda: torch.ones(100, 33, dtype=torch.float64).float(),
        lambda: torch.randn(100, 33).to(torch.bfloat16),
        lambda: torch.randn_like(torch.zeros(100, 33)),
        lambda: torch.zeros(3300).uniform_().view(100, 33),
        lambda: torch.empty(0, 33).new_ones(100, 33),
        lambda: torch.randint(3, 70, (100, 33)),
        lambda: torch.randint(70, (100, 33)).float(),
        lambda: torch.randn(100, 33, generator=torch.Generator().manual_seed(4)),
        lambda: torch.randn(100, 33) + torch.rand(100, 33),
        lambda: torch.randn(100, 33).clone().clamp(-1, 1),
        lambda: torch.randn(200, 33)[50:150] * 2,
        lambda: torch.randn(100, 33, dtype=torch.complex64),
    ],
    ids=range(20),
)
def test_bare_parameters(make: Callable[[], torch.Tensor]) -> None:
    check_same(*build_both(lambda: Bare(make())))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(33, 100).t(),
        lambda: torch.randn(33, 100).t().contiguous(),
        lambda: torch.randn(100, 33).exp(),
        lambda: torch.bernoulli(torch.full((100, 33), 0.5)),
        lambda: torch.empty(100, 33).exponential_(),
        lambda: torch.cat([torch.randn(50, 33), torch.zeros(50, 33)]),
        lambda: torch.eye(99)[:, :33] + torch.zeros(99, 33),
        lambda: torch.randn(100, 33).add(1.0, alpha=0.3),
        lambda: torch.randn(100, 33) / torch.randn(100, 33).norm(),
        lambda: nn.init.orthogonal_(torch.empty(100, 33)),
        lambda: nn.init.sparse_(torch.empty(100, 33), 0.1),
        lambda: nn.init.trunc_normal_(torch.empty(100, 33), a=1.5, b=4),
    ],
    ids=range(12),
)
def test_what_cannot_be_done_in_parts_is_right_all_the_same(make: Callable[[], torch.Tensor]) -> None:
    plain, deferred = build_both(lambda: Bare(make()))
    for expected, found in zip(plain.parameters(), deferred.parameters(), strict=True):
        assert torch.equal(found.detach().clone() + 0, expected)


def test_columns_over_several_threads() -> None:
    """`erfinv_` and arithmetic are the same whether one thread or several make the whole."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:

        def fill(module: nn.Module) -> None:
            module.weight.data.uniform_(-0.9, 0.9).erfinv_().mul_(0.02).add_(0.3).clamp_(0.2, 0.4)

        check_same(*build_both(lambda: nn.Linear(301, 303), fill))
    finally:
        torch.set_num_threads(before)
