"""Losses, and what people put before and beside the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.train.lazy.cases.env import case


@case
def smoothing_weights(e):
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.linspace(0.5, 1.5, 8))(e.M(e.x), e.y)
    loss.backward()
    return loss.item()


@case
def contrastive(e):
    o = e.M(e.x)
    loss = F.cross_entropy(o @ o.t(), torch.arange(len(e.x)))
    loss.backward()
    return loss.item()


@case
def ignore_index(e):
    y = e.y.clone()
    y[:3] = -100
    loss = F.cross_entropy(e.M(e.x), y, ignore_index=-100)
    loss.backward()
    return loss.item()


@case
def boolean_mask(e):
    o = e.M(e.x)
    k = e.y > 2
    loss = F.cross_entropy(o[k], e.y[k])
    loss.backward()
    return loss.item()


@case
def loss_module_parameter(e):
    torch.manual_seed(5)
    head = e.made(nn.Linear(8, 5))
    loss = F.cross_entropy(head(e.M(e.x)), e.y % 5)
    loss.backward()
    return loss.item()


@case
def center_loss(e):
    torch.manual_seed(5)
    centers = e.made(nn.Embedding(8, 8))
    o = e.M(e.x)
    loss = F.cross_entropy(o, e.y) + 0.1 * (o - centers(e.y)).pow(2).sum(1).mean() / 2
    loss.backward()
    return loss.item()


@case
def mixup(e):
    lam, perm = 0.3, torch.arange(len(e.x)).flip(0)
    o = e.M(lam * e.x + (1 - lam) * e.x[perm])
    loss = lam * F.cross_entropy(o, e.y) + (1 - lam) * F.cross_entropy(o, e.y[perm])
    loss.backward()
    return loss.item()


@case
def sample_weights(e):
    w = torch.rand(len(e.x))
    loss = (F.cross_entropy(e.M(e.x), e.y, reduction="none") * w).sum() / w.sum()
    loss.backward()
    return loss.item()


@case
def focal(e):
    ce = F.cross_entropy(e.M(e.x), e.y, reduction="none")
    pt = torch.exp(-ce)
    loss = (0.25 * (1 - pt) ** 2 * ce).mean()
    loss.backward()
    return loss.item()


@case
def dice(e):
    p, t = e.M(e.x).sigmoid(), F.one_hot(e.y, 8).double()
    loss = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
    loss.backward()
    return loss.item()


@case
def dice_per_sample(e):
    p, t = e.M(e.x).sigmoid(), F.one_hot(e.y, 8).double()
    loss = (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()
    loss.backward()
    return loss.item()


@case
def bce_pos_weight(e):
    loss = F.binary_cross_entropy_with_logits(e.M(e.x), F.one_hot(e.y, 8).double(), pos_weight=torch.linspace(1, 2, 8))
    loss.backward()
    return loss.item()


@case
def kl_distillation(e):
    torch.manual_seed(7)
    teacher = nn.Linear(16, 8)
    with torch.no_grad():
        t = teacher(e.x)
    loss = F.kl_div(F.log_softmax(e.M(e.x) / 2, -1), F.softmax(t / 2, -1), reduction="batchmean") * 4
    loss.backward()
    return loss.item()


@case
def kl_teacher_piped(e):
    torch.manual_seed(7)
    teacher = nn.Sequential(nn.Linear(16, 8), nn.Tanh()).requires_grad_(False)
    T = e.wrap(teacher)
    loss = F.kl_div(F.log_softmax(e.M(e.x) / 2, -1), F.softmax(T(e.x) / 2, -1), reduction="batchmean") * 4
    loss.backward()
    return loss.item()


@case
def ctc(e):
    n = len(e.x)
    lp = e.M(e.x.unsqueeze(1).repeat(1, 12, 1) * torch.linspace(0.1, 2, 12)[:, None]).log_softmax(-1).transpose(0, 1)
    tl = torch.arange(n) % 4 + 1
    t = torch.arange(n * 4).view(n, 4) % 7 + 1
    loss = F.ctc_loss(lp, t, torch.full((n,), 12), tl)
    loss.backward()
    return loss.item()


@case
def triplet_by_index(e):
    o = e.M(e.x)
    n = len(e.x)
    a, p, q = torch.arange(n), torch.arange(n).roll(1), torch.arange(n).roll(3)
    loss = F.triplet_margin_loss(o[a], o[p], o[q])
    loss.backward()
    return loss.item()


@case
def perplexity_as_loss(e):
    loss = torch.exp(F.cross_entropy(e.M(e.x), e.y))
    loss.backward()
    return loss.item()


@case
def root_mse(e):
    loss = F.mse_loss(e.M(e.x), e.x[:, :8]).sqrt()
    loss.backward()
    return loss.item()


@case
def r_drop(e):
    a, b = e.M(e.x), e.M(e.x * 1.1)
    kl = 0.5 * (
        F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="none").sum(-1).mean()
        + F.kl_div(b.log_softmax(-1), a.softmax(-1), reduction="none").sum(-1).mean()
    )
    loss = 0.5 * (F.cross_entropy(a, e.y) + F.cross_entropy(b, e.y)) + kl
    loss.backward()
    return loss.item()


@case
def hard_examples(e):
    ce = F.cross_entropy(e.M(e.x), e.y, reduction="none")
    loss = ce.topk(3).values.mean()
    loss.backward()
    return loss.item()


@case
def max_over_batch(e):
    loss = F.cross_entropy(e.M(e.x), e.y, reduction="none").max()
    loss.backward()
    return loss.item()


@case
def batch_std(e):
    o = e.M(e.x)
    loss = F.cross_entropy(o, e.y) - 0.1 * o.std(0).mean()
    loss.backward()
    return loss.item()


@case
def covariance(e):
    o = e.M(e.x)
    o = o - o.mean(0)
    c = o.T @ o / (len(e.x) - 1)
    loss = c.pow(2).sum()
    loss.backward()
    return loss.item()


@case
def pseudo_labels(e):
    o = e.M(e.x)
    with torch.no_grad():
        t = o.argmax(1)
    loss = F.cross_entropy(o, t)
    loss.backward()
    return loss.item()


@case
def soft_targets(e):
    o = e.M(e.x)
    t = e.M(e.x * 0.9).detach().softmax(-1)
    loss = F.cross_entropy(o, t)
    loss.backward()
    return loss.item()


@case
def entropy_bonus(e):
    o = e.M(e.x)
    d = torch.distributions.Categorical(logits=o, validate_args=False)
    adv = torch.linspace(-1, 1, len(e.x))
    loss = -(d.log_prob(e.y) * adv).mean() - 0.01 * d.entropy().mean()
    loss.backward()
    return loss.item()


@case
def entropy_bonus_validated(e):
    o = e.M(e.x)
    d = torch.distributions.Categorical(logits=o)
    loss = -d.log_prob(e.y).mean() - 0.01 * d.entropy().mean()
    loss.backward()
    return loss.item()


@case
def uncertainty_weights(e):
    s = nn.Parameter(torch.tensor([0.1, 0.2]))
    e.extra.append(s)
    o = e.M(e.x)
    parts = torch.stack([F.cross_entropy(o, e.y), F.mse_loss(o, e.x[:, :8])])
    loss = (torch.exp(-s) * parts + s).sum()
    loss.backward()
    return loss.item()


@case
def conv_segmentation(e):
    torch.manual_seed(1)
    net = e.made(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1)))
    N = e.wrap(net)
    n = len(e.x)
    x = torch.linspace(-1, 1, n * 3 * 36).view(n, 3, 6, 6).sin()
    y = torch.arange(n * 36).view(n, 6, 6) % 4
    y[0, :3] = 255
    loss = F.cross_entropy(N(x), y, ignore_index=255)
    loss.backward()
    return loss.item()


@case
def weighted_mse(e):
    w = torch.rand(len(e.x), 8) + 0.1
    loss = (
        F.mse_loss(e.M(e.x), e.x[:, :8], weight=w)
        + F.l1_loss(e.M(e.x), e.x[:, :8], weight=w)
        + F.huber_loss(e.M(e.x), e.x[:, :8], weight=w)
    )
    loss.backward()
    return loss.item()


@case
def batch_norm_eval_loss(e):
    torch.manual_seed(1)
    net = e.made(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))).eval()
    loss = F.cross_entropy(e.wrap(net)(e.x), e.y)
    loss.backward()
    return loss.item()


@case
def gan(e):
    torch.manual_seed(11)
    d = e.made(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    D = e.wrap(d)
    one = torch.ones(len(e.x), 1)
    fake = e.M(e.x)
    ld = F.binary_cross_entropy_with_logits(D(fake.detach()), one * 0) + F.binary_cross_entropy_with_logits(
        D(e.x[:, :8]), one
    )
    ld.backward()
    lg = F.binary_cross_entropy_with_logits(D(fake), one)
    lg.backward()
    return ld.item(), lg.item()


@case
def encoder_before(e):
    torch.manual_seed(9)
    enc = e.made(nn.Linear(16, 16))
    loss = F.cross_entropy(e.M(enc(e.x).tanh()), e.y)
    loss.backward()
    return loss.item()


@case
def input_gradient(e):
    x = e.x.clone().requires_grad_()
    loss = F.cross_entropy(e.M(x), e.y)
    (g,) = torch.autograd.grad(loss, x)
    return g  # saliency, FGSM


@case
def input_grad_attribute(e):
    x = e.x.clone().requires_grad_()
    loss = F.cross_entropy(e.M(x), e.y)
    loss.backward()
    return x.grad
