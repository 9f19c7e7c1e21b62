"""Gradients that are sparse (`nn.Embedding(sparse=True)`) travel as rows and stay sparse.

Gloo can add up sparse tensors, NCCL cannot; gathering indices and values works on both, and sends only what is there.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.distributed as dist
from torch import nn


class Kind(IntEnum):
    """What a rank holds for a parameter; ordered so that the largest over ranks says what to do."""

    NOTHING = 0
    SPARSE = 1
    DENSE = 2  # somebody's gradient is dense (a tied output layer): then all add up dense ones


def reduce_sparse(parameters: list[nn.Parameter], group: dist.ProcessGroup, scales: list[float]) -> None:
    """Replace each parameter's gradient by the sum over the group of each rank's, times its scale; None where no rank has one."""
    if not parameters:
        return
    device = parameters[0].device
    held = [_coalesced(p) for p in parameters]
    own = torch.tensor([[_kind(g), g.values().shape[0] if _kind(g) == Kind.SPARSE else 0] for g in held], device=device)  # type: ignore[union-attr]
    everyone = torch.empty(dist.get_world_size(group), *own.shape, dtype=own.dtype, device=device)
    dist.all_gather_single(everyone.view(-1), own.view(-1), group=group)
    kinds = everyone[:, :, 0].max(dim=0).values.tolist()
    counts = everyone[:, :, 1].t().tolist()
    for parameter, gradient, kind, rows, scale in zip(parameters, held, kinds, counts, scales, strict=True):
        if kind == Kind.DENSE:
            parameter.grad = _add_up_dense(parameter, gradient, group, scale)
        elif kind == Kind.SPARSE:
            parameter.grad = _add_up_sparse(parameter, gradient, rows, group, scale)


def sparse_parameters(module: nn.Module) -> set[int]:
    """The ids of the parameters that will have sparse gradients, as far as their modules say so."""
    return {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}


def _kind(gradient: torch.Tensor | None) -> Kind:
    if gradient is None:
        return Kind.NOTHING
    return Kind.SPARSE if gradient.is_sparse else Kind.DENSE


def _coalesced(parameter: nn.Parameter) -> torch.Tensor | None:
    gradient = parameter.grad
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def _add_up_dense(
    parameter: nn.Parameter, gradient: torch.Tensor | None, group: dist.ProcessGroup, scale: float
) -> torch.Tensor:
    if gradient is None:
        dense = torch.zeros_like(parameter)
    else:
        dense = gradient.to_dense() if gradient.is_sparse else gradient.clone()
    dense = dense.contiguous().mul_(scale)
    dist.all_reduce(torch.view_as_real(dense) if dense.is_complex() else dense, group=group)
    return dense


def _add_up_sparse(
    parameter: nn.Parameter, gradient: torch.Tensor | None, rows: list[int], group: dist.ProcessGroup, scale: float
) -> torch.Tensor:
    """Every rank's rows end to end, padded to the longest for the journey, then equal indices added up."""
    longest, ranks = max(rows), len(rows)
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
            torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device),
            parameter.shape,
            check_invariants=False,
        ).coalesce()
    indices, values = gradient.indices(), gradient.values() * scale
    all_indices = _gather_padded(indices.t().contiguous(), longest, ranks, group)
    all_values = _gather_padded(values.contiguous(), longest, ranks, group)
    kept_indices = torch.cat([all_indices[r, :n] for r, n in enumerate(rows)]).t()
    kept_values = torch.cat([all_values[r, :n] for r, n in enumerate(rows)])
    result = torch.sparse_coo_tensor(kept_indices, kept_values, gradient.shape, check_invariants=False)
    return result.coalesce()


def _gather_padded(rows: torch.Tensor, longest: int, ranks: int, group: dist.ProcessGroup) -> torch.Tensor:
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(ranks, longest, *rows.shape[1:])
    dist.all_gather_single(gathered.view(-1), padded.view(-1), group=group)
    return gathered
