"""Random loss programs in which batch, sequence and class sizes are all equal: a rule that guesses by size is found out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

N = 4
Pool = list[Any]
Operation = Callable[[Pool], Any]

_SHAPES = [
    (),
    (N,),
    (N, N),
    (N, 1),
    (1, N),
    (N, N, N),
    (1, N, 1),
    (N, 1, 1),
    (1, 1, N),
    (N * N,),
    (N, N * N),
    (N * N, N),
]
_SHAPES += [(N * N, 1)]
_UNARY = [
    torch.tanh,
    torch.sigmoid,
    torch.square,
    torch.abs,
    F.softplus,
    torch.neg,
    lambda t: t * 0.5,
    lambda t: t / 3,
    lambda t: 1 - t,
    lambda t: t + 2,
    lambda t: (t.abs() + 0.1).log(),
    lambda t: (t * 0.1).exp(),
    lambda t: t.clone(),
    lambda t: t.clamp(-1, 1),
    lambda t: 2 / (t.abs() + 1),
    lambda t: t.float().double(),
]
_BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: a / (b.abs() + 1), lambda a, b: a - b]
_WITH_CONSTANT = [
    torch.add,
    torch.sub,
    torch.mul,
    lambda a, b: b - a,
    lambda a, b: a / b,
    lambda a, b: b / (a.abs() + 1),
    lambda a, b: torch.add(a, b, alpha=2.0),
]
_LOSSES = [
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    lambda a, b, reduction: F.kl_div(a, b.softmax(-1), reduction=reduction),
    lambda a, b, reduction: F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction=reduction),
]
_VIEWS = [
    (-1,),
    (-1, N),
    (N, -1),
    (N, N, -1),
    (N, N, N),
    (-1, N * N),
    (N * N, -1),
    (1, -1),
    (2, -1),
    (2, 2, -1),
    (-1, 2),
]
_SLICES = [
    slice(None, 2),
    slice(1, None),
    slice(None),
    slice(1, 3),
    slice(None, None, 2),
    slice(-3, None),
    (slice(None), slice(1, None)),
    (slice(None), 0),
    (..., 1),
    (None,),
    (slice(1, 3), 0),
    (0,),
    slice(0, 1),
]
_WRITES = [0, (slice(None), 0), (slice(None), slice(None, 2)), (..., 0), slice(None, 2)]
_EINSUMS = ["bij,bij->b", "bij,bjk->bik", "bij,bij->", "bi,bi->b", "bi,bj->ij", "ij,kj->ik", "bij,bij->ij"]
_EXPANSIONS = [(N, N), (N, N, N), (N, -1), (-1, N), (N, -1, -1), (2, -1, -1)]


def random_operation(rng: random.Random, pool: Pool, generator: torch.Generator) -> Operation:
    """An operation on members of the pool, that may or may not fit their shapes."""
    kind = rng.choice(_KINDS)
    return kind(_Draw(rng, pool, generator))


class _Draw:
    """Two members of the pool, and what an operation on them may need."""

    def __init__(self, rng: random.Random, pool: Pool, generator: torch.Generator) -> None:
        self.rng, self.generator = rng, generator
        self.i, self.j = rng.randrange(len(pool)), rng.randrange(len(pool))
        self.shape = pool[self.i].shape
        self.ndim = len(self.shape)
        self.dim = rng.randrange(-self.ndim, self.ndim) if self.ndim else 0
        self.keep = rng.random() < 0.3

    def one(self, f: Callable[[Any], Any]) -> Operation:
        return lambda pool: f(pool[self.i])

    def two(self, f: Callable[[Any, Any], Any]) -> Operation:
        return lambda pool: f(pool[self.i], pool[self.j])

    def constant(self, shape: Any = None) -> torch.Tensor:
        return torch.rand(self.rng.choice(_SHAPES) if shape is None else shape, generator=self.generator) + 0.3

    def integers(self, high: int, shape: Any) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator)


def _unary(d: _Draw) -> Operation:
    return d.one(d.rng.choice(_UNARY))


def _binary(d: _Draw) -> Operation:
    return d.two(d.rng.choice(_BINARY))


def _with_constant(d: _Draw) -> Operation:
    c, f = d.constant(), d.rng.choice(_WITH_CONSTANT)
    return d.one(lambda t: f(t, c))


def _total(d: _Draw) -> Operation:
    f, way = d.rng.choice([torch.sum, torch.mean]), d.rng.random()
    if way < 0.7:
        return d.one(lambda t: f(t, d.dim, d.keep))
    return d.one(f) if way < 0.88 else d.one(lambda t: f(t, (0, -1)))


def _reduction(d: _Draw) -> Operation:
    return d.one(
        d.rng.choice(
            [
                lambda t: t.amax(d.dim, keepdim=d.keep),
                lambda t: torch.logsumexp(t, d.dim, d.keep),
                lambda t: t.std(d.dim, keepdim=d.keep),
                lambda t: t.var(d.dim, keepdim=d.keep, unbiased=False),
                lambda t: t.prod(d.dim, keepdim=d.keep),
                lambda t: t.max(),
                lambda t: t.norm(dim=d.dim, keepdim=d.keep),
                lambda t: t.max(d.dim).values,
                lambda t: t.topk(2, dim=d.dim).values,
            ]
        )
    )


def _along(d: _Draw) -> Operation:
    f = d.rng.choice([F.softmax, F.log_softmax, lambda t, dim: F.normalize(t, dim=dim), lambda t, dim: t.cumsum(dim)])
    return d.one(lambda t: f(t, d.dim))


def _transposed(d: _Draw) -> Operation:
    other = d.rng.randrange(-d.ndim, d.ndim) if d.ndim else 0
    order = d.rng.sample(range(d.ndim), d.ndim)
    return d.one(d.rng.choice([lambda t: t.transpose(d.dim, other), lambda t: t.permute(order), lambda t: t.mT]))


def _reshaped(d: _Draw) -> Operation:
    first = d.rng.randrange(0, max(d.ndim, 1))
    shape = d.rng.choice([*_VIEWS, (math.prod(d.shape),)])
    return d.one(
        d.rng.choice(
            [
                lambda t: t.flatten(first, min(first + 1, d.ndim - 1)),
                lambda t: t.reshape(shape),
                lambda t: t.reshape(shape),
                lambda t: t.unsqueeze(d.dim),
                lambda t: t.squeeze(),
            ]
        )
    )


def _sliced(d: _Draw) -> Operation:
    index = d.rng.choice(_SLICES)
    return d.one(
        d.rng.choice(
            [
                lambda t: t[index],
                lambda t: t[index],
                lambda t: t.select(d.dim, min(1, d.shape[d.dim] - 1)),
                lambda t: t.chunk(2, d.dim)[-1],
            ]
        )
    )


def _indexed(d: _Draw) -> Operation:
    rows = torch.tensor([d.rng.randrange(-N, N) for _ in range(d.rng.choice([3, N, 6]))])
    return d.one(lambda t: t[rows])


def _indexed_twice(d: _Draw) -> Operation:
    m = d.rng.choice([3, N])
    a, b = d.integers(N, (m,)), d.integers(N, (m,))
    a = d.rng.choice([a, torch.arange(m)])
    return d.one(lambda t: t[a, b])


def _masked(d: _Draw) -> Operation:
    mask = d.constant(d.shape[: d.rng.choice([1, 2])] if d.ndim else ()) > 0.7
    return d.one(lambda t: t[mask])


def _joined(d: _Draw) -> Operation:
    f = d.rng.choice([torch.cat, torch.stack])
    return d.two(lambda a, b: f([a, b], d.dim))


def _product(d: _Draw) -> Operation:
    return d.two(lambda a, b: a @ b * 0.3)


def _product_with_constant(d: _Draw) -> Operation:
    c, left = d.constant(), d.rng.random() < 0.5
    return d.one(lambda t: (t @ c if left else c @ t) * 0.3)


def _einsum(d: _Draw) -> Operation:
    equation = d.rng.choice(_EINSUMS)
    return d.two(lambda a, b: torch.einsum(equation, a, b) * 0.2)


def _linear(d: _Draw) -> Operation:
    weight = d.constant((3, d.shape[-1] if d.ndim else 1))
    return d.one(lambda t: F.linear(t, weight))


def _gathered(d: _Draw) -> Operation:
    index = d.integers(N, d.shape if d.ndim else (1,))
    return d.one(lambda t: t.gather(d.dim, index))


def _cross_entropy(d: _Draw) -> Operation:
    reduction = d.rng.choice(["mean", "mean", "sum", "none"])
    shape = (d.shape[0], *d.shape[2:]) if d.ndim >= 2 else (1,)
    classes = max(d.shape[1], 1) if d.ndim > 1 else 1
    target = torch.where(d.constant(shape) < 0.5, torch.tensor(-100), d.integers(classes, shape))
    weight = d.constant((classes,)) if d.ndim > 1 and d.rng.random() < 0.4 else None
    smoothing = d.rng.choice([0.0, 0.1])
    return d.one(lambda t: F.cross_entropy(t, target, weight=weight, reduction=reduction, label_smoothing=smoothing))


def _loss(d: _Draw) -> Operation:
    f, reduction = d.rng.choice(_LOSSES), d.rng.choice(["mean", "sum", "none"])
    return d.two(lambda a, b: f(a, b, reduction=reduction))


def _loss_with_constant(d: _Draw) -> Operation:
    c, f, reduction = d.constant(d.shape), d.rng.choice(_LOSSES), d.rng.choice(["mean", "sum", "none"])
    return d.one(lambda t: f(t, c, reduction=reduction))


def _expanded(d: _Draw) -> Operation:
    shape = d.rng.choice(_EXPANSIONS)
    return d.one(lambda t: t.expand(shape))


def _where(d: _Draw) -> Operation:
    condition = d.constant(d.shape) > 0.8
    return d.two(lambda a, b: torch.where(condition, a, b))


def _in_place(d: _Draw) -> Operation:
    def f(t: Any) -> Any:
        t = t * 1
        t.mul_(0.7)
        t += 0.1
        return t

    return d.one(f)


def _written(d: _Draw) -> Operation:
    index = d.rng.choice(_WRITES)

    def f(t: Any) -> Any:
        t = t * 1
        t[index] = 0.5
        return t

    return d.one(f)


def _detached(d: _Draw) -> Operation:
    return d.one(lambda t: t.detach())


_KINDS = [_unary] * 2 + [_binary] * 2 + [_with_constant] * 3 + [_total] * 3 + [_reduction] * 3 + [_along] * 3
_KINDS += [_transposed] * 3 + [_reshaped] * 4 + [_sliced] * 3 + [_indexed, _indexed_twice, _masked, _joined, _joined]
_KINDS += [_product, _product_with_constant, _einsum, _linear, _gathered, _cross_entropy, _loss, _loss_with_constant]
_KINDS += [_expanded, _where, _in_place, _written, _detached]
