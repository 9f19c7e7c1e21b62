"""Training loops: reading, logging, accumulating, scaling, asking for gradients."""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F

from tests.train.lazy.cases.env import case


@case
def metric_after(e):
    o = e.M(e.x)
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    return (o.argmax(-1) == e.y).float().mean().item()


@case
def metric_before_without_grad(e):
    """Outputs that were computed without grad mode led to no gradient afterwards, and the model trained on zeros."""
    o = e.M(e.x)
    loss = F.cross_entropy(o, e.y)
    with torch.no_grad():
        hits = (o.argmax(1) == e.y).double().mean().item()
    loss.backward()
    return loss.item(), hits


@case
def metric_before_in_inference_mode(e):
    o = e.M(e.x)
    with torch.inference_mode():
        hits = (o.argmax(1) == e.y).double().mean().item()
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    return loss.item(), hits


@case
def metric_before(e):
    o = e.M(e.x)
    a = (o.argmax(-1) == e.y).float().mean().item()
    F.cross_entropy(o, e.y).backward()
    return a


@case
def loss_over_4(e):
    loss = F.cross_entropy(e.M(e.x), e.y) / 4
    loss.backward()
    return loss.item()


@case
def no_grad(e):
    with torch.no_grad():
        return F.cross_entropy(e.M(e.x), e.y).item()


@case
def inference_mode(e):
    with torch.inference_mode():
        o = e.M(e.x)
        return F.cross_entropy(o, e.y).item(), (o.argmax(1) == e.y).sum().item()


@case
def grad_scaler(e):
    sc = torch.amp.GradScaler("cpu", init_scale=128.0)
    loss = F.cross_entropy(e.M(e.x), e.y)
    sc.scale(loss).backward()
    sc.unscale_(e.opt)
    sc.step(e.opt)
    sc.update()
    return loss.item()


@case
def clip(e):
    F.cross_entropy(e.M(e.x), e.y).backward()
    return torch.nn.utils.clip_grad_norm_(e.m.parameters(), 1e-2).item()


@case
def l2_term(e):
    loss = F.cross_entropy(e.M(e.x), e.y) + 1e-2 * sum(p.pow(2).sum() for p in e.m.parameters())
    loss.backward()
    return loss.item()


def penalty(parameters):
    return 1e-2 * sum(p.pow(2).sum() for p in parameters)


@case
def l2_in_evaluation(e):
    """Also over one layer alone, of which one rank has everything and another nothing."""
    found = []
    with torch.no_grad():
        for part in (e.m, e.m[0], e.m[4]):
            found.append((F.cross_entropy(e.M(e.x), e.y) + penalty(part.parameters())).item())
    with torch.inference_mode():
        loss = F.cross_entropy(e.M(e.x), e.y)
        found += [loss.item(), (loss + penalty(e.m.parameters())).item()]
    return found


@case
def l2_alone(e):
    """Read by itself, with and without gradients, before it is used; and as it was, after the step."""
    found = []
    for _ in range(2):
        e.opt.zero_grad()
        out = e.M(e.x)
        reg = penalty(e.m.parameters())
        found.append(reg.item())
        loss = F.cross_entropy(out, e.y)
        total = loss + reg
        doubled = loss.detach() + 2 * reg.detach()
        total.backward()
        e.opt.step()
        found += [loss.item(), total.item(), doubled.item(), reg.item(), float(reg.detach()) * 2]
        with torch.no_grad():
            found.append(penalty(e.m.parameters()).item())
    return found


@case
def l2_of_a_layer_after_a_read(e):
    """The rank that has the layer has computed its loss before backward; home has not."""
    out = e.M(e.x)
    found = [out.sum().item()]
    loss = F.cross_entropy(out, e.y) + penalty(e.m[0].parameters())
    loss.backward()
    return [*found, loss.item()]


@case
def l2_backward_by_itself(e):
    F.cross_entropy(e.M(e.x), e.y).backward()
    penalty(e.m.parameters()).backward()
    penalty(e.m[2].parameters()).backward()
    return ()


@case
def l2_with_a_learned_weight(e):
    weight = torch.tensor(0.3, requires_grad=True)
    out = e.M(e.x)
    reg = weight * penalty(e.m.parameters())
    loss = F.cross_entropy(out, e.y) + reg
    found = [loss.item()]
    loss.backward()
    return [*found, reg.item(), weight.grad.item()]


