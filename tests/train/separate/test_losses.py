"""Torch's own losses, with every reduction, ragged micro batches and a gradient that is not one."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epl.train.lazy import LazyTensor
from epl.train.lazy.read import read
from tests.train.lazy.double import Double

B = C = 6
WHOLE = {"gaussian", "gaussian_row", "ctc_flat", "legacy", "triplet_with_distance", "diagonal"}
"""Losses that need the whole batch: they read values, or where a row begins, or are not known."""


class Data:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, C), nn.Tanh(), nn.Linear(C, C))
        self.x, self.x2 = torch.randn(B, 5), torch.randn(B, 5)
        self.w, self.W = torch.rand(C) + 0.2, torch.rand(B, C) + 0.2
        self.y = torch.randint(0, C, (B,))
        self.y[2] = -100
        self.yc, self.T = self.y.clamp(min=0), torch.rand(B, C)
        self.S, self.s = torch.sign(torch.randn(B, C)), torch.sign(torch.randn(B))
        self.labels = torch.stack([torch.randperm(C) for _ in range(B)])
        self.labels[:, 3:] = -1
        self.sequences = torch.randint(1, C, (2 * B, 3))

    def spoken(self, M):
        return M(self.x.unsqueeze(1).expand(B, 9, 5)).log_softmax(-1)


def cosine_distance(a, b):
    return 1 - F.cosine_similarity(a, b)


LOSSES = {
    "ce": lambda d, M, r: F.cross_entropy(M(d.x), d.y, reduction=r),
    "ce_weights": lambda d, M, r: F.cross_entropy(M(d.x), d.y, d.w, reduction=r),
    "ce_smoothing": lambda d, M, r: F.cross_entropy(M(d.x), d.y, d.w, reduction=r, label_smoothing=0.2),
    "ce_soft": lambda d, M, r: F.cross_entropy(M(d.x), d.T, reduction=r),
    "ce_soft_weights": lambda d, M, r: F.cross_entropy(M(d.x), d.T, d.w, reduction=r, label_smoothing=0.1),
    "ce_3d": lambda d, M, r: F.cross_entropy(
        M(d.x).view(B, 2, 3).transpose(1, 2), d.yc.view(B, 1).expand(B, 2) % 3, reduction=r
    ),
    "nll": lambda d, M, r: F.nll_loss(M(d.x).log_softmax(1), d.y, d.w, reduction=r),
    "nll_ignore": lambda d, M, r: F.nll_loss(M(d.x).log_softmax(1), d.yc, ignore_index=1, reduction=r),
    "mse": lambda d, M, r: F.mse_loss(M(d.x), d.T, reduction=r),
    "mse_weights": lambda d, M, r: F.mse_loss(M(d.x), d.T, reduction=r, weight=d.W),
    "l1": lambda d, M, r: F.l1_loss(M(d.x), d.T, reduction=r),
    "l1_weights": lambda d, M, r: F.l1_loss(M(d.x), d.T, reduction=r, weight=d.W),
    "huber": lambda d, M, r: F.huber_loss(M(d.x), d.T, reduction=r, delta=0.3),
    "huber_weights": lambda d, M, r: F.huber_loss(M(d.x), d.T, reduction=r, delta=0.3, weight=d.W),
    "smooth_l1": lambda d, M, r: F.smooth_l1_loss(M(d.x), d.T, reduction=r, beta=0.3),
    "bce": lambda d, M, r: F.binary_cross_entropy(M(d.x).sigmoid(), d.T, weight=d.w, reduction=r),
    "bce_row_weights": lambda d, M, r: F.binary_cross_entropy(M(d.x).sigmoid(), d.T, weight=d.W, reduction=r),
    "bce_logits": lambda d, M, r: F.binary_cross_entropy_with_logits(
        M(d.x), d.T, weight=d.W, pos_weight=d.w, reduction=r
    ),
    "bce_logits_1d": lambda d, M, r: F.binary_cross_entropy_with_logits(
        M(d.x)[:, 0], d.T[:, 0], pos_weight=torch.tensor(2.0), reduction=r
    ),
    "kl": lambda d, M, r: F.kl_div(M(d.x).log_softmax(1), d.T.softmax(1), reduction=r),
    "kl_batchmean": lambda d, M, r: F.kl_div(
        M(d.x).log_softmax(1), d.T.log_softmax(1), reduction="batchmean", log_target=True
    ),
    "kl_batchmean_3d": lambda d, M, r: F.kl_div(
        M(d.x).view(B, 2, 3).log_softmax(2), d.T.view(B, 2, 3).softmax(2), reduction="batchmean"
    ),
    "kl_batchmean_transposed": lambda d, M, r: F.kl_div(
        M(d.x).log_softmax(1).T, d.T.softmax(1).T, reduction="batchmean"
    ),
    "poisson": lambda d, M, r: F.poisson_nll_loss(M(d.x), d.T, reduction=r, full=True),
    "soft_margin": lambda d, M, r: F.soft_margin_loss(M(d.x), d.S, reduction=r),
    "hinge": lambda d, M, r: F.hinge_embedding_loss(M(d.x), d.S, reduction=r),
    "ranking": lambda d, M, r: F.margin_ranking_loss(M(d.x)[:, 0], M(d.x2)[:, 1], d.s, margin=0.1, reduction=r),
    "cosine": lambda d, M, r: F.cosine_embedding_loss(M(d.x), M(d.x2), d.s, margin=0.1, reduction=r),
    "cosine_constant": lambda d, M, r: F.cosine_embedding_loss(M(d.x), d.T, d.s, reduction=r),
    "triplet": lambda d, M, r: F.triplet_margin_loss(M(d.x), M(d.x2), M(d.x * 2), reduction=r),
    "triplet_constant": lambda d, M, r: F.triplet_margin_loss(M(d.x), d.T, d.S, swap=True, reduction=r),
    "multi_margin": lambda d, M, r: F.multi_margin_loss(M(d.x), d.yc, weight=d.w, reduction=r),
    "multilabel": lambda d, M, r: F.multilabel_margin_loss(M(d.x), d.labels, reduction=r),
    "multilabel_soft": lambda d, M, r: F.multilabel_soft_margin_loss(M(d.x), d.T.round(), weight=d.w, reduction=r),
    "gaussian": lambda d, M, r: F.gaussian_nll_loss(M(d.x), d.T, d.W, reduction=r),
    "gaussian_row": lambda d, M, r: F.gaussian_nll_loss(M(d.x), d.T, d.W[:, :1], reduction=r),
    "module": lambda d, M, r: nn.MultiLabelSoftMarginLoss(reduction=r)(M(d.x), d.T.round()),
    "ctc": lambda d, M, r: nn.CTCLoss(reduction=r)(
        d.spoken(M).transpose(0, 1), d.sequences[:B], torch.full((B,), 9), torch.arange(B) % 3 + 1
    ),
    "ctc_tuples": lambda d, M, r: F.ctc_loss(
        d.spoken(M).permute(1, 0, 2), d.sequences[:B], (9,) * B, tuple(i % 3 + 1 for i in range(B)), reduction=r
    ),
    "ctc_flat": lambda d, M, r: F.ctc_loss(
        d.spoken(M).permute(1, 0, 2), d.sequences[:, 0], (9,) * B, (2,) * B, reduction=r
    ),
    "legacy": lambda d, M, r: F.mse_loss(M(d.x), d.T, size_average=False),
    "triplet_with_distance": lambda d, M, r: nn.TripletMarginWithDistanceLoss(
        distance_function=cosine_distance, reduction=r
    )(M(d.x), M(d.x2), M(d.x * 2)),
    "diagonal": lambda d, M, r: (M(d.x) @ M(d.x2).mT).diag().sum(),
}


@pytest.fixture(autouse=True)
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_torch_is_exact(name):
    d = Data()
    for reduction, micro_batches in itertools.product(("none", "mean", "sum"), (1, 3, 4)):
        d.model.zero_grad()
        expected = LOSSES[name](d, d.model, reduction)
        seed = torch.linspace(0.5, 1.5, expected.numel()).view_as(expected)
        expected.backward(seed)
        gradients = [p.grad.clone() for p in d.model.parameters()]
        d.model.zero_grad()
        double = Double(d.model, micro_batches)
        with warnings.catch_warnings(action="ignore"):
            found = LOSSES[name](d, double, reduction)
            found.backward(seed)
        where = f"{reduction}, {micro_batches} micro batches"
        assert ("scheduled" in double.carrier.events) == (name not in WHOLE), where
        value = read([found.epl_node], "the test")[0] if isinstance(found, LazyTensor) else found
        torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-11, atol=1e-11)
        for parameter, gradient in zip(d.model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-11, atol=1e-11)
