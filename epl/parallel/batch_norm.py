"""Batch norm over the rows of all ranks: a model in data parallelism normalises as one device with the whole batch would.

    rank r:  x ── own mean, M2, count ──[1]── merged over ranks ──[2]── running statistics, y ──[3]── backward: dx

    [1] One all-gather. A rank whose rows do not count (padding at weight 0) sends count 0, and only receives.
    [2] Chan's formula: exact for unlike counts, and without the cancellation that sums of squares suffer from. Every
        rank computes it from the same numbers in the same order, so statistics are the same bits everywhere.
    [3] y on every rank depends on x here, so backward needs the sums of dy and dy·x̂ over ranks: one all-reduce.

[Note: factors.] The reducer multiplies the parameter gradients of rank s by f_s and averages over the N ranks: what is
differentiated is J = Σ f_s·L_s / N, while autograd on rank s works with dy_s = dL_s/dy. Sums over ranks are therefore
taken of f_s·dy_s, and what this rank returns is dJ/dx · N / f_r, since everything below is multiplied by f_r / N later.

torch's SyncBatchNorm has [1] to [3] for GPUs only, knows no factors, and replaces modules; so this one is by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from epl import _torch
from epl.errors import DataError, UsageError, list_problems
from epl.graph.record.leaf import on_stand_ins


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """Who computes statistics together, and what this rank's rows weigh."""

    group: dist.ProcessGroup
    factor: Callable[[], float]
    counted: Callable[[], bool]
    guard: Callable[[str], AbstractContextManager[None]]


class SyncedBatchNorms:
    """The batch norms that `sync_batch_norm` synchronised."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)

    def undo(self) -> None:
        """Make them local again, of the user's own class."""
        for module in self.modules:
            if _ranks_of(module) is not None:
                module.__class__ = vars(type(module))["_epl_user_class"]
        self.modules = []


def sync_batch_norm(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    factor: Callable[[], float] = lambda: 1.0,
    counted: Callable[[], bool] = lambda: True,
    guard: Callable[[str], AbstractContextManager[None]] = lambda what: contextlib.nullcontext(),
) -> SyncedBatchNorms:
    """Let every batch norm inside `module` use the statistics of all ranks' rows; the result's `undo()` ends that.

    The modules stay the same objects with the same names, hooks and state; copies and pickles of them are local ones of
    the user's class. `factor` is this rank's factor in the gradient reducer (asked in every backward pass), `counted`
    says whether the rows of this forward are real ones (asked in every forward).

    In training mode every forward communicates, under `torch.no_grad()` too, and so does its backward: all ranks of the
    group must run the same batch norms in the same order. Evaluation mode never communicates. Where gradients travel
    during backward, as with `GradientReducer`, pass a group that only batch norm uses: on one and the same group, ranks
    with unlike sets of used parameters would mix up the two kinds of messages.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"sync_batch_norm takes an nn.Module first, found {type(module).__name__}")
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise UsageError("sync_batch_norm needs a process group: call epl.init() first, or pass one")
    found = {name: m for name, m in module.named_modules() if _torch.is_batch_norm(m)}
    if problems := [text for name, m in found.items() if (text := _problem(name, m, group))]:
        raise UsageError(list_problems("sync_batch_norm", problems))
    ranks = _Ranks(group, factor, counted, guard)
    fresh = [m for m in found.values() if _ranks_of(m) is None]
    classes = {cls: _synced_class(cls, ranks) for cls in {type(m) for m in fresh}}
    for m in fresh:
        m.__class__ = classes[type(m)]
    return SyncedBatchNorms(fresh)


def _problem(name: str, module: nn.Module, group: dist.ProcessGroup) -> str | None:
    what = f"{name or 'the module itself'} ({type(module).__name__})"
    ranks = _ranks_of(module)
    if ranks is not None and ranks.group is not group:
        return f"{what} is synchronised over another process group already: call undo() of that one first"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return f"{what} does not know its size yet: run the model once on an example before"
    if "forward" in vars(module):
        return f"{what} has a forward set on the object, which would run unsynchronised: set it after this call"
    return None


def _ranks_of(module: nn.Module) -> _Ranks | None:
    return vars(type(module)).get("_epl_ranks")


# ---- the class of a synchronised batch norm ------------------------------------------------------------------------


class _WithoutOwnSync(nn.SyncBatchNorm):
    """Stands before SyncBatchNorm in the order of classes: its forward refuses CPUs and talks to ranks by itself."""

    forward = nn.BatchNorm1d.forward


def _synced_class(cls: type[nn.Module], ranks: _Ranks) -> type[nn.Module]:
    """A subclass of the user's class that looks like it and runs its forward with batch statistics of all ranks."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        user_forward = super(synced, self).forward  # type: ignore[misc]  # declared as an attribute by torch
        # Recorded, the forward says nothing to other ranks, which may have this recording already, and has no statistics.
        if not self.training or _torch.fake_mode_is_on() or on_stand_ins():
            return user_forward(*args, **kwargs)
        with _Interception(ranks) as interception:
            result = user_forward(*args, **kwargs)
        if not interception.seen:
            warnings.warn(
                f"{cls.__qualname__} did not call torch.nn.functional.batch_norm in training mode, so its statistics, "
                "if it has any, are those of this rank alone although batch norm is to be synchronised",
                stacklevel=2,
            )
        return result

    def reduce_ex(self: nn.Module, protocol: int) -> Any:
        reduced = super(synced, self).__reduce_ex__(1)  # from 2 on pickle insists on the class of self
        if isinstance(reduced, str):
            return reduced
        make, args, *rest = reduced
        return (cls if make is synced else make, tuple(cls if a is synced else a for a in args), *rest)

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce_ex,
        # What ranks say to each other is not for a graph of torch.compile.
        "forward": torch.compiler.disable(forward),  # type: ignore[no-untyped-call]
        "_epl_ranks": ranks,
        "_epl_user_class": cls,
    }
    bases: tuple[type[nn.Module], ...] = (cls,)
    if issubclass(cls, nn.SyncBatchNorm):
        bases = (_WithoutOwnSync,) if cls is nn.SyncBatchNorm else (cls, _WithoutOwnSync)
    synced: type[nn.Module] = types.new_class(cls.__name__, bases, exec_body=lambda body: body.update(namespace))
    return synced


