"""Gradient clipping by the norm over all ranks.

    clip_grad_norm_    torch's function, plus process groups over which *different* parameters live (pipe, tensor)
    total_norm         the norm it clips by

Ranks that hold the *same* reduced gradients (data parallelism) need no group here: each computes the same norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epl import _torch
from epl.errors import NonFiniteNormError, UsageError, list_problems


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    groups: Sequence[dist.ProcessGroup] = (),
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most `max_norm`; returns the norm before that.

    `groups` are the process groups over which different parameters live, one for each such axis; every rank of them must
    call, also one that has no gradient. A parameter that several ranks of a group hold whole counts once for each: pass
    it on one of them only. Each parameter counts once here, however often it is listed.
    """
    gradients = _gradients(parameters)
    total = norm_over(gradients, norm_type, groups)
    if error_if_nonfinite and not bool(total.isfinite()):  # after the ranks have met, so all of them raise
        raise NonFiniteNormError(
            f"the total norm of order {norm_type:g} of the gradients is {total.item()}, expected a finite number. Find "
            "its cause (torch.autograd.set_detect_anomaly), or pass error_if_nonfinite=False to scale by it all the same."
        )
    _scale(gradients, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0))
    return presented(total, gradients)


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor], norm_type: float = 2.0, groups: Sequence[dist.ProcessGroup] = ()) -> Tensor:
    """The norm of all gradients here and on the other ranks of `groups`, as if they were one vector."""
    listed = list(gradients)
    return presented(norm_over(listed, norm_type, groups), listed)


# ---- the norm ------------------------------------------------------------------------------------------------------


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each parameter's gradient once."""
    if isinstance(parameters, nn.Module):
        raise UsageError("clip_grad_norm_ takes parameters, found a module: pass model.parameters()")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if strangers := {type(p).__name__ for p in listed if not isinstance(p, Tensor)}:
        raise UsageError(f"clip_grad_norm_ takes tensors, found {', '.join(sorted(strangers))} among them")
    once = {id(p): p for p in listed}.values()
    return [p.grad for p in once if p.grad is not None]


def norm_over(gradients: list[Tensor], norm_type: float, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The norm in double precision, the same bits on all ranks.

    Norms are gathered rather than added up by the backend: with its maximum, a nan may get lost.
    """
    norm_type = float(norm_type)
    problems = []
    if not norm_type > 0:
        problems.append(f"norm_type must be positive or infinite, found {norm_type}")
    if isinstance(groups, dist.ProcessGroup):
        problems.append("groups must be a sequence of process groups, found one group: pass (group,)")
    elif strangers := {type(g).__name__ for g in groups if not isinstance(g, dist.ProcessGroup)}:
        problems.append(f"groups must be process groups that this rank is in, found {', '.join(sorted(strangers))}")
    if problems:
        raise UsageError(list_problems("the total norm of gradients", problems))
    total = norm_of(gradients, norm_type)
    for group in groups:
        device = _meeting_device(group)
        norms = torch.empty(dist.get_world_size(group), dtype=torch.float64, device=device)
        dist.all_gather_single(norms, total.to(device).view(1), group=group)
        total = vector_norm(norms, norm_type)
    return total


def norm_of(gradients: list[Tensor], norm_type: float) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    device = gradients[0].device
    parts = _by_kind([dense_part(g) for g in gradients])
    norms = [norm.to(device, torch.float64) for part in parts for norm in _torch.foreach_norm(part, norm_type)]
    return vector_norm(torch.stack(norms), norm_type)


def vector_norm(values: Tensor, norm_type: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, norm_type)
    return norm


def dense_part(gradient: Tensor) -> Tensor:
    """A dense tensor with the same norm: of a sparse one the values, equal indices added up."""
    part = gradient.coalesce().values() if gradient.is_sparse else gradient
    return part if part.numel() else part.new_zeros(1)  # the largest of nothing is an error


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Lists alike in device and dtype: only these are fast in one call."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def _meeting_device(group: dist.ProcessGroup) -> torch.device:
    """Where ranks of the group exchange numbers: known from the group alone, as a rank may have no gradient."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and backends.get(accelerator.type, "gloo") != "gloo":
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def presented(total: Tensor, gradients: list[Tensor]) -> Tensor:
    """The norm where, and as precise as, the gradients are; at least float32."""
    dtype = torch.float32
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype.to_real())
    return total.to(gradients[0].device if gradients else total.device, dtype)


def _scale(gradients: list[Tensor], coefficient: Tensor) -> None:
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(coefficient.to(gradient.device))
    for alike in _by_kind([g for g in gradients if not g.is_sparse]):
        dtype = torch.promote_types(alike[0].dtype.to_real(), torch.float32)
        _torch.foreach_mul_(alike, coefficient.to(alike[0].device, dtype))
