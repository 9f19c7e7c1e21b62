"""Numbers over all ranks: what one device would have computed on the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from epl.cluster.communication import Job, speaking
from epl.data import active_share
from epl.env import Env
from epl.errors import UsageError
from epl.parallel.reducer import averaged
from epl.parallel.split.value import SplitTensor, whole
from epl.train.lazy import LazyTensor, node_of
from epl.train.lazy.read import read
from epl.train.replicas import Replicas


def num_replicas() -> int | float:
    """How many model replicas there are, as planned by the last `epl.parallelize`; 1 before it.

    In an uneven tail, where replicas are weighted by their rows, it is the number of replicas *like this one* that would
    make up the global batch (5 rows of which this one has 2: 2.5). So a loss that is to be divided by a count over all
    replicas is exact there too, where every rank has rows of its own replica (`replicate(1)`):

        loss = loss_sum * epl.num_replicas() / epl.global_sum(count)

    With `replicate(k)` every rank has a share of them: take `loss_sum / rows * epl.global_sum(rows) / epl.global_sum(count)`.
    """
    plan = Env.get().plan
    if plan is None:
        return 1
    share = active_share()
    if share is None or share.even or share.padded or plan.parts > 1 or plan.settings.gradients_reduce_method == "sum":
        return plan.num_replicas
    return share.total / share.own


def global_mean(value: torch.Tensor | float) -> torch.Tensor:
    """The mean over all rows of the global batch, from each rank's mean over its own rows; on every rank."""
    tensor, job = _prepare(value, "epl.global_mean")
    if job is None:
        return tensor
    if not tensor.is_floating_point() and not tensor.is_complex():
        tensor = tensor.to(torch.get_default_dtype())
    share = active_share()
    weight = share.weight if share is not None else 1.0
    found = _add_up(tensor * (weight / job.world_size), job, "epl.global_mean")
    averaged[id(found)] = found
    return found


def global_sum(value: torch.Tensor | float) -> torch.Tensor:
    """The sum over all ranks that see rows of their own; on every rank. A rank that only repeats rows adds nothing."""
    tensor, job = _prepare(value, "epl.global_sum")
    if job is None:
        return tensor
    share = active_share()
    if (share is not None and share.padded) or job.rank not in _order_of_rows(job.world_size):
        tensor = torch.zeros_like(tensor)  # it only repeats rows of another rank
    return _add_up(tensor, job, "epl.global_sum")


def gather_for_metrics(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks along dim 0 in the order of the global batch, repeated rows left out; on every rank."""
    tensor, job = _prepare(tensor, "epl.gather_for_metrics")
    if job is None:
        return tensor
    if tensor.dim() == 0:
        raise UsageError(
            "epl.gather_for_metrics takes a tensor with rows along dim 0, found a scalar: use epl.global_mean"
        )
    share = active_share()
    if share is not None and share.padded:
        tensor = tensor[:0]
    shapes = job.gather("epl.gather_for_metrics", (tuple(tensor.shape), tensor.dtype))
    rows = [shape[0] for shape, _ in shapes]  # type: ignore[misc,has-type]
    if len({(shape[1:], dtype) for shape, dtype in shapes}) != 1:  # type: ignore[misc,has-type]
        found = "\n".join(f"  rank {rank}: {shape}" for rank, shape in enumerate(shapes))
        raise UsageError(f"epl.gather_for_metrics: only dim 0 may differ between ranks, found\n{found}")
    padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    everyone = tensor.new_empty(job.world_size, *padded.shape)
    with speaking(job, "epl.gather_for_metrics"):
        dist.all_gather_single(everyone.view(-1), padded.view(-1))
    order = _order_of_rows(job.world_size)
    return torch.cat([everyone[rank, : rows[rank]] for rank in order])


@contextlib.contextmanager
def no_sync(*models: nn.Module) -> Iterator[None]:
    """Backward passes inside only accumulate (of these models, or of all); the next one outside sends everything."""
    chosen = Replicas.all()
    if models:
        found = [(model, Replicas.of(model)) for model in models]
        strange = [type(model).__name__ for model, replicas in found if replicas is None]
        if strange:
            raise UsageError(f"epl.no_sync takes models given to epl.parallelize; {', '.join(strange)} was not")
        chosen = [replicas for _, replicas in found if replicas is not None]
    with contextlib.ExitStack() as stack:
        for replicas in chosen:
            stack.enter_context(replicas.no_sync())
        yield


def _prepare(value: torch.Tensor | float, what: str) -> tuple[torch.Tensor, Job | None]:
    env = Env.get()
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, device=env.cluster.device)
    job = env.job(what)
    if isinstance(value, LazyTensor):
        value = read([node_of(value)], what)[0]
    value = value.detach()
    if isinstance(value, SplitTensor):
        # By all ranks alike, and now: what a rank without rows does with it below, the others do not.
        job.meet(f"{what} of a value that is split").wait()
        value = cast(torch.Tensor, whole(value, what))
    return value, job if job.world_size > 1 else None


def _add_up(tensor: torch.Tensor, job: Job, what: str) -> torch.Tensor:
    job.meet(what).wait()
    total = tensor.clone(memory_format=torch.contiguous_format)
    with speaking(job, what):
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
    return total


def _order_of_rows(ranks: int) -> list[int]:
    """The ranks in the order in which they divide the global batch; each share once."""
    plan = Env.get().plan
    if plan is None:
        return list(range(ranks))
    first: dict[tuple[int, int], int] = {}
    for rank, share in enumerate(plan.data_shares):
        first.setdefault((share.replica, share.part), rank)
    return [first[key] for key in sorted(first)]
