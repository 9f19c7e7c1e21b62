"""Loops that need a whole job: optimizers, schedulers, several models, numbers over all ranks. Each runs plainly and on ranks.

A snippet gets a `Script`, which is all that differs between the two runs, and returns the numbers that its user would look at;
`Script.made` names the modules whose weights and gradients are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

import epl
from tests.train.lazy.cases.env import Env

Snippet = Callable[["Script"], Any]
SNIPPETS: dict[str, Snippet] = {}
_models = 0


def snippet(fn: Snippet) -> Snippet:
    """Register a loop."""
    SNIPPETS[fn.__name__] = fn
    return fn


class Script(Env):
    """One device, or one of the ranks that compute a model in stages; `ready` stands for epl's lines in a script."""

    def __init__(self, rows: int, micro_batches: int, stages: int = 0, seed: int = 3, split: int = 1) -> None:
        """`split`: over how many ranks the parameters of the last stage are cut."""
        self.stages, self.split = stages, split
        super().__init__(rows, self.ready, micro_batches, seed)

    @property
    def is_plain(self) -> bool:
        return self.stages == 0

    def ready(self, model: nn.Module, *others: Any) -> Any:
        """Annotate the model's parts, in order, and parallelize it."""
        global _models
        if self.is_plain:
            return (model, *others) if others else model
        if not list(model.children()):
            model = nn.Sequential(model)
        parts = list(model.children())
        count = min(self.stages, len(parts))
        _models += 1
        if count == 1 and self.split > 1:
            epl.annotate(epl.split(self.split), model)
            return epl.parallelize(model, *others)
        for stage in range(count):
            own = [part for n, part in enumerate(parts) if n * count // len(parts) == stage]
            ways = self.split if stage == count - 1 else 1
            strategy = epl.split if ways > 1 else epl.replicate
            epl.annotate(strategy(ways, name=f"model_{_models}_stage_{stage}"), *own)
        return epl.parallelize(model, *others)

    def again(self, *others: Any) -> None:
        """Give more to `epl.parallelize`."""
        if not self.is_plain:
            epl.parallelize(self.m, *others)

    def batches(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Unlike ones."""
        return [(self.x + n, (self.y + n) % 8) for n in range(count)]


# ---- optimizers and schedulers ---------------------------------------------------------------------------------------


@snippet
def the_plain_loop(s):
    s.again(s.opt)
    losses = []
    for x, y in s.batches(3):
        s.opt.zero_grad()
        loss = F.cross_entropy(s.M(x), y)
        loss.backward()
        s.opt.step()
        losses.append(loss.item())
    return losses


@snippet
def a_note_on_one_rank(s):
    """Where the model has a new attribute it is recorded again. What that rank knew of messages was lost there alone: Gloo aborted."""
    losses = []
    for number, (x, y) in enumerate(s.batches(3)):
        if not s.is_plain and epl.Env.get().cluster.rank == number % 2:
            s.m.seen = number
        with torch.no_grad():
            losses.append(s.M(x).sum().item())
        loss = F.cross_entropy(s.M(x), y)
        loss.backward()
        losses.append(loss.item())
    return losses


@snippet
def two_optimizers_and_schedulers(s):
    first = torch.optim.AdamW(s.m[:2].parameters(), 0.05)
    second = torch.optim.SGD(s.m[2:].parameters(), 0.1, momentum=0.9)
    before = ExponentialLR(first, 0.5)
    s.again(first, second)
    after, plateau = StepLR(second, 2, 0.1), ReduceLROnPlateau(first, patience=0)
    losses = []
    for x, y in s.batches(4):
        first.zero_grad()
        second.zero_grad()
        loss = F.cross_entropy(s.M(x), y)
        loss.backward()
        first.step()
        second.step()
        before.step()
        after.step()
        plateau.step(loss)
        losses.append(loss.detach())
    return torch.stack(losses), first.param_groups[0]["lr"], second.param_groups[0]["lr"]


@snippet
def a_parameter_group_added_later(s):
    optimizer = torch.optim.Adam(s.m[4].parameters(), 0.05)
    s.again(optimizer)
    for step, (x, y) in enumerate(s.batches(4)):
        if step == 2:
            optimizer.add_param_group({"params": s.m[0].parameters(), "lr": 0.01})
        s.m.zero_grad()
        F.cross_entropy(s.M(x), y).backward()
        optimizer.step()
    return 0.0


@snippet
def parts_frozen_and_thawed(s):
    s.again(s.opt)
    numbers = []
    for step, (x, y) in enumerate(s.batches(4)):
        s.m[0].requires_grad_(step % 2 == 0)
        s.m[4].weight.requires_grad_(step != 2)
        s.opt.zero_grad()
        loss = F.cross_entropy(s.M(x), y)
        loss.backward()
        s.opt.step()
        numbers.append(loss.item())
    return numbers


@snippet
def scaler_skips_a_step_for_all(s):
    """The gradient of one weight, on one rank, is infinite in the second step."""
    s.again(s.opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    step = 0
    s.m[0].weight.register_hook(lambda g: g * float("inf") if step == 1 else g)
    losses, scales = [], []
    for step, (x, y) in enumerate(s.batches(4)):  # noqa: B007 - the hook reads it
        s.opt.zero_grad()
        loss = F.cross_entropy(s.M(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(s.opt)
        torch.nn.utils.clip_grad_norm_(s.m.parameters(), 10.0)
        scaler.step(s.opt)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    s.m.zero_grad()
    return losses, scales


@snippet
def scaler_with_an_optimizer_for_each_half(s):
    halves = [torch.optim.SGD(s.m[:2].parameters(), 0.1), torch.optim.SGD(s.m[2:].parameters(), 0.1)]
    s.again(*halves)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for x, y in s.batches(2):
        s.m.zero_grad()
        scaler.scale(F.cross_entropy(s.M(x), y)).backward()
        for half in halves:
            scaler.step(half)
        scaler.update()
    return scaler.get_scale()


@snippet
def clipped_by_norm_and_value(s):
    s.again(s.opt)
    norms = []
    for x, y in s.batches(3):
        s.opt.zero_grad()
        F.cross_entropy(s.M(x), y).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(s.m.parameters(), 0.1).item())
        torch.nn.utils.clip_grad_value_(s.m.parameters(), 0.01)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in s.m.parameters() if p.grad is not None]).item())
        s.opt.step()
    return norms


@snippet
def clipped_in_parts_and_together(s):
    """A part that one rank has, a part without gradients beside weights that all ranks have, two models at once."""
    torch.manual_seed(5)
    head, other = s.made(nn.Linear(8, 3)), s.made(nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 8)))
    optimizer = torch.optim.SGD([*s.m.parameters(), *head.parameters()], 0.1)
    s.again(optimizer)
    O = s.ready(other)  # noqa: E741 - as the cases call models
    s.m[:3].requires_grad_(False)
    F.cross_entropy(head(s.M(s.x) + O(s.x)), s.y % 3).backward()
    clip = torch.nn.utils.clip_grad_norm_
    norms = [clip(s.m[4].parameters(), 0.1), clip(s.m[0].parameters(), 0.1), clip(other[0].weight, 0.01)]
    norms += [clip([*s.m.parameters(), *head.parameters()], 0.05), clip(head.parameters(), 0.01)]
    norms += [clip([*other.parameters(), *s.m.parameters(), *head.parameters()], 0.02, norm_type=1.0)]
    return norms


@snippet
def step_with_a_closure(s):
    s.again(s.opt)

    def closure():
        s.opt.zero_grad()
        loss = F.cross_entropy(s.M(s.x), s.y)
        loss.backward()
        return loss

    return [s.opt.step(closure).item() for _ in range(2)]


def _lbfgs(s, **options):
    optimizer = torch.optim.LBFGS(s.m.parameters(), max_iter=4, **options)
    s.again(optimizer)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(s.M(s.x), s.y)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    state = optimizer.state_dict()["state"]
    return losses, calls, state[0]["n_iter"], state[0]["d"]


@snippet
def lbfgs_with_a_closure(s):
    return _lbfgs(s, lr=0.3)


@snippet
def lbfgs_with_a_line_search(s):
    s.m[2].bias.requires_grad_(False)
    return _lbfgs(s, line_search_fn="strong_wolfe", history_size=2)


@snippet
def accumulated_under_no_sync(s):
    s.again(s.opt)
    batches = s.batches(3)
    with torch.enable_grad() if s.is_plain else epl.no_sync(s.m):
        for x, y in batches[:2]:
            (F.cross_entropy(s.M(x), y) / 3).backward()
    (F.cross_entropy(s.M(batches[2][0]), batches[2][1]) / 3).backward()
    s.opt.step()
    return 0.0


@snippet
def accumulated_without_a_step(s):
    s.again(s.opt)
    with torch.enable_grad() if s.is_plain else epl.no_sync():
        for x, y in s.batches(2):
            F.cross_entropy(s.M(x), y).backward()
    loss = F.mse_loss(s.M(s.x), s.x[:, :8])
    loss.backward()
    return loss.item()


# ---- beside and before the model -------------------------------------------------------------------------------------


@snippet
def a_loss_with_weights_in_the_optimizer(s):
    torch.manual_seed(5)
    head, table = s.made(nn.Linear(8, 5)), s.made(nn.Embedding(8, 8))
    optimizer = torch.optim.SGD([*s.m.parameters(), *head.parameters(), *table.parameters()], 0.1)
    s.again(optimizer)
    losses = []
    for x, y in s.batches(3):
        optimizer.zero_grad()
        out = s.M(x)
        loss = F.cross_entropy(head(out), y % 5) + 0.1 * (out - table(y)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@snippet
def an_encoder_before_in_the_optimizer(s):
    torch.manual_seed(5)
    encoder = s.made(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    optimizer = torch.optim.Adam([*encoder.parameters(), *s.m.parameters()], 0.01)
    s.again(optimizer)
    losses = []
    for x, y in s.batches(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(s.M(encoder(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@snippet
def hooks_of_parameters_run_once(s):
    seen, after = [], []
    for parameter in (s.m[0].weight, s.m[4].weight):
        parameter.register_hook(lambda g: seen.append(g) or g * 2)
        parameter.register_post_accumulate_grad_hook(lambda p: after.append(p))
    for x, y in s.batches(2):
        F.cross_entropy(s.M(x), y).backward()
        F.cross_entropy(s.M(x), y).exp().backward()
    own = 2 if s.is_plain else 1  # one of the two weights is on another rank
    return len(seen) / own, len(after) / own


# ---- several models --------------------------------------------------------------------------------------------------


@snippet
def gan_in_stages(s):
    torch.manual_seed(11)
    d = s.made(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    d_opt, g_opt = torch.optim.SGD(d.parameters(), 0.1), s.opt
    s.again(g_opt)
    D, d_opt = s.ready(d, d_opt)
    losses = []
    for x, _ in s.batches(3):
        one = torch.ones(len(x), 1)
        fake = s.M(x)
        d_opt.zero_grad()
        d_loss = F.binary_cross_entropy_with_logits(D(x[:, :8]), one)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(D(fake.detach()), one * 0)
        d_loss.backward()
        d_opt.step()
        g_opt.zero_grad()
        g_loss = F.binary_cross_entropy_with_logits(D(fake), one)
        g_loss.backward()
        g_opt.step()
        losses += [d_loss.item(), g_loss.item()]
    return losses


@snippet
def a_critic_that_every_rank_has_whole(s):
    """The second model has one part: no stages, a replica on every rank."""
    torch.manual_seed(11)
    d = s.made(nn.Linear(8, 1))
    d_opt = torch.optim.SGD(d.parameters(), 0.1)
    s.again(s.opt)
    D, d_opt = s.ready(d, d_opt)
    losses = []
    for x, _ in s.batches(2):
        d_opt.zero_grad()
        s.opt.zero_grad()
        fake = s.M(x)
        d_loss = F.softplus(D(fake.detach())).mean() + F.softplus(-D(x[:, :8])).mean()
        d_loss.backward()
        d_opt.step()
        g_loss = F.softplus(-D(fake)).mean()
        g_loss.backward()
        s.opt.step()
        losses += [d_loss.item(), g_loss.item()]
    return losses


@snippet
def distilled_from_a_teacher_in_stages(s):
    torch.manual_seed(7)
    teacher = s.made(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)).eval()
    s.again(s.opt)
    T = s.ready(teacher)
    losses = []
    for x, y in s.batches(3):
        s.opt.zero_grad()
        with torch.no_grad():
            target = T(x)
        out = s.M(x)
        soft = F.kl_div(F.log_softmax(out / 2, -1), F.softmax(target / 2, -1), reduction="batchmean") * 4
        loss = F.cross_entropy(out, y) + soft
        loss.backward()
        s.opt.step()
        losses.append(loss.item())
    return losses


@snippet
def a_copy_made_before_and_one_made_after(s):
    """A target network of one's own; the model's copies are models of their own."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)]
    net = s.made(nn.Sequential(*layers))
    before = copy.deepcopy(net)
    N = s.ready(net)
    after = copy.deepcopy(net)
    with torch.no_grad():
        for p in after.parameters():
            p.mul_(0.5)
    target = after(s.x)
    loss = F.mse_loss(N(s.x), target.detach()) + F.mse_loss(N(s.x), before(s.x).detach() + 1)
    loss.backward()
    return loss.item(), target, before(s.x)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def _evaluate(s, sizes):
    s.m.eval()
    found = []
    with torch.no_grad():
        for size in sizes:
            x = torch.linspace(-1, 1, size * 16).view(size, 16).cos()
            out = s.M(x)
            found += [out, (out.argmax(-1) == 3).sum().item(), out.softmax(-1).max(-1).values.mean()]
    with torch.inference_mode():
        found.append(s.M(s.x).sum().item())
    s.m.train()
    return found


@snippet
def evaluated_before_and_after_training(s):
    s.again(s.opt)
    found = _evaluate(s, [1, 5, 64])
    for x, y in s.batches(2):
        s.opt.zero_grad()
        F.cross_entropy(s.M(x), y).backward()
        s.opt.step()
        found += _evaluate(s, [2, 33])
    return found


@snippet
def evaluated_only(s):
    with torch.inference_mode():
        return _evaluate(s, [3, 7])


@snippet
def numbers_over_all_ranks(s):
    s.again(s.opt)
    out = s.M(s.x)
    loss = F.cross_entropy(out, s.y)
    early = epl.global_mean(loss) if not s.is_plain else loss
    loss.backward()
    correct = (out.argmax(-1) == s.y).float().sum()
    if s.is_plain:
        return early, loss, correct, out, out.argmax(-1)
    return (
        early,
        epl.global_mean(loss),
        epl.global_sum(correct),
        epl.gather_for_metrics(out),
        epl.gather_for_metrics(out.argmax(-1)),
    )


@snippet
def one_rank_logs_alone(s):
    loss = F.cross_entropy(s.M(s.x), s.y)
    loss.backward()
    if s.is_plain or epl.Env.get().cluster.rank == 0:
        text = f"{loss:.6f} {loss.item():.6f} {(loss * 2).item():.6f}"
        assert len(text.split()) == 3
    return 0.0


# ---- states ----------------------------------------------------------------------------------------------------------


@snippet
def loaded_after_a_step(s):
    s.again(s.opt)
    state = {name: torch.full_like(t, 0.01) * (1 + n) for n, (name, t) in enumerate(s.m.state_dict().items())}
    F.cross_entropy(s.M(s.x), s.y).backward()
    s.opt.step()
    s.opt.zero_grad()
    s.m.load_state_dict(state)
    loss = F.cross_entropy(s.M(s.x), s.y)
    loss.backward()
    s.opt.step()
    whole = s.m.state_dict() if s.is_plain else epl.full_state_dict(s.m)
    return loss.item(), *whole.values()


@snippet
def best_weights_taken_before_the_first_call(s):
    # Before the model was in parts, the state was the live one: what was put back were the weights after training.
    s.again(s.opt)
    best = copy.deepcopy(s.m.state_dict()) if s.is_plain else epl.full_state_dict(s.m)
    for x, y in s.batches(2):
        s.opt.zero_grad()
        F.cross_entropy(s.M(x), y).backward()
        s.opt.step()
    s.opt.zero_grad()
    s.m.load_state_dict(best)
    return F.cross_entropy(s.M(s.x), s.y).item()


@snippet
def gradients_of_two_tasks_put_together(s):
    s.again(s.opt)
    out = s.M(s.x)
    losses = F.cross_entropy(out, s.y), out.pow(2).mean()
    parameters = list(s.m.parameters())
    both = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    for p, one, other in zip(parameters, *both, strict=True):
        conflict = (one * other).sum() < 0
        p.grad = one if conflict else one + other
    s.opt.step()
    s.opt.zero_grad()
    return [loss.item() for loss in losses]
