"""A program run plainly and on ranks as threads, its inputs cut in some way: values and all gradients must agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from epl.graph.spec import leaves_of
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, partial, shard, whole
from epl.plan.split.cut import Axis, Cut
from tests.parallel.split.threads import ThreadRanks, run_threads

Layout = None | str | tuple[int, Cut]
"""None: whole; "sum": partial sums; (dim, cut)."""
TOLERANCE = 1e-9


def even(size: int, ways: int, name: str = "axis") -> Cut:
    return Cut(Axis(name, size, ways))


def uneven(size: int, ways: int, rng: random.Random, name: str = "rows", empty: bool = True) -> Cut:
    """A dim dealt out by chance; some rank may get nothing."""
    least = 0 if empty or size < ways else 1
    counts = [least] * ways
    for _ in range(size - least * ways):
        counts[rng.randrange(ways)] += 1
    return Cut(Axis(name, size, ways, counts))


def layouts_of(tensor: torch.Tensor, ways: int, rng: random.Random) -> list[Layout]:
    """Every way in which one input can come."""
    found: list[Layout] = [None]
    if tensor.dtype != torch.bool:
        found.append("sum")
    for dim, size in enumerate(tensor.shape):
        found.append((dim, even(size, ways)))
        found.append((dim, uneven(size, ways, rng)))
    return found


def _leaf(tensor: torch.Tensor, learns: bool) -> torch.Tensor:
    return tensor.clone().requires_grad_(learns and tensor.is_floating_point())


def _scalar(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One number that depends on every element of every output, each in its own way."""
    total = None
    for n, out in enumerate(outputs):
        if out.is_floating_point() and out.requires_grad:
            weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype) * 1.7 + n).reshape(out.shape)
            term = (torch.where(out.isfinite(), out, torch.zeros_like(out)) * weights).sum()
            total = term if total is None else total + term
    return total


def run_plain(
    program: Callable[..., Any], inputs: Sequence[torch.Tensor], learns: Sequence[bool]
) -> tuple[Any, list[Any]]:
    leaves = [_leaf(value, learn) for value, learn in zip(inputs, learns, strict=True)]
    outputs = leaves_of(program(*(leaf.clone() for leaf in leaves)), torch.Tensor)
    total = _scalar(outputs)
    if total is not None:
        total.backward()
    return [out.detach() for out in outputs], [leaf.grad for leaf in leaves]


def addends(value: torch.Tensor, ways: int) -> list[torch.Tensor]:
    """Tensors whose sum is `value`."""
    generator = torch.Generator().manual_seed(11)
    if value.is_floating_point():
        first = [torch.randn(value.shape, dtype=value.dtype, generator=generator) for _ in range(ways - 1)]
    else:
        first = [torch.randint(-3, 4, value.shape, generator=generator).to(value.dtype) for _ in range(ways - 1)]
    return [*first, value - sum(first)]


def compare(
    program: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    ways: int,
    *,
    learns: Sequence[bool] | None = None,
    inside: bool = True,
    tolerance: float = TOLERANCE,
) -> list[ThreadRanks]:
    """Fail unless the program gives the same values and gradients as on one device; the ranks, with what they sent."""
    learns = [True] * len(inputs) if learns is None else learns
    expected, gradients = run_plain(program, inputs, learns)

    def on_rank(ranks: ThreadRanks) -> tuple[list[torch.Tensor], list[Any], ThreadRanks]:
        region.depth, region.entered = int(inside), {}
        leaves, given = [], []
        for value, layout, learn in zip(inputs, layouts, learns, strict=True):
            if isinstance(layout, tuple):
                leaf = _leaf(layout[1].take(value, layout[0], ranks.rank), learn)
                given.append(shard(leaf.clone(), layout[0], layout[1], ranks))
            elif layout == "sum":
                leaf = _leaf(addends(value, ranks.ways)[ranks.rank], learn)
                given.append(partial(leaf.clone(), ranks))
            else:
                leaf = _leaf(value, learn)
                given.append(leaf.clone())
            leaves.append(leaf)
        outputs = [whole(out) for out in leaves_of(program(*given), torch.Tensor)]
        assert not any(isinstance(out, SplitTensor) for out in outputs)
        total = _scalar(outputs)
        if total is not None:
            total.backward()
        region.depth, region.entered = 0, {}
        return [out.detach() for out in outputs], [leaf.grad for leaf in leaves], ranks

    results = run_threads(on_rank, ways)
    for rank, (outputs, _, _) in enumerate(results):
        assert len(outputs) == len(expected)
        for n, (out, wanted) in enumerate(zip(outputs, expected, strict=True)):
            assert out.shape == wanted.shape, (
                f"output {n} on rank {rank}: {tuple(out.shape)}, plainly {tuple(wanted.shape)}"
            )
            assert out.dtype == wanted.dtype, f"output {n} on rank {rank}: {out.dtype}, plainly {wanted.dtype}"
            _near(out, wanted, f"output {n} on rank {rank}", tolerance)
    for n, (wanted, layout) in enumerate(zip(gradients, layouts, strict=True)):
        found = [grads[n] for _, grads, _ in results]
        if isinstance(layout, tuple):
            if wanted is None:
                assert all(item is None or not item.any() for item in found), f"input {n} got a gradient"
                continue
            blocks = [
                torch.zeros_like(layout[1].take(wanted, layout[0], rank)) if item is None else item
                for rank, item in enumerate(found)
            ]
            _near(layout[1].join(blocks, layout[0]), wanted, f"gradient of input {n}", tolerance)
            continue
        for rank, item in enumerate(found):
            if wanted is None or item is None:
                assert item is None or not item.any(), f"input {n} got a gradient on rank {rank}"
                assert wanted is None or not wanted.any(), f"input {n} got no gradient on rank {rank}"
                continue
            _near(item, wanted, f"gradient of input {n} on rank {rank}", tolerance)
    return [ranks for _, _, ranks in results]


def _near(found: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float) -> None:
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), f"{what}: {found}, plainly {wanted}"
        return
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    off = torch.where(same, torch.zeros_like(wanted), (found - wanted).abs())
    finite = wanted[wanted.isfinite()]
    scale = 1 + (float(finite.abs().max()) if finite.numel() else 0.0)
    assert not off.isnan().any(), f"{what} has NaN where it is none plainly, or the other way round"
    assert float(off.max() if off.numel() else 0.0) <= tolerance * scale, (
        f"{what} is off by {float(off.max()):.3g} of {scale:.3g}"
    )