class _Interception(TorchFunctionMode):
    """Inside, `functional.batch_norm` in training mode is ours; all else of a user's forward runs as written.

    So momentum, counters, checks and what subclasses add (an activation, a second branch) remain the user's code.
    """

    def __init__(self, ranks: _Ranks) -> None:
        super().__init__()
        self.ranks, self.seen = ranks, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.seen = True
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        counted = self.ranks.counted()
        with torch.no_grad():
            mean, m2, count = _merged_statistics(input, counted, self.ranks)
            _move(running_mean, mean, momentum)
            _move(running_var, m2 / (count - 1), momentum)
            inverse_std = torch.rsqrt(m2 / count + eps)
        result: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, mean, inverse_std, count, counted, self.ranks
        )
        return result


# ---- the numbers ---------------------------------------------------------------------------------------------------


def _merged_statistics(x: Tensor, counted: bool, ranks: _Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sum of squared distances from it (per channel), and number of values, over the rows of all ranks."""
    channels = x.shape[1]
    own_count = x.shape[0] * math.prod(x.shape[2:]) if counted else 0
    own = torch.zeros(2 * channels + 1, dtype=_statistics_dtype(x), device=x.device)
    if own_count:
        variance, mean = torch.var_mean(x.to(own.dtype), _all_but_channels(x), correction=0)
        torch.cat([mean, variance * own_count, own.new_full((1,), own_count)], out=own)
    everyone = own.new_empty(dist.get_world_size(ranks.group), own.numel())
    with ranks.guard("batch norm, forward"):
        dist.all_gather_single(everyone.view(-1), own, group=ranks.group)
    means, m2s, counts = torch.split(everyone, [channels, channels, 1], dim=1)
    count = counts.sum()
    if own_count <= 1 and count.item() <= 1:  # read only where it can be: on a GPU that waits for the device
        raise DataError(
            "batch norm in training mode: expected more than 1 value per channel over all ranks, found "
            f"{int(count.item())} over {len(everyone)} ranks, input size {tuple(x.shape)} here. Use a larger batch, or "
            'leave the last one out (drop_last=True, or io.uneven_tail = "drop").'
        )
    mean = (means * counts).sum(dim=0) / count
    m2 = (m2s + counts * (means - mean).square()).sum(dim=0)
    return mean, m2, count


def _move(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(torch.lerp(running.to(value.dtype), value, momentum))


class _Normalize(torch.autograd.Function):
    """y = (x - mean) · inverse_std · weight + bias, where mean and inverse_std are functions of every rank's x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse_std: Tensor,
        count: Tensor,
        counted: bool,
        ranks: _Ranks,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse_std, count)
        ctx.counted, ctx.ranks, ctx.bias_dtype = counted, ranks, None if bias is None else bias.dtype
        gain = inverse_std if weight is None else inverse_std * weight
        y = (x - _channels(mean, x)).mul_(_channels(gain, x))
        if bias is not None:
            y += _channels(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        dims = _all_but_channels(x)
        dy = dy.to(mean.dtype)
        normalized = (x - _channels(mean, x)).mul_(_channels(inverse_std, x))
        sums = torch.stack([dy.sum(dims), (dy * normalized).sum(dims)])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = sums[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sums[0].to(ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            factor = ctx.ranks.factor()
            sums = sums * factor if factor else torch.zeros_like(sums)  # at weight 0 even nan counts for nothing
            with ctx.ranks.guard("batch norm, backward"):
                dist.all_reduce(sums, group=ctx.ranks.group)
            if factor:
                if ctx.counted:  # else the statistics do not depend on this x
                    through_mean, through_variance = sums / (count * factor)
                    dy = dy - normalized.mul_(_channels(through_variance, x)).add_(_channels(through_mean, x))
                gain = inverse_std if weight is None else inverse_std * weight
                dx = (dy * _channels(gain, x)).to(x.dtype)
            else:
                dx = torch.zeros_like(x)
        return dx, dweight, dbias, None, None, None, None, None


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel, shaped to meet `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
