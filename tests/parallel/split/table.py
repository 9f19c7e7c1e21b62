"""Small programs on tensors, by kind: (name, program, shapes of the inputs, how many of the first ones are float)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

REFUSED = {"in place view", "detach", "penalty"}
"""Programs that may also be refused, for some layouts."""


class Program(NamedTuple):
    name: str
    run: Callable[..., Any]
    inputs: tuple[str, ...]
    """Each as "f 4 6" (floats), "p 4 6" (positive), "i5 4" (ids below 5), "b 4 6" (bools)."""


def made(spec: str, generator: torch.Generator) -> torch.Tensor:
    kind, *sizes = spec.split()
    shape = [int(size) for size in sizes]
    if kind[0] == "i":
        return torch.randint(int(kind[1:]), shape, generator=generator)
    if kind == "b":
        return torch.rand(shape, generator=generator) < 0.6
    values = torch.randn(shape, dtype=torch.float64, generator=generator)
    return values.abs() + 0.1 if kind == "p" else values


def inputs_of(program: Program, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [made(spec, generator) for spec in program.inputs]


def _inplace(x: torch.Tensor, y: torch.Tensor) -> Any:
    x += y
    x.mul_(2)
    F.relu(x, inplace=True)
    return x, y


def _inplace_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    flat = x.view(4, 6)
    later = x + y
    flat.add_(y)
    return x, flat, later


def _rotary(x: torch.Tensor, angles: torch.Tensor) -> Any:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2), turned.real, turned.imag, turned.conj().abs()


def _plain_changed(x: torch.Tensor, y: torch.Tensor) -> Any:
    total = torch.zeros(4, 6, dtype=torch.float64)
    total.add_(x)
    total += y
    total[1] = x[0]
    return total


def _windows(x: torch.Tensor) -> Any:
    """Gathered, a transposed value lay otherwise in memory than its strides said, and other numbers were read."""
    found = []
    for value in (x, x.transpose(1, 2), x.permute(2, 1, 0)):
        rows, width, inner = value.stride()
        size, stride = (*value.shape[:1], 3, 2, value.shape[2]), (rows, width, width, inner)
        found.append(value.as_strided(size, stride, value.storage_offset()))
        found.append(torch.as_strided(value, size, stride) * value.sum())
    return found


def _set(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[:, 1] = y[:, 2]
    x[0] = 3.0
    x[1:3] = y[:2]
    x[:, torch.tensor([0, 4])] = y[:, :2]
    return x


def _set_picked(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[torch.arange(4), torch.tensor([5, 0, 2, 2])] = y[:, 0]
    return x


def _inplace_unknown(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.index_put_((torch.tensor([0, 2]),), y[:2])
    x.masked_scatter_(torch.arange(6) > 3, y)
    return x


def _batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, training: bool) -> Any:
    mean, var = torch.linspace(0, 1, 6, dtype=torch.float64), torch.linspace(1, 2, 6, dtype=torch.float64)
    return F.batch_norm(x, mean, var, w, b, training), mean, var


def _hooked(x: torch.Tensor) -> Any:
    x = x * 2
    x.register_hook(lambda gradient: gradient * 3)
    return x * x


def _gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
    """A gradient penalty: gradients of gradients."""
    if not x.requires_grad:
        return x
    (found,) = torch.autograd.grad((x @ w).tanh().sum(), w, create_graph=True)
    return found * found


MASK = torch.tensor([True, False, True, True])
ROWS = torch.tensor([3, 0, 0, 2, 1])


def table() -> list[Program]:
    """All of them."""
    found: list[Program] = []

    def add(name: str, run: Callable[..., Any], *inputs: str) -> None:
        found.append(Program(name, run, inputs))

    x, xy = ("f 4 6",), ("f 4 6", "f 4 6")
    # pointwise
    add("add", lambda x, y: x + y, *xy)
    add("add alpha", lambda x, y: torch.add(x, y, alpha=3), *xy)
    add("add keywords", lambda x, y: torch.add(input=x, other=y), *xy)
    add("sub", lambda x, y: x.sub(y, alpha=2) - 1, *xy)
    add("rsub", lambda x: 1 - x, *x)
    add("rpow rdiv", lambda x: 2**x + 3 / (x + 10) + (-x), *x)
    add("floor div", lambda x: (x.div(0.3, rounding_mode="floor"), x.detach() // 0.3, x % 0.7), *x)
    add("scaled", lambda x: x * 3 / 2 + x.mul(2.0), *x)
    add("partial reuse", lambda x, y: (x + y + x, x, (x + y) * x), *xy)
    add("broadcast row", lambda x, y: x * y, "f 4 6", "f 6")
    add("broadcast column", lambda x, y: x * y + y, "f 4 6", "f 4 1")
    add("broadcast outer", lambda x, y: x + y, "f 4 1", "f 1 6")
    add("broadcast one", lambda x, y: x * y, "f 1 6", "f 4 6")
    add("broadcast up", lambda x, y: x - y, "f 6", "f 2 4 6")
    add("scalar", lambda x, y: x * y, "f 4 6", "f")
    add("compare", lambda x, y: ((x > y).double() * x, x == x, (x >= 0) & (y < 0)), *xy)
    add("where", lambda x, y, m: torch.where(m, x, y), "f 4 6", "f 4 6", "b 4 6")
    add("where column", lambda x, y, m: torch.where(m, x, y), "f 4 6", "f 6", "b 4 1")
    add("masked fill", lambda x, m: x.masked_fill(m, -1.5), "f 4 6", "b 4 6")
    add("clamp lerp", lambda x, y: torch.lerp(x, y, 0.3).clamp(-0.5, max=0.9), *xy)
    add("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), "f 4 6", "f 4 6", "f 6")
    add(
        "activations",
        lambda x: F.gelu(x) + F.silu(x) + F.leaky_relu(x) + F.softplus(x) + x.tanh() + torch.sigmoid(x),
        *x,
    )
    add("max of two", lambda x, y: (torch.max(x, y), torch.minimum(x, y), x.max(other=y)), *xy)
    add("to", lambda x, y: x.to(torch.float32).double() + x.to(y) + x.type_as(y), *xy)
    add("to long", lambda x: (x * 3).to(torch.long) + x.int(), *x)
    add(
        "likes", lambda x: torch.zeros_like(x) + torch.ones_like(x) * x + x.new_ones(4, 6) + torch.full_like(x, 2.0), *x
    )
    add("in place", _inplace, *xy)
    add("in place view", _inplace_view, *xy)
    add("in place unknown", _inplace_unknown, *xy)
    add("plain changed", _plain_changed, *xy)
    add("glu", lambda x: (F.glu(x, 0), F.glu(x)), *x)
    add("prelu", F.prelu, "f 4 6", "f 6")
    add("item", lambda x: x * x.detach().sum().item() if x.mean() > -9 else x, *x)
    add("tolist", lambda x: torch.tensor(x.tolist()) + float(x.detach().sum()), *x)
    add("hook", _hooked, *x)
    add("detach", lambda x: x.detach() * x + x.data, *x)
    # shapes
    add("view", lambda x: (x.view(2, 2, 6), x.reshape(24), x.view(4, 3, 2), x.view(-1, 3), x.reshape(8, 3)), *x)
    # What computed with such a size in place changed the user's: Longformer's were wrong after the first view.
    add("view tensors", lambda x: [x.view(n, 2, 6) + n for n in [torch.tensor(2)]] + [x.repeat(torch.tensor(2), 1)], *x)
    add("view 3d", lambda x: (x.view(8, 6), x.flatten(1), x.flatten(0, 1), x.reshape(2, 4, 3, 2)), "f 2 4 6")
    add("unflatten", lambda x: (x.unflatten(1, (3, -1)), x.unflatten(0, (2, 2))), *x)
    add(
        "permute",
        lambda x: (x.permute(2, 0, 1), x.transpose(0, -1), x.movedim(0, 2), x.mT, x.swapaxes(1, 2)),
        "f 2 4 6",
    )
    add("rotary", _rotary, "f 2 4 6", "f 4 3")
    add("t", lambda x: (x.t(), x.T, x.H, x.mT, x.mH, x.adjoint()), *x)
    add("unsqueeze", lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1).squeeze(1), x[None, :, None]), *x)
    add("squeeze", lambda x: (x.squeeze(), x.squeeze(1), x.squeeze(0)), "f 4 1 6")
    add("squeeze one", lambda x: x.squeeze(), "f 1 6")
    add("expand", lambda x: (x.expand(3, -1, -1), x.unsqueeze(1).expand(4, 5, 6)), *x)
    add("expand one", lambda x: x.expand(4, 6) * 2, "f 4 1")
    add(
        "repeat",
        lambda x: (x.repeat(2, 1), x.repeat(1, 3), x.tile(2), x.repeat_interleave(2, 1), x.repeat_interleave(3, 0)),
        *x,
    )
    add(
        "split",
        lambda x: (*x.split(2), *x.split([1, 5], 1), *x.chunk(2, -1), *x.tensor_split([1, 3], 1), *x.unbind(1)),
        *x,
    )
    add(
        "cat",
        lambda x, y: (torch.cat([x, y]), torch.cat([x, y], 1), torch.stack([x, y], 1), torch.cat([x, x * 2], -1)),
        *xy,
    )
    add("flip roll", lambda x: (x.flip(0), x.flip((1,)), x.roll(1, 0), torch.roll(x, 2, -1), torch.roll(x, 1)), *x)
    add("triangle", lambda x: (x.tril(), x.triu(1), torch.tril(x, diagonal=-1)), *x)
    add("pad", lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 1, 0)), F.pad(x, (1, 1), value=2.0)), *x)
    add("windows", _windows, "f 2 4 6")
    add("iterate", lambda x: [row * 2 for row in x], *x)
    add("diagonal", lambda x: (x.diagonal(), torch.diag_embed(x)), *x)
    # indices
    add("slices", lambda x: (x[1:3], x[:, 2:], x[..., :3], x[::2], x[:, ::2], x[1], x[:, -1], x[2, 3], x[-1, 1:4]), *x)
    add("index rows", lambda x: (x[ROWS], x[:, ROWS], x[ROWS, ROWS], x[[0, 2]], x[:, [1, 5]]), *x)
    add("index mask", lambda x: (x[MASK], x[MASK, 2], x[:, MASK.repeat(2)[:6]]), *x)
    add("index 3d", lambda x: (x[:, ROWS[:3, None], ROWS[None, :2]], x[0, :, ROWS], x[:, 1, None, ROWS]), "f 2 4 6")
    add("index apart", lambda x: (x[ROWS % 2, :, ROWS], x[ROWS % 2, None, ROWS % 4], x[:, ROWS % 4]), "f 2 4 6")
    add("index value", lambda x: x[x > 0], *x)
    add("index by split", lambda t, i: t[i], "f 5 3", "i5 4 2")
    add("index both", lambda x, i: x[i], "f 4 6", "i4 5")
    add("arange index", lambda x, y: x[torch.arange(x.shape[0]), y], "f 4 6", "i6 4")
    add("set", _set, *xy)
    add("set picked", _set_picked, *xy)
    add("select narrow", lambda x: (x.select(1, 2), x.select(0, -1), x.narrow(1, 1, 3), x.narrow(0, 0, 2)), *x)
    add("index_select", lambda x: (x.index_select(0, ROWS), torch.index_select(x, -1, ROWS)), *x)
    add("index_select split", lambda t, i: (t.index_select(0, i), t.index_select(1, i % 3)), "f 5 3", "i5 4")
    add("gather", lambda x, i: (x.gather(1, i), torch.gather(x, 0, i % 4)), "f 4 6", "i6 4 6")
    add("gather few", lambda x, i: x.gather(1, i), "f 4 6", "i6 4 2")
    add("scatter", lambda x, y: (x.scatter(1, y, 0.5), x.scatter(1, y, 2 * x[:, :1])), "f 4 6", "i6 4 1")
    add("scatter add", lambda x, i, y: (x.scatter_add(1, i, y), x.scatter_add(0, i % 4, y)), "f 4 6", "i6 4 6", "f 4 6")
    add("scatter in place", lambda x, i: (x.scatter_(1, i, 1.0), x), "f 4 6", "i6 4 1")
    add("index_add", lambda x, y: (x.index_add(0, ROWS[1:], y[:4]), x.index_add(1, ROWS, y[:, :5], alpha=2)), *xy)
    add("one hot", lambda i: (F.one_hot(i, 5), F.one_hot(i)), "i5 4 3")
    add("masked select", lambda x, m: x.masked_select(m), "f 4 6", "b 4 6")
    add("take along", lambda x, i: torch.take_along_dim(x, i, 1), "f 4 6", "i6 4 3")
    # products
    add("linear", F.linear, "f 4 6", "f 5 6", "f 5")
    add("linear 3d", lambda x, w: F.linear(input=x, weight=w), "f 3 4 6", "f 5 6")
    add("pair", lambda x, v, w: F.linear(F.linear(x, v).relu(), w) + x, "f 4 6", "f 5 6", "f 6 5")
    add("matmul", lambda x, y: x @ y, "f 4 6", "f 6 5")
    add("matmul batch", torch.matmul, "f 3 4 6", "f 3 6 5")
    add("matmul spread", torch.matmul, "f 3 4 6", "f 6 5")
    add("matmul up", torch.matmul, "f 4 6", "f 3 6 5")
    add("matmul one", torch.matmul, "f 1 4 6", "f 3 6 5")
    add("matmul vector", lambda x, v: x @ v, "f 4 6", "f 6")
    add("vector matmul", lambda v, x: v @ x, "f 4", "f 4 6")
    add("dot", lambda x, y: x @ y + torch.dot(x, y), "f 6", "f 6")
    add("bmm", torch.bmm, "f 3 4 6", "f 3 6 5")
    add("addmm", lambda c, x, y: torch.addmm(c, x, y, beta=0.5, alpha=2), "f 5", "f 4 6", "f 6 5")
    add("baddbmm", lambda c, x, y: torch.baddbmm(c, x, y, alpha=0.3), "f 3 4 5", "f 3 4 6", "f 3 6 5")
    add("einsum experts", lambda x, w: torch.einsum("gecm,emh->gech", x, w), "f 2 3 2 4", "f 3 4 5")
    add("einsum dots", lambda x, w: torch.einsum("...i,oi->...o", x, w), "f 2 3 4", "f 5 4")
    add("einsum implicit", lambda x, w: (torch.einsum("ij,jk", x, w), torch.einsum("ij", x)), "f 4 6", "f 6 3")
    add("einsum sum", lambda x: torch.einsum("ij->", x) + torch.einsum("ij->j", x).sum(), *x)
    add("einsum three", lambda x, y, z: torch.einsum("ab,bc,cd->ad", x, y, z), "f 4 3", "f 3 5", "f 5 4")
    add("einsum diagonal", lambda x: torch.einsum("ii->i", x), "f 4 4")
    add("tensordot", lambda x, y: (torch.tensordot(x, y, 1), torch.tensordot(x, y, ([0], [1]))), "f 4 6", "f 6 4")
    add("tensordot last", lambda x, y: torch.tensordot(x, y, ([-1], [-1])), "f 3 4 6", "f 5 6")
    add("inner", lambda x, y: (torch.inner(x, y), x.inner(y[0])), "f 4 6", "f 5 6")
    add("bilinear", F.bilinear, "f 4 3", "f 4 2", "f 5 3 2", "f 5")
    add("outer", torch.outer, "f 4", "f 6")
    # layers
    add("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), "f 2 4 5", "f 6 4 3", "f 6")
    add("conv2d", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), "f 3 4 5 5", "f 6 4 3 3", "f 6")
    add("conv2d groups", lambda x, w, b: F.conv2d(x, w, b, groups=2), "f 2 4 5 4", "f 6 2 3 3", "f 6")
    add("conv2d depth", lambda x, w: F.conv2d(x, w, padding="same", groups=6), "f 2 6 4 4", "f 6 1 3 3")
    add("conv transpose", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), "f 2 4 3 3", "f 4 6 2 2", "f 6")
    add("conv3d", F.conv3d, "f 2 3 3 3 3", "f 4 3 2 2 2", "f 4")
    add("pools", lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1)), "f 2 4 4 4")
    add("pools 1d", lambda x: (F.max_pool1d(x, 2), F.adaptive_max_pool1d(x, 2), F.avg_pool1d(x, 3)), "f 2 4 6")
    add("pool indices", lambda x: F.max_pool2d(x, 2, return_indices=True), "f 2 4 4 4")
    add("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), "f 2 3 4 4")
    add("unfold", lambda x: (F.unfold(x, 2), x.unfold(1, 2, 1), x.unfold(0, 2, 1)), "f 2 3 4 4")
    add("embedding", lambda i, w: F.embedding(i, w), "i7 4 3", "f 7 5")
    add("embedding padding", lambda i, w: F.embedding(i, w, padding_idx=-2), "i7 4 3", "f 7 5")
    add("embedding freq", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), "i3 4 3", "f 3 5")
    add("embedding sum", lambda i, w: F.embedding_bag(i, w, mode="sum"), "i7 4 3", "f 7 5")
    # attention
    add("sdpa", F.scaled_dot_product_attention, "f 2 4 3 5", "f 2 4 3 5", "f 2 4 3 5")
    add("sdpa causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *["f 2 4 3 5"] * 3)
    add("sdpa mask", F.scaled_dot_product_attention, *["f 2 4 3 5"] * 3, "f 2 1 3 3")
    for heads in (1, 2):
        grouped = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
        add(f"sdpa grouped {heads}", grouped, "f 2 4 3 5", f"f 2 {heads} 3 5", f"f 2 {heads} 3 5")
    add("sdpa 3d", F.scaled_dot_product_attention, "f 4 3 5", "f 4 3 5", "f 4 3 5", "b 3 3")
    # norms
    add("layer norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), "f 3 4 6", "f 6", "f 6")
    add("layer norm two", lambda x: F.layer_norm(x, [4, 6], eps=1e-3), "f 3 4 6")
    add("rms norm", lambda x, w: F.rms_norm(x, (6,), w, 1e-6), "f 3 4 6", "f 6")
    add("group norm", lambda x, w, b: (F.group_norm(x, 3, w, b), F.group_norm(x, 1)), "f 4 6 5", "f 6", "f 6")
    add("instance norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), "f 4 6 5", "f 6", "f 6")
    add("batch norm", lambda x, w, b: _batch_norm(x, w, b, True), "f 4 6 3", "f 6", "f 6")
    add("batch norm eval", lambda x, w, b: _batch_norm(x, w, b, False), "f 4 6 3", "f 6", "f 6")
    add("normalize", lambda x: (F.normalize(x), F.normalize(x, dim=0)), *x)
    add("normalize zero", lambda x: (F.normalize(x * 0), (x * 0).norm(dim=1), (x * 0).norm()), *x)
    # reductions
    add("softmax", lambda x: (x.softmax(0), F.softmax(x, -1), torch.log_softmax(x, 1), F.log_softmax(x, dim=0)), *x)
    add(
        "softmax dtype",
        lambda x: torch.softmax(x.float(), -1, torch.float64) + F.softmax(x.float(), 0, dtype=torch.float64),
        *x,
    )
    add(
        "sums",
        lambda x: (
            x.sum(),
            x.sum(0),
            x.sum(-1, keepdim=True),
            torch.sum(x, dim=(0, 1)),
            x.mean(),
            x.mean(1),
            x.sum(axis=0),
        ),
        *x,
    )
    add("sums 3d", lambda x: (x.sum((0, 2)), x.mean((1, 2), True), x.mean(dim=[0])), "f 2 4 6")
    add(
        "sum bools",
        lambda x: ((x > 0).sum(0), (x > 0).sum(), (x > 0).double().mean(), (x > 0).any(1), (x > -9).all()),
        *x,
    )
    add("nansum", lambda x: (torch.where(x > 0, x, torch.nan).nansum(0), torch.where(x > 0, x, torch.nan).nansum()), *x)
    add(
        "var",
        lambda x: (
            x.var(),
            x.var(0),
            x.var(1, unbiased=False),
            x.std(0),
            torch.var(x, dim=1, correction=0, keepdim=True),
        ),
        *x,
    )
    add("var mean", lambda x: (*torch.var_mean(x, 1), *torch.var_mean(x, dim=0, correction=0)), *x)
    add(
        "extremes",
        lambda x: (x.amax(0), x.amin(1, True), *x.max(1), *x.min(0), *torch.max(x, dim=1, keepdim=True), x.max()),
        *x,
    )
    add(
        "best",
        lambda x: (
            x.argmax(1),
            x.argmax(0, keepdim=True),
            x.argmin(1),
            x.argmax(),
            *x.topk(2, 1),
            *torch.topk(x, 2, dim=0, largest=False),
        ),
        *x,
    )
    add("logsumexp", lambda x: (x.logsumexp(0), x.logsumexp(1, True), torch.logsumexp(x, (0, 1))), *x)
    add("logsumexp inf", lambda x: x.masked_fill(x.detach() < 0.5, -torch.inf).logsumexp(0), *x)
    add(
        "norms",
        lambda x: (
            x.norm(),
            x.norm(dim=0),
            x.norm(1, 1),
            torch.linalg.vector_norm(x, dim=1),
            x.norm(3, 0),
            x.norm(p=2, dim=1, keepdim=True),
            torch.norm(x, dim=1),
            torch.linalg.norm(x),
            torch.linalg.norm(x, 1, 0),
            torch.linalg.norm(x, 2),
        ),
        *x,
    )
    add(
        "running",
        lambda x: (
            x.cumsum(0),
            x.cumsum(1),
            x.cumprod(1),
            *x.sort(0),
            x.argsort(1),
            x.prod(0),
            *x.median(1),
            *x.cummax(0),
        ),
        *x,
    )
    # Several at once are a dim before all others: the rows of the result were taken for those of the value.
    add("quantiles", lambda x: (x.quantile(0.3, 0), x.nanquantile(q=x.new_tensor([0.1, 0.7]), dim=1)), *x)
    add("sort", lambda x: (*x.sort(descending=True), *torch.sort(x, 0, True)), *x)
    # losses
    add("cross entropy", F.cross_entropy, "f 4 6", "i6 4")
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": 2}
        add(
            f"cross entropy {reduction}",
            lambda x, t, w, o=options: F.cross_entropy(x, t, w.detach(), **o),
            "f 4 6",
            "i6 4",
            "p 6",
        )
        add(
            f"nll {reduction}",
            lambda x, t, r=reduction: F.nll_loss(x.log_softmax(1), t, ignore_index=1, reduction=r),
            "f 4 6",
            "i6 4",
        )
        add(f"mse {reduction}", lambda x, y, r=reduction: F.mse_loss(x, y, reduction=r), *xy)
        # Means of mse and l1 divide by the sum of the weights, that of huber by the count: once all three did.
        for loss in (F.mse_loss, F.l1_loss, F.huber_loss):
            weighted = functools.partial(loss, reduction=reduction)
            add(
                f"{loss.__name__} weights {reduction}",
                lambda x, y, w, f=weighted: f(x, y, weight=w.exp()),
                *xy,
                "p 4 6",
            )
    add("cross entropy pixels", lambda x, t: F.cross_entropy(x, t, ignore_index=1), "f 2 5 3 2", "i5 2 3 2")
    add("cross entropy one", F.cross_entropy, "f 6", "i6")
    add("cross entropy soft", lambda x, t: F.cross_entropy(x, t.softmax(1), label_smoothing=0.2), "f 4 6", "f 4 6")
    add(
        "cross entropy soft weights",
        lambda x, t, w: F.cross_entropy(x, t.detach(), w.detach(), reduction="none"),
        "f 4 6",
        "p 4 6",
        "p 6",
    )
    add("nll weights", lambda x, t, w: F.nll_loss(x, t, w.detach()), "f 4 6", "i6 4", "p 6")
    add("losses", lambda x, y: F.l1_loss(x, y) + F.smooth_l1_loss(x, y) + F.huber_loss(x, y, delta=0.5), *xy)
    add(
        "bce logits",
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=w.detach()),
        "f 4 6",
        "f 4 6",
        "p 6",
    )
    add("bce", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), *xy)
    add("kl", lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), *xy)
    add("cosine", lambda x, y: (F.cosine_similarity(x, y), F.cosine_similarity(x, y, dim=0)), *xy)
    add("cosine loss", lambda x, y: F.cosine_embedding_loss(x, y, torch.tensor([1, -1, 1, 1])), *xy)
    add(
        "accuracy",
        lambda x, t: ((x.argmax(1) == t).double().mean(), (x.topk(2, 1).indices == t[:, None]).any(1).sum()),
        "f 4 6",
        "i6 4",
    )
    add(
        "margin",
        lambda x, w, t: F.cross_entropy(_arc(F.linear(F.normalize(x), F.normalize(w)), t), t),
        "f 4 3",
        "f 6 3",
        "i6 4",
    )
    add("penalty", _gradients, "f 4 6", "f 6 3")
    return found


def _arc(cos: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    hot = F.one_hot(target, cos.shape[1]).bool()
    return torch.where(hot, torch.cos(torch.acos(cos.clamp(-0.99, 0.99)) + 0.3), cos) * 8
