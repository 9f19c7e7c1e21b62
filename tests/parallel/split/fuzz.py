"""Random programs over the rules: what they do depends on a seed and on shapes only, so every rank and the plain run do the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.parallel.split.compare import Layout, compare, even, uneven

Step = Callable[[random.Random, list[torch.Tensor]], Any]
SIZES = (1, 2, 3, 4, 6)
LARGEST = 400


def _any(rng: random.Random, pool: list[torch.Tensor], least: int = 0) -> torch.Tensor:
    return rng.choice([value for value in pool if value.ndim >= least] or pool[:1])


def _dim(rng: random.Random, value: torch.Tensor) -> int:
    return rng.randrange(-value.ndim, value.ndim)


def _fits(first: torch.Tensor, second: torch.Tensor) -> bool:
    try:
        return torch.broadcast_shapes(first.shape, second.shape).numel() <= LARGEST
    except RuntimeError:
        return False


def binary(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    first = _any(rng, pool)
    second = rng.choice([value for value in pool if _fits(first, value)])
    functions = (
        torch.add,
        torch.sub,
        torch.mul,
        lambda a, b: a + b,
        lambda a, b: torch.where(a > b, a, b * 2),
        lambda a, b: a.lerp(b, 0.25) if a.shape == b.shape else a - b,
        lambda a, b: a / (b * b + 1),
        torch.maximum,
    )
    return rng.choice(functions)(first, second)


def unary(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    functions = (
        torch.tanh,
        torch.sigmoid,
        F.gelu,
        lambda x: x * 0.5,
        lambda x: -x,
        lambda x: 1 - x,
        lambda x: x.clone(),
        lambda x: x.contiguous(),
        lambda x: x.clamp(-1, 1),
        lambda x: x.masked_fill(x > 0.5, 0.1),
        lambda x: x.detach() + x,
    )
    return rng.choice(functions)(_any(rng, pool))


def in_place(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    value = _any(rng, pool) * 1.5
    view = (
        value.reshape(-1)
        if rng.random() < 0.3
        else value.transpose(0, -1)
        if value.ndim and rng.random() < 0.3
        else value
    )
    other = rng.choice([item for item in pool if item.shape == view.shape] or [view.detach() * 0.1])
    kind = rng.randrange(4)
    if kind == 0:
        view += other
    elif kind == 1:
        view.mul_(0.5)
    elif kind == 2 and view.ndim:
        view[rng.randrange(view.shape[0])] = 0.25
    elif kind == 3 and view.ndim:
        view[..., : rng.randrange(1, view.shape[-1] + 1)] += 0.5
    return [value, view]


def shape(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    value = _any(rng, pool, 1)
    if not value.ndim:
        return value.reshape(1)
    kind = rng.randrange(9)
    if kind == 0:
        order = list(range(value.ndim))
        rng.shuffle(order)
        return value.permute(order)
    if kind == 1:
        return value.unsqueeze(rng.randrange(-value.ndim - 1, value.ndim + 1))
    if kind == 2:
        return value.squeeze()
    if kind == 3:
        start = rng.randrange(value.ndim)
        return value.flatten(start, rng.randrange(start, value.ndim))
    if kind == 4:
        dim = rng.randrange(value.ndim)
        divisors = [n for n in range(1, value.shape[dim] + 1) if value.shape[dim] % n == 0]
        return value.unflatten(dim, (rng.choice(divisors), -1))
    if kind == 5:
        return value.transpose(_dim(rng, value), _dim(rng, value))
    if kind == 6 and value.numel() < 60:
        return value.repeat(*[rng.choice((1, 1, 2)) for _ in range(value.ndim)])
    if kind == 7:
        return list(value.chunk(2, _dim(rng, value)))
    return value.reshape(-1) if value.numel() < 30 or rng.random() < 0.5 else value.flip(_dim(rng, value))


def index(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    value = _any(rng, pool, 1)
    if not value.ndim:
        return value[None]
    items: list[Any] = []
    for size in value.shape:
        kind = rng.randrange(7)
        if kind == 0:
            items.append(rng.randrange(-size, size))
        elif kind == 1:
            start = rng.randrange(size)
            items.append(slice(start, rng.randrange(start + 1, size + 1)))
        elif kind == 2:
            items.append(torch.tensor([rng.randrange(-size, size) for _ in range(3)]))
        else:
            items.append(slice(None))
        if rng.random() < 0.1:
            items.append(None)
    if rng.random() < 0.2:
        return value.index_select(0, torch.tensor([rng.randrange(value.shape[0]) for _ in range(2)]))
    return value[tuple(items)]


def reduce(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    value = _any(rng, pool, 1)
    if not value.ndim:
        return value.sum()
    dims = rng.sample(range(value.ndim), rng.randrange(1, value.ndim + 1))
    dim, keep = _dim(rng, value), rng.random() < 0.4
    functions = (
        lambda: value.sum(dims, keep),
        lambda: value.mean(dims, keepdim=keep),
        lambda: value.sum(),
        lambda: value.logsumexp(dims, keep),
        lambda: value.amax(dim, keep),
        lambda: value.max(dim).values,
        lambda: value.cumsum(dim),
        lambda: (value * value).sum(dim, keep).add(1).sqrt(),
        lambda: value.norm(dim=dim, keepdim=keep),
        lambda: value.var(dims, unbiased=False),
        lambda: value.sort(dim).values,
        lambda: (value > 0).sum(dim).double() * 0.1,
    )
    return rng.choice(functions)()


def along(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    value = _any(rng, pool, 1)
    if not value.ndim:
        return value * 1
    dim = _dim(rng, value)
    functions = (
        lambda: value.softmax(dim),
        lambda: value.log_softmax(dim),
        lambda: F.normalize(value, dim=dim),
        lambda: F.layer_norm(value, value.shape[-1:]),
        lambda: F.layer_norm(value, value.shape[-1:], value.detach().reshape(-1, value.shape[-1])[0]),
        lambda: F.pad(value, (0, 1)) if value.numel() < 100 else value,
        lambda: value.roll(1, dim),
        lambda: value.topk(1, dim).values,
    )
    return rng.choice(functions)()


def multiply(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    first = _any(rng, pool, 1)
    if not first.ndim:
        return first * 2
    width = first.shape[-1]
    rights = [value for value in pool if value.ndim == 2 and width in value.shape]
    if rights and first.numel() < LARGEST:
        weight = rng.choice(rights)
        if weight.shape[1] == width and rng.random() < 0.6:
            biases = [value for value in pool if value.shape == weight.shape[:1]]
            return F.linear(first, weight, rng.choice(biases) if biases and rng.random() < 0.5 else None)
        if weight.shape[0] == width:
            return first @ weight if rng.random() < 0.5 else torch.einsum("...i,ij->...j", first, weight)
    if first.ndim >= 2 and rng.random() < 0.7:
        if rng.random() < 0.5:
            return first @ first.transpose(-2, -1) * 0.3
        return torch.einsum("...ij,...kj->...ik", first, first.tanh()) * 0.3
    same = [value for value in pool if value.ndim == 1 and value.shape[0] == width]
    return first @ rng.choice(same) if same else (first * first).sum(-1)


def join(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    first = _any(rng, pool, 1)
    same = [value for value in pool if value.shape == first.shape]
    if not first.ndim or first.numel() > 100:
        return first * 1
    parts = [first, rng.choice(same), first * 0.5][: rng.choice((2, 3))]
    return torch.cat(parts, _dim(rng, first)) if rng.random() < 0.6 else torch.stack(parts, _dim(rng, first))


def lookup(rng: random.Random, pool: list[torch.Tensor]) -> Any:
    table = _any(rng, pool, 2)
    if table.ndim != 2:
        return table * 1
    draw = torch.Generator().manual_seed(rng.randrange(1000))
    source = _any(rng, pool)
    # Ids that are cut where the value is from which they come.
    ids = (
        ((source.detach().abs() * 7).long() % table.shape[0])
        if source.numel() < 50
        else torch.randint(table.shape[0], (3,), generator=draw)
    )
    kind = rng.randrange(4)
    if kind == 0:
        return F.embedding(ids, table)
    if kind == 1:
        return table[ids]
    rows = torch.randint(table.shape[1], (table.shape[0],), generator=draw)
    if kind == 2:
        reduction = rng.choice(("mean", "sum", "none"))
        smoothing = rng.choice((0.0, 0.1))
        return F.cross_entropy(
            table, rows, reduction=reduction, label_smoothing=smoothing, ignore_index=rng.choice((-100, 0))
        )
    return table.gather(1, rows[:, None])


STEPS: tuple[Step, ...] = (
    *(binary,) * 4,
    *(unary,) * 2,
    in_place,
    *(shape,) * 4,
    *(index,) * 2,
    *(reduce,) * 2,
    *(along,) * 2,
    *(multiply,) * 4,
    join,
    lookup,
)


def program_of(seed: int, steps: int = 8) -> Callable[..., Any]:
    """A program that draws its steps from this seed and the shapes that it meets; `trace` lists them."""

    def program(*inputs: torch.Tensor) -> Any:
        rng, pool = random.Random(seed), list(inputs)
        for _ in range(steps):
            made = rng.choice(STEPS)(rng, pool)
            for value in made if isinstance(made, list) else [made]:
                if value.numel() <= LARGEST and value.ndim <= 5:
                    pool.append(value if rng.random() < 0.7 else value * 1)
        return pool[len(inputs) :][-4:]

    return program


def inputs_of(seed: int) -> tuple[list[torch.Tensor], list[Layout], int]:
    """Inputs of a random program, how they come, and over how many ranks."""
    rng = random.Random(seed * 7 + 1)
    generator = torch.Generator().manual_seed(seed)
    ways = rng.choice((2, 3))
    sizes = rng.sample(SIZES, 3)
    cuts = {
        size: (even(size, ways) if rng.random() < 0.5 else uneven(size, ways, rng, empty=rng.random() < 0.3))
        for size in sizes
    }
    inputs, layouts = [], []
    for _ in range(rng.choice((2, 3, 4))):
        shape_ = [rng.choice(sizes) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
        inputs.append(torch.randn(shape_, dtype=torch.float64, generator=generator))
        kind = rng.random()
        dim = rng.randrange(len(shape_))
        own = even(shape_[dim], ways) if rng.random() < 0.2 else cuts[shape_[dim]]
        layouts.append(None if kind < 0.25 else "sum" if kind < 0.4 else (dim, own))
    return inputs, layouts, ways


def try_one(seed: int) -> None:
    """Fail unless the random program of this seed gives what it gives on one device."""
    inputs, layouts, ways = inputs_of(seed)
    learns = [random.Random(seed + n).random() < 0.85 for n in range(len(inputs))]
    compare(program_of(seed), inputs, layouts, ways, learns=learns, inside=seed % 3 > 0)
