"""Losses that index, mask, reshape or change the outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.train.lazy.cases.env import case


class Router(nn.Module):
    """Returns its probabilities, or a balance loss of them: a value without a batch dim."""

    def __init__(self, opaque):
        super().__init__()
        self.gate, self.opaque = nn.Linear(16, 4), opaque

    def forward(self, h):
        p = self.gate(h).softmax(-1)
        return h * p.max(-1, keepdim=True).values, p.mean(0).pow(2).sum() if self.opaque else p


class Moe(nn.Module):
    def __init__(self, opaque):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(16, 16), Router(opaque), nn.Linear(16, 8)

    def forward(self, x):
        h, aux = self.router(self.first(x))
        return self.last(h), aux


@case
def loss_inplace(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss /= 4
    loss += 0.1 * e.M(e.x).abs().mean()
    loss.backward()
    return loss.item()


@case
def logits_inplace(e):
    o = e.M(e.x)
    o.div_(2.0)
    o[:, 0] = 0.0
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    return loss.item()


@case
def inplace_view(e):
    o = e.M(e.x)
    v = o[:, :4]
    v.mul_(2.0)
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    return loss.item()


@case
def arange_index(e):
    lp = F.log_softmax(e.M(e.x), -1)
    loss = -lp[torch.arange(len(e.y)), e.y].mean()
    loss.backward()
    return loss.item()


@case
def gather_index(e):
    lp = F.log_softmax(e.M(e.x), -1)
    loss = -lp.gather(1, e.y[:, None]).squeeze(1).mean()
    loss.backward()
    return loss.item()


@case
def slice_rows(e):
    n = len(e.x) // 2
    o = e.M(e.x)
    loss = F.cross_entropy(o[:n], e.y[:n]) + 0.3 * o[n:].pow(2).mean()
    loss.backward()
    return loss.item()


@case
def sequence_tokens(e):
    t = 5
    x = e.x.unsqueeze(1) * torch.linspace(0.5, 1.5, t)[:, None]
    y = (e.y[:, None] + torch.arange(t)) % 8
    y[0] = -100
    y[1, 2:] = -100
    o = e.M(x)
    loss = F.cross_entropy(o.view(-1, 8), y.view(-1), ignore_index=-100)
    loss.backward()
    return loss.item()


@case
def sequence_mask_mean(e):
    t = 5
    x = e.x.unsqueeze(1) * torch.linspace(0.5, 1.5, t)[:, None]
    y = (e.y[:, None] + torch.arange(t)) % 8
    k = y > 2
    o = e.M(x)
    nll = F.cross_entropy(o.transpose(1, 2), y, reduction="none")
    loss = (nll * k).sum() / k.sum()
    loss.backward()
    return loss.item()


@case
def sequence_mean_per_row(e):
    t = 5
    x = e.x.unsqueeze(1) * torch.linspace(0.5, 1.5, t)[:, None]
    y = (e.y[:, None] + torch.arange(t)) % 8
    k = y > 2
    o = e.M(x)
    nll = F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="none").view(len(e.x), t)
    loss = ((nll * k).sum(1) / k.sum(1).clamp(min=1)).mean()
    loss.backward()
    return loss.item()


@case
def mask_2d(e):
    t = 5
    x = e.x.unsqueeze(1) * torch.linspace(0.5, 1.5, t)[:, None]
    y = (e.y[:, None] + torch.arange(t)) % 8
    k = y > 4
    o = e.M(x)
    loss = F.cross_entropy(o[k], y[k])
    loss.backward()
    return loss.item()


@case
def lazy_mask(e):
    o = e.M(e.x)
    k = o.max(1).values > 0.1
    loss = F.cross_entropy(o[k], e.y[k])
    loss.backward()
    return loss.item()


@case
def roll_rows(e):
    o = e.M(e.x)
    loss = (o - o.roll(1, 0)).pow(2).mean() + (o.flip(1, 0) * o).mean()
    loss.backward()
    return loss.item()


@case
def std_positional(e):
    o = e.M(e.x)
    loss = (o.std(1, True) * o.var(1, False)).mean() + o.unsqueeze(0).std(0, False).mean()
    loss.backward()
    return loss.item()


@case
def integer_cast_of_total(e):
    o = e.M(e.x)
    loss = o.abs().sum() + o.detach().abs().sum().long()
    loss.backward()
    return loss.item()


@case
def empty_part(e):
    o = e.M(e.x)
    k = torch.zeros(len(e.x), dtype=torch.bool)
    k[:2] = True
    loss = F.cross_entropy(o[k], e.y[k])
    loss.backward()
    return loss.item()


@case
def detach_inplace(e):
    o = e.M(e.x)
    d = o.detach()
    d.mul_(2.0)
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    return loss.item()


@case
def aux_glue(e):
    torch.manual_seed(2)
    o, probs = e.wrap(e.made(Moe(opaque=False)))(e.x)
    loss = F.cross_entropy(o, e.y) + 0.1 * probs.mean(0).pow(2).sum()
    loss.backward()
    return loss.item()


@case
def aux_inside_stage(e):
    torch.manual_seed(2)
    net = e.made(Moe(opaque=True))
    o, aux = e.wrap(net)(e.x)
    if type(aux) is torch.Tensor:  # plainly: what a stage computes inside itself, it computes per micro batch
        aux = sum(net(part)[1] * len(part) for part in e.x.tensor_split(e.micro_batches)) / len(e.x)
    loss = F.cross_entropy(o, e.y) + 0.1 * aux
    loss.backward()
    return loss.item()
