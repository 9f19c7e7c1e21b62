"""Hooks, functions of one's own, compiled and checkpointed code, mistakes."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from tests.train.lazy.cases.env import case


class OwnLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return F.cross_entropy(x, y)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return 5 * g * (x.softmax(-1) - F.one_hot(y, x.shape[-1])) / len(y), None  # 5: only this backward gives it


own_loss = OwnLoss.apply


def step_at_once(optimizer, parameter):
    optimizer.step()
    optimizer.zero_grad()


def scripted():
    """TorchScript warns that it is old; it is compiled when it is used."""
    return torch.jit.script(_difference)


def _difference(a, b):
    return (a - b).pow(2).mean()


@case
def custom_function(e):
    loss = OwnLoss.apply(e.M(e.x), e.y)
    loss.backward()
    return loss.item()


@case
def custom_function_bound_early(e):
    loss = own_loss(e.M(e.x), e.y)
    loss.backward()
    return loss.item()


@case
def gradient_penalty(e):
    x = e.x.clone().requires_grad_()
    o = e.M(x)
    (g,) = torch.autograd.grad(o.sum(), x, create_graph=True)
    loss = F.cross_entropy(o, e.y) + (g.norm(2, dim=1) - 1).pow(2).mean()
    loss.backward()
    return loss.item()


@case
def vmap(e):
    o = e.M(e.x)
    loss = torch.vmap(lambda r, t: -r.log_softmax(-1) @ t)(o, F.one_hot(e.y, 8).double()).mean()
    loss.backward()
    return loss.item()


@case
def tensor_hook(e):
    got = []
    o = e.M(e.x)
    o.register_hook(lambda g: got.append(g.norm().item()))
    F.cross_entropy(o, e.y).backward()
    return got


@case
def retain_grad(e):
    o = e.M(e.x)
    o.retain_grad()
    F.cross_entropy(o, e.y).backward()
    return o.grad


@case
def two_backwards_error(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        return float("second time" in str(error))
    return -1.0


@case
def read_after_step_only(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    with torch.no_grad():
        e.m[0].weight.mul_(2.0)
    return loss.item()


@case
def target_changed_in_place(e):
    w = torch.ones(len(e.x))
    loss = (F.cross_entropy(e.M(e.x), e.y, reduction="none") + w).mean()
    w.zero_()
    loss.backward()
    return loss.item()


@case
def jit_loss(e):
    loss = scripted()(e.M(e.x), e.x[:, :8])
    loss.backward()
    return loss.item()


@case
def checkpointed_loss(e):
    from torch.utils.checkpoint import checkpoint

    loss = checkpoint(lambda o: F.cross_entropy(o, e.y), e.M(e.x), use_reentrant=False)
    loss.backward()
    return loss.item()


@case
def parameter_hook(e):
    e.m[0].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.backward()
    return loss.item()


@case
def parameter_hook_whole(e):
    e.m[0].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    loss = F.cross_entropy(e.M(e.x), e.y).exp()
    loss.backward()
    return loss.item()


@case
def optimizer_in_backward(e):
    for p in e.m.parameters():
        p.register_post_accumulate_grad_hook(functools.partial(step_at_once, torch.optim.SGD([p], 0.1)))
    for _ in range(2):
        loss = F.cross_entropy(e.M(e.x), e.y)
        loss.backward()
    return loss.item()


@case
def written_into_buffer(e):
    b = torch.zeros(2)
    b[0] = F.cross_entropy(e.M(e.x), e.y)
    b[1] = e.M(e.x).abs().mean()
    b.sum().backward()
    return b


@case
def input_changed_in_place(e):
    x = e.x.clone()
    loss = F.cross_entropy(e.M(x), e.y)
    x.zero_()
    return loss.item()


@case
def bad_target(e):
    y = e.y.clone()
    y[0] = 99
    try:
        F.cross_entropy(e.M(e.x), y).backward()
    except IndexError:
        return 1.0
    return 0.0


@case
def bad_shape(e):
    try:
        F.mse_loss(e.M(e.x), torch.zeros(len(e.x), 7))
    except RuntimeError:
        return 1.0
    return 0.0


@case
def compiled_loss(e):
    loss = torch.compile(lambda o, y: F.cross_entropy(o, y) * 2, backend="eager")(e.M(e.x), e.y)
    loss.backward()
    return loss.item()
