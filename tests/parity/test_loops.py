"""Loops as people write them, plainly and under data parallelism: the same losses and weights.

Each loop is one function of `Setup`, which is all that differs between the two runs: the batch size, and whether
`epl.parallelize` is called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import epl
from tests.harness import run_ranks
from tests.parity.compare import Run, assert_same

MICRO_BATCH, ROWS = 4, 26  # on 2 ranks: three global batches of 8 and a tail of 2


@dataclass(frozen=True)
class Setup:
    """One device with the global batch, or one of several ranks."""

    ranks: int
    distributed: bool

    def loader(self, *, shuffle: bool = True, rows: int = ROWS) -> DataLoader:
        g = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(rows, 6, dtype=torch.float64, generator=g), torch.randint(0, 3, (rows,), generator=g)
        )
        size = MICRO_BATCH if self.distributed else MICRO_BATCH * self.ranks
        return DataLoader(data, batch_size=size, shuffle=shuffle)

    def ready(self, model: nn.Module, *others: Any, **more: Any) -> Any:
        if self.distributed:
            return epl.parallelize(model, *others, **more)
        return (model, *others) if others else model

    def mean(self, loss: torch.Tensor) -> float:
        return (epl.global_mean(loss) if self.distributed else loss).item()

    def no_sync(self, *models: nn.Module):
        return epl.no_sync(*models) if self.distributed else torch.enable_grad()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def state(*modules: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{n}.{k}": t.clone() for n, m in enumerate(modules) for k, t in epl.full_state_dict(m).items()}


LOOPS: dict[str, Callable[[Setup], Run]] = {}


def loop(function: Callable[[Setup], Run]) -> Callable[[Setup], Run]:
    LOOPS[function.__name__] = function
    return function


@loop
def schedulers_groups_and_settings(s: Setup) -> Run:
    model = net()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.0}, {"params": model[2:].parameters()}], lr=0.01
    )
    before = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            before.step()
            after.step()
            losses.append(s.mean(loss))
    losses += before.get_last_lr()
    return Run(losses, state(model))


@loop
def frozen_then_unfrozen(s: Setup) -> Run:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    losses = []
    for epoch in range(3):
        model[0].requires_grad_(epoch == 1)
        model[4].requires_grad_(epoch != 2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(s.mean(loss))
    return Run(losses, state(model))


class CenterLoss(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, out, y):
        return F.cross_entropy(out, y) + 0.1 * (out - self.centers[y]).square().mean()


def _loss_with_weights(s: Setup, as_loss_fn: bool) -> Run:
    model, criterion = net(), CenterLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.AdamW(criterion.parameters(), lr=0.05)
    more = {"loss_fn": criterion} if as_loss_fn else {}
    s.ready(model, optimizer, *([] if as_loss_fn else [second]), **more)
    loader = s.ready(model, s.loader())[1]
    losses = []
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        second.zero_grad()
        loss.backward()
        optimizer.step()
        second.step()
        losses.append(s.mean(loss))
    return Run(losses, state(model, criterion))


@loop
def loss_weights_known_by_an_optimizer(s: Setup) -> Run:
    return _loss_with_weights(s, as_loss_fn=False)


@loop
def loss_weights_known_as_loss_fn(s: Setup) -> Run:
    return _loss_with_weights(s, as_loss_fn=True)


@loop
def parameters_added_later(s: Setup) -> Run:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
    losses = []
    for epoch in range(3):
        if epoch == 1:
            optimizer.add_param_group({"params": [scale], "lr": 0.5})
        if epoch == 2:  # a new last layer, different on every rank before it is used
            head = nn.Linear(3, 3).double()
            if not s.distributed or epl.Env.get().cluster.is_first_rank:
                nn.init.constant_(head.weight, 0.3)
                nn.init.constant_(head.bias, 0.1)
            model.append(head)
            optimizer.add_param_group({"params": model[5].parameters()})
        for x, y in loader:
            loss = F.cross_entropy(model(x) * (scale if epoch else 1.0), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(s.mean(loss))
    return Run(losses + scale.tolist(), state(model))


@loop
def several_backwards_per_step(s: Setup) -> Run:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    losses = []
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        out = model(x)
        first = F.cross_entropy(out, y)
        first.backward(retain_graph=True)
        second = out.square().mean()
        second.backward()
        third = F.cross_entropy(model(x * 2), y)
        third.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses += [s.mean(first), s.mean(second), s.mean(third)]
    return Run(losses, state(model))


@loop
def gan(s: Setup) -> Run:
    generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
    critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    g_optimizer = torch.optim.AdamW(generator.parameters(), lr=0.01)
    c_optimizer = torch.optim.AdamW(critic.parameters(), lr=0.01)
    generator, g_optimizer, loader = s.ready(generator, g_optimizer, s.loader())
    critic, c_optimizer = s.ready(critic, c_optimizer)
    losses = []
    for x, _ in loader:
        fake = generator(x.flip(1))
        c_loss = F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()
        c_optimizer.zero_grad()
        c_loss.backward()
        c_optimizer.step()
        g_loss = F.softplus(-critic(fake)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        losses += [s.mean(c_loss), s.mean(g_loss)]
    return Run(losses, state(generator, critic))


@loop
def optimizers_given_with_the_wrong_model(s: Setup) -> Run:
    first, second = net(), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (first, second)]
    loader = s.ready(first, *optimizers, s.loader())[
        -1
    ]  # the second one's parameters are taken for outside ones, at first
    s.ready(second)
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(first(x) + second(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(s.mean(loss))
    return Run(losses, state(first, second))


@loop
def distillation(s: Setup) -> Run:
    teacher, student = net(), net()
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    teacher = s.ready(teacher)
    student, optimizer, loader = s.ready(student, optimizer, s.loader())
    losses = []
    for x, _ in loader:
        with torch.no_grad():
            goal = teacher(x).softmax(-1)
        loss = F.kl_div(student(x).log_softmax(-1), goal, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(s.mean(loss))
    return Run(losses, state(teacher, student))


def _compiled(s: Setup, in_place: bool) -> Run:
    model = net()
    if in_place:
        model.compile(backend="aot_eager")
    else:
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(s.mean(loss))
    return Run(losses, state(model))


@loop
def compiled(s: Setup) -> Run:
    return _compiled(s, in_place=False)


@loop
def compiled_in_place(s: Setup) -> Run:
    return _compiled(s, in_place=True)


@loop
def accumulation_under_no_sync(s: Setup) -> Run:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    losses = []
    for _ in range(2):
        for step, (x, y) in enumerate(loader):
            last = step % 2 == 1
            with s.no_sync(model) if not last else torch.enable_grad():
                loss = F.cross_entropy(model(x), y) / 2
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(s.mean(loss))
    return Run(losses, state(model))


@loop
def parts_unused_in_some_steps(s: Setup) -> Run:
    model = nn.ModuleList([net(), net()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    s.ready(model, optimizer)
    loader = s.ready(model, s.loader())[1]
    losses = []
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model[0](x) if step % 2 else model[0](x) + model[1](x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(s.mean(loss))
    return Run(losses, state(model))


@loop
def evaluation_in_between(s: Setup) -> Run:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader, held_out = s.ready(model, optimizer, s.loader(), s.loader(shuffle=False, rows=11))
    losses = []
    for x, y in loader:
        out = model(x)
        model.eval()
        with torch.no_grad():
            right, seen = [], 0
            for vx, vy in held_out:
                hits = (model(vx).argmax(-1) == vy).double()
                right.append(epl.gather_for_metrics(hits) if s.distributed else hits)
                seen += len(right[-1])
            if not s.distributed or epl.Env.get().cluster.is_first_rank:
                model(vx)  # one rank alone: nothing is communicated, so it simply runs
        model.train()
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [s.mean(loss), torch.cat(right).mean().item(), seen]
    return Run(losses, state(model))


@loop
def lbfgs_with_a_closure(s: Setup) -> Run:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    losses = []
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return epl.global_mean(loss) if s.distributed else loss

        losses.append(optimizer.step(closure).item())
    return Run(losses, state(model))


@loop
def gradient_penalty(s: Setup) -> Run:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    losses = []
    for x, y in loader:
        x.requires_grad_(True)
        loss = F.cross_entropy(model(x), y)
        # The gradient of the mean loss in x shrinks with the number of rows: the sum is the same however rows are divided.
        (gradient,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
        loss = loss + gradient.square().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(s.mean(loss))
    return Run(losses, state(model))


@loop
def scaled_loss(s: Setup) -> Run:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    losses = []
    for step, (x, y) in enumerate(loader):
        if step == 1 and (not s.distributed or epl.Env.get().cluster.is_first_rank):
            x = x * float("inf")  # one rank's gradients overflow: all ranks must skip the step
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            losses.append(s.mean(loss))
    return Run([*losses, scaler.get_scale()], state(model))


@loop
def moving_average_of_the_weights(s: Setup) -> Run:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = s.ready(model, optimizer, s.loader())
    average = copy.deepcopy(model)
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y) + 0.1 * (average(x) - model(x)).square().mean()
        optimizer.zero_grad()
        average.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.2)
        losses.append(s.mean(loss))
    return Run(losses, state(model, average))


def _under_epl(name: str) -> Run:
    epl.init(epl.Config({"communication.timeout": 60}))
    epl.set_default_strategy(epl.replicate(1))
    torch.manual_seed(3 + epl.Env.get().cluster.rank)
    return LOOPS[name](Setup(epl.Env.get().cluster.world_size, distributed=True))


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name):
    torch.manual_seed(3)
    expected = LOOPS[name](Setup(2, distributed=False))
    for found in run_ranks(_under_epl, 2, name, timeout=100):
        assert_same(found, expected)
