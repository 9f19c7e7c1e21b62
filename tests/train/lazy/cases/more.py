"""Loops beyond the first hundred: values used several ways, before and after backward, by real and by lazy code."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.train.lazy.cases.env import case


@case
def two_losses_retained(e):
    o = e.M(e.x)
    a, b = F.cross_entropy(o, e.y), o.pow(2).mean()
    a.backward(retain_graph=True)
    b.backward()
    return a.item(), b.item()


@case
def two_losses_unretained_error(e):
    o = e.M(e.x)
    a, b = F.cross_entropy(o, e.y), o.pow(2).mean()
    a.backward()
    try:
        b.backward()
    except RuntimeError as error:
        return float("second time" in str(error))
    return -1.0


@case
def scaled_after_reading(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    value = loss.item()
    scaled = loss / 4 + loss.detach() * 0.5
    scaled.backward()
    return value, scaled.item()


@case
def reused_after_retained_backward(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.backward(retain_graph=True)
    (loss * 2 + 1).backward()
    return loss.item()


@case
def read_then_written_into_buffer(e):
    o = e.M(e.x)
    a = F.cross_entropy(o, e.y)
    value = a.item()
    b = torch.zeros(2)
    b[0], b[1] = a, o.abs().mean()
    b.sum().backward()
    return value, b


@case
def buffer_then_lazy_again(e):
    b = torch.zeros(2)
    b[0] = F.cross_entropy(e.M(e.x), e.y)
    loss = b.sum() + F.mse_loss(e.M(e.x * 2), e.x[:, :8])
    loss.backward()
    return loss.item()


@case
def retain_grad_after_reading(e):
    o = e.M(e.x)
    o.sum().item()
    o.retain_grad()
    F.cross_entropy(o, e.y).backward()
    return o.grad


@case
def gradients_of_everything(e):
    x = e.x.clone().requires_grad_()
    w = nn.Parameter(torch.linspace(0.5, 1.5, 8))
    o = e.M(x)
    loss = F.cross_entropy(o * w, e.y)
    return torch.autograd.grad(loss, [e.m[0].weight, x, w, e.m[4].bias])


@case
def gradients_of_everything_and_logits(e):
    x = e.x.clone().requires_grad_()
    w = nn.Parameter(torch.linspace(0.5, 1.5, 8))
    o = e.M(x)
    loss = F.cross_entropy(o * w, e.y)
    return torch.autograd.grad(loss, [e.m[0].weight, x, w, o, e.m[4].bias])


@case
def gradients_after_reading(e):
    x = e.x.clone().requires_grad_()
    loss = F.cross_entropy(e.M(x), e.y)
    value = loss.item()
    return value, *torch.autograd.grad(loss, [x, e.m[2].weight])


@case
def gradients_materialized(e):
    other = nn.Parameter(torch.ones(3))
    return torch.autograd.grad(F.cross_entropy(e.M(e.x), e.y), [other, e.m[4].bias], materialize_grads=True)


@case
def model_fed_by_model(e):
    torch.manual_seed(4)
    second = e.made(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    loss = F.cross_entropy(e.wrap(second)(e.M(e.x).relu()), e.y)
    loss.backward()
    return loss.item()


@case
def model_fed_by_model_read_first(e):
    torch.manual_seed(4)
    second = e.made(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    hidden = e.M(e.x)
    loss = F.cross_entropy(e.wrap(second)(hidden.relu()), e.y) + hidden.relu().mean()
    value = loss.item()
    loss.backward(retain_graph=True)
    loss.backward()
    return value


@case
def model_fed_by_itself_twice(e):
    o = e.M(e.x)
    o = e.M(torch.cat([o, o], 1).tanh())
    o = e.M(torch.cat([o, o * 2], 1).tanh())
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    return loss.item()


@case
def model_fed_with_outer_weights_between(e):
    torch.manual_seed(4)
    mix, second = e.made(nn.Linear(8, 8)), e.made(nn.Linear(8, 8))
    loss = F.cross_entropy(e.wrap(second)(mix(e.M(e.x))) + mix(e.x[:, :8]), e.y)
    loss.backward()
    return loss.item()


@case
def target_network(e):
    with torch.no_grad():
        target = e.M(e.x + 1)
    loss = F.smooth_l1_loss(e.M(e.x), 0.9 * target + e.x[:, :8])
    loss.backward()
    return loss.item(), target


@case
def split_backward(e):
    o = e.M(e.x)
    h = o.detach().requires_grad_()
    loss = F.cross_entropy(h * 2, e.y)
    loss.backward()
    o.backward(h.grad)
    return loss.item(), h.grad


@case
def split_backward_through_lazy_leaf(e):
    o = e.M(e.x)
    h = o.detach()
    h.requires_grad_()
    loss = F.cross_entropy(h * 2, e.y)
    loss.backward()
    o.backward(gradient=h.grad)
    return loss.item()


@case
def dropout_in_the_loss(e):
    torch.manual_seed(8)
    loss = F.cross_entropy(F.dropout(e.M(e.x), 0.5), e.y)
    loss.backward()
    return loss.item(), torch.rand(3)  # what is drawn afterwards is the same everywhere


@case
def dropout_after_reading(e):
    o = e.M(e.x)
    o.sum().item()
    torch.manual_seed(8)
    loss = F.cross_entropy(F.dropout(o, 0.5), e.y)
    loss.backward()
    return loss.item(), torch.rand(3)


@case
def batch_norm_in_the_loss(e):
    norm = e.made(nn.BatchNorm1d(8))
    loss = F.cross_entropy(norm(e.M(e.x)), e.y)
    loss.backward()
    return loss.item(), norm.running_mean, norm.running_var


@case
def gumbel(e):
    torch.manual_seed(8)
    loss = (F.gumbel_softmax(e.M(e.x), tau=0.7) * e.x[:, :8]).sum()
    loss.backward()
    return loss.item()


@case
def sampled_actions(e):
    torch.manual_seed(8)
    d = torch.distributions.Categorical(logits=e.M(e.x), validate_args=False)
    actions = d.sample()
    loss = -(d.log_prob(actions) * e.x[:, 0]).mean()
    loss.backward()
    return actions, loss.item(), torch.rand(2)


@case
def weights_from_the_outputs(e):
    o = e.M(e.x)
    w = (o.detach().max(1).values > 0.1).double()
    loss = (w * F.cross_entropy(o, e.y, reduction="none")).sum() / w.sum().clamp(min=1)
    loss.backward()
    return loss.item()


@case
def rows_one_by_one(e):
    o = e.M(e.x)
    loss = torch.stack([F.cross_entropy(o[i : i + 1], e.y[i : i + 1]) for i in range(len(e.y))]).mean()
    loss.backward()
    return loss.item()


@case
def rows_by_iteration(e):
    loss = sum(row.pow(2).sum() * (i + 1) for i, row in enumerate(e.M(e.x)))
    loss.backward()
    return loss.item()


@case
def clamped_and_masked_in_place(e):
    o = e.M(e.x)
    o.clamp_(min=-0.2)
    o += 0.1
    o[e.y == 3] = 0.5
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    return loss.item(), o.sum()


@case
def changed_in_place_after_reading(e):
    o = e.M(e.x)
    before = o.sum().item()
    o.mul_(2.0)
    o[:, 0] = 0.0
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    return before, loss.item(), o


@case
def view_changed_after_reading(e):
    o = e.M(e.x)
    o.sum().item()
    v = o[:, :4]
    v.mul_(2.0)
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    return loss.item(), o.sum(), v.sum()


@case
def outputs_in_halves(e):
    a, b = e.M(e.x).chunk(2, dim=1)
    mean, log_variance = a, b.clamp(-2, 2)
    loss = 0.5 * ((e.x[:, :4] - mean).pow(2) / log_variance.exp() + log_variance).sum(1).mean()
    loss.backward()
    return loss.item()


@case
def checkpointed_loss_reentrant(e):
    loss = checkpoint(lambda o: F.cross_entropy(o, e.y), e.M(e.x), use_reentrant=True)
    loss.backward()
    return loss.item()


@case
def python_questions(e):
    o = e.M(e.x)
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    first = list(range(10))[o.argmax(1)[0]]
    return (
        first,
        float(loss),
        int(loss * 100),
        max(loss, loss / 2).item(),
        loss == loss,
        bool(loss != loss),
        [0.0] if not loss else [1.0],
    )


@case
def copies(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.backward()
    return (
        copy.deepcopy(loss.detach()).item(),
        copy.copy(loss).item(),
        loss.data.clone().item(),
        loss.detach().cpu().tolist(),
    )


@case
def loss_kept_over_steps(e):
    best = None
    for i in range(3):
        loss = F.cross_entropy(e.M(e.x + i), e.y)
        e.opt.zero_grad()
        loss.backward()
        e.opt.step()
        best = loss.detach() if best is None else torch.minimum(best, loss.detach())
    return best.item()


@case
def three_steps_of_adam(e):
    opt = torch.optim.AdamW(e.m.parameters(), lr=1e-2)
    losses = []
    for i in range(3):
        opt.zero_grad(set_to_none=i % 2 == 0)
        loss = F.cross_entropy(e.M(e.x + i), e.y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case
def evaluation_between_steps(e):
    found = []
    for i in range(2):
        F.cross_entropy(e.M(e.x), e.y).backward()
        e.opt.step()
        with torch.no_grad():
            out = e.M(e.x[: 5 + i])
            found += [F.cross_entropy(out, e.y[: 5 + i]).item(), (out.argmax(-1) == e.y[: 5 + i]).sum().item()]
    return found


@case
def evaluation_without_no_grad(e):
    found = [F.cross_entropy(e.M(e.x + i), e.y).item() for i in range(3)]
    F.cross_entropy(e.M(e.x), e.y).backward()
    return found


@case
def frozen_part(e):
    e.m[0].requires_grad_(False)
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.backward()
    return loss.item()


@case
def input_grad_accumulates(e):
    x = e.x.clone().requires_grad_()
    for _ in range(2):
        F.cross_entropy(e.M(x * 2), e.y).backward()
    return x.grad


@case
def input_grad_whole_batch(e):
    x = e.x.clone().requires_grad_()
    loss = F.cross_entropy(e.M(x.tanh()), e.y).sqrt() + x.mean()
    loss.backward()
    return x.grad, loss.item()


@case
def hooks_on_outer_leaf(e):
    seen = []
    w = nn.Parameter(torch.linspace(0.5, 1.5, 8))
    e.extra.append(w)
    w.register_hook(lambda g: seen.append(g.sum().item()))
    encoder = e.made(nn.Linear(16, 16))
    encoder.weight.register_hook(lambda g: g * 2)
    loss = F.cross_entropy(e.M(encoder(e.x)) * w, e.y) + encoder(e.x).mean()
    loss.backward()
    return loss.item(), seen


@case
def hook_on_the_loss(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.register_hook(lambda g: g * 3)
    loss.backward()
    return loss.item()


@case
def backward_inputs_of_outer(e):
    w = nn.Parameter(torch.linspace(0.5, 1.5, 8))
    e.extra.append(w)
    F.cross_entropy(e.M(e.x) * w, e.y).backward(inputs=[w, e.m[0].weight])
    return w.grad


@case
def several_roots_with_gradients(e):
    o = e.M(e.x)
    torch.autograd.backward([o, F.cross_entropy(o, e.y)], [torch.ones(len(e.x), 8) * 0.1, None])
    return o


@case
def lazy_gradient(e):
    o = e.M(e.x)
    o.backward(gradient=o.detach().tanh())
    return o


@case
def mixed_autocast_and_scaler(e):
    e.tolerance = 2e-2
    e.m.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(e.M(e.x.float()), e.y)
    scaler.scale(loss).backward()
    scaler.unscale_(e.opt)
    return loss.float().item()