@case
def autograd_grad(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    g = torch.autograd.grad(loss, [e.m[0].weight])
    return g[0]


@case
def backward_twice(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.item()


@case
def autocast(e):
    e.tolerance = 2e-2
    e.m.float()
    x = e.x.float()
    with torch.backends.mkldnn.flags(enabled=False):
        with torch.autocast("cpu", torch.bfloat16):
            o = e.M(x)
            loss = F.cross_entropy(o.float(), e.y)
        assert (o.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        loss.backward()
        return loss.item()


@case
def f_string(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.backward()
    return float(f"{loss:.4f}")


@case
def item_first(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    v = loss.item()
    loss.backward()
    return v


@case
def numpy(e):
    o = e.M(e.x)
    F.cross_entropy(o, e.y).backward()
    return float(o.detach().cpu().numpy().sum())


@case
def isnan(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    if torch.isnan(loss):
        return -1
    if loss > 100:
        return -2
    loss.backward()
    return loss.item()


@case
def running_total(e):
    tot = torch.zeros(())
    for _ in range(2):
        loss = F.cross_entropy(e.M(e.x), e.y)
        loss.backward()
        tot = tot + loss.detach()
    return tot.item()


@case
def running_total_inplace(e):
    tot = torch.zeros(())
    for _ in range(2):
        loss = F.cross_entropy(e.M(e.x), e.y)
        loss.backward()
        tot += loss.detach()
    return tot.item()


@case
def two_calls(e):
    loss = F.mse_loss(e.M(e.x), e.M(e.x * 2))
    loss.backward()
    return loss.item()


@case
def reduction_sum(e):
    loss = F.cross_entropy(e.M(e.x), e.y, reduction="sum")
    loss.backward()
    return loss.item()


@case
def dict_of_losses(e):
    o = e.M(e.x)
    parts = {"a": F.cross_entropy(o, e.y), "b": o.pow(2).mean()}
    loss = sum(parts.values())
    loss.backward()
    return parts["a"].item(), parts["b"].item()


@case
def lbfgs(e):
    opt = torch.optim.LBFGS(e.m.parameters(), max_iter=3)

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(e.M(e.x), e.y)
        loss.backward()
        return loss

    return float(opt.step(closure))


@case
def manual_accumulation(e):
    for i in range(3):
        (F.cross_entropy(e.M(e.x + i), e.y) / 3).backward()
    e.opt.step()
    return 0.0


@case
def train_in_eval_mode(e):
    e.m.eval()
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.backward()
    return loss.item()


@case
def perplexity_logged(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    ppl = torch.exp(loss)
    loss.backward()
    return ppl.item()


@case
def losses_appended(e):
    losses = []
    for i in range(3):
        loss = F.cross_entropy(e.M(e.x + i), e.y)
        loss.backward()
        e.opt.step()
        e.opt.zero_grad()
        losses.append(loss)
    return torch.stack(losses).mean().item()


@case
def losses_appended_detached(e):
    losses = []
    for i in range(3):
        loss = F.cross_entropy(e.M(e.x + i), e.y)
        losses.append(loss.detach())
        loss.backward()
        e.opt.step()
        e.opt.zero_grad()
    return torch.tensor(losses).mean().item()


@case
def torch_save(e):
    o = e.M(e.x)
    F.cross_entropy(o, e.y).backward()
    f = io.BytesIO()
    torch.save(o.detach(), f)
    f.seek(0)
    return torch.load(f)


@case
def save_with_grad(e):
    o = e.M(e.x)
    f = io.BytesIO()
    torch.save({"o": o}, f)
    f.seek(0)
    F.cross_entropy(o, e.y).backward()
    return torch.load(f)["o"]


@case
def autograd_backward_fn(e):
    a, b = e.M(e.x), F.mse_loss(e.M(e.x), e.x[:, :8])
    torch.autograd.backward([F.cross_entropy(a, e.y), b])
    return b.item()


@case
def backward_with_gradient(e):
    o = e.M(e.x)
    o.backward(torch.ones_like(o) * 0.5)
    return o


@case
def unused_then_step(e):
    o = e.M(e.x)
    loss = F.cross_entropy(o, e.y)
    loss.backward()
    e.opt.step()
    return o.sum().item(), loss.item()


@case
def dropout_eval_metrics(e):
    o = e.M(e.x)
    loss = F.cross_entropy(o, e.y)
    with torch.no_grad():
        top = o.topk(3, dim=1).indices.eq(e.y[:, None]).any(1).sum()
    loss.backward()
    return top.item(), loss.item()


@case
def list_of_items(e):
    o = e.M(e.x)
    F.cross_entropy(o, e.y).backward()
    return [float(v) for v in o[0]] + o[1].tolist()


@case
def batch_of_3(e):
    loss = F.cross_entropy(e.M(e.x[:3]), e.y[:3])
    loss.backward()
    return loss.item()


@case
def two_batch_sizes(e):
    loss = F.cross_entropy(e.M(e.x), e.y) + 0.5 * e.M(e.x[:6] * 2).pow(2).mean()
    loss.backward()
    return loss.item()


@case
def ema_center(e):
    center = torch.zeros(8)
    for i in range(3):
        o = e.M(e.x + i)
        loss = F.cross_entropy(o - center, e.y)
        center = center * 0.9 + o.detach().mean(0) * 0.1
        loss.backward()
    return center


@case
def sum_of_step_losses(e):
    loss = sum(F.cross_entropy(e.M(e.x + i), e.y) for i in range(3))
    loss.backward()
    return loss.item()


@case
def autograd_grad_whole(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    v = loss.item()
    g = torch.autograd.grad(loss, [e.m[0].weight, e.m[4].bias])
    return v, *g


@case
def backward_inputs(e):
    loss = F.cross_entropy(e.M(e.x), e.y)
    loss.backward(inputs=[e.m[4].weight])
    return loss.item()


@case
def grad_wrt_logits(e):
    o = e.M(e.x)
    loss = F.cross_entropy(o, e.y)
    (g,) = torch.autograd.grad(loss, o)
    return g


@case
def metric_then_target_changed(e):
    y = e.y.clone()
    o = e.M(e.x)
    k = (o.argmax(1) == y).sum()
    F.cross_entropy(o, e.y).backward()
    y.zero_()
    return k.item()
