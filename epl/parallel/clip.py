"""Gradient clipping by the norm over all ranks, and torch's own clipping functions taught sparse gradients.

    clip_grad_norm_    torch's function, plus process groups over which *different* parameters live (pipe, tensor)
    total_norm         the norm it clips by
    install_clipping   lets torch.nn.utils.clip_grad_norm_, get_total_norm and clip_grad_value_, however they were
                       imported, take sparse gradients (torch 2.13 has no norm and no clamp for them)

Ranks that hold the *same* reduced gradients (data parallelism) need no group here: each computes the same norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

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
    total = _total(gradients, norm_type, groups)
    if error_if_nonfinite and not bool(total.isfinite()):  # after the ranks have met, so all of them raise
        raise NonFiniteNormError(
            f"the total norm of order {norm_type:g} of the gradients is {total.item()}, expected a finite number. Find "
            "its cause (torch.autograd.set_detect_anomaly), or pass error_if_nonfinite=False to scale by it all the same."
        )
    _scale(gradients, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0))
    return _presented(total, gradients)


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor], norm_type: float = 2.0, groups: Sequence[dist.ProcessGroup] = ()) -> Tensor:
    """The norm of all gradients here and on the other ranks of `groups`, as if they were one vector."""
    listed = list(gradients)
    return _presented(_total(listed, norm_type, groups), listed)


def install_clipping() -> Callable[[], None]:
    """Let torch's clipping functions take sparse gradients; call what is returned to end that.

    May be installed several times (once for each model); torch is itself again when the last one has been undone.
    """
    _patch.users += 1
    if _patch.users == 1:
        _patch.apply()
    undone = False

    def undo() -> None:
        nonlocal undone
        if not undone:
            undone = True
            _patch.users -= 1
            if _patch.users == 0:
                _patch.remove()

    return undo


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


def _total(gradients: list[Tensor], norm_type: float, groups: Sequence[dist.ProcessGroup]) -> Tensor:
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
    total = _norm(gradients, norm_type)
    for group in groups:
        device = _meeting_device(group)
        norms = torch.empty(dist.get_world_size(group), dtype=torch.float64, device=device)
        dist.all_gather_single(norms, total.to(device).view(1), group=group)
        total = _vector_norm(norms, norm_type)
    return total


def _norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    device = gradients[0].device
    parts = _by_kind([_dense_part(g) for g in gradients])
    norms = [norm.to(device, torch.float64) for part in parts for norm in _torch.foreach_norm(part, norm_type)]
    return _vector_norm(torch.stack(norms), norm_type)


def _vector_norm(values: Tensor, norm_type: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, norm_type)
    return norm


def _dense_part(gradient: Tensor) -> Tensor:
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


def _presented(total: Tensor, gradients: list[Tensor]) -> Tensor:
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


# ---- torch's functions ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Spread:
    """Parameters of which every rank of a group holds different ones (the stages of a pipeline)."""

    parameters: tuple[nn.Parameter, ...]
    groups: tuple[dist.ProcessGroup, ...]
    elsewhere: frozenset[int]
    """By id: parameters that another rank holds as well, and counts."""

    def among(self, gradients: list[Tensor]) -> list[Tensor]:
        """Those of the gradients that belong to these parameters."""
        own = {id(p.grad) for p in self.parameters if p.grad is not None}
        return [g for g in gradients if id(g) in own]

    def elsewhere_now(self) -> set[int]:
        """By id: the gradients that another rank counts."""
        return {id(p.grad) for p in self.parameters if id(p) in self.elsewhere}


def count_over(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, *, counted_elsewhere: Iterable[int] = ()
) -> Callable[[], None]:
    """From now on torch's clipping functions give the norm over all ranks of the group for these parameters; the undo.

    Those counted elsewhere (by id) are copies of a weight that another rank, or another parameter here, stands for.
    """
    spread = _Spread(tuple(parameters), () if group is None else (group,), frozenset(counted_elsewhere))
    remove = install_clipping()
    _patch.spreads.append(spread)

    def undo() -> None:
        if spread in _patch.spreads:
            _patch.spreads.remove(spread)
        remove()

    return undo


class _Patch:
    """torch's two functions that fail on sparse gradients, replaced; all but the sparse ones is left to torch's own.

    Scaling by a norm works on sparse gradients in torch, so it is left alone.
    """

    def __init__(self) -> None:
        self.users = 0
        self.spreads: list[_Spread] = []
        self._seams = _torch.clipping_seams()
        self._torch_norm, self._torch_value = (seam.cell_contents for seam in self._seams)

    def apply(self) -> None:
        self._seams[0].cell_contents, self._seams[1].cell_contents = self._norm, self._value

    def remove(self) -> None:
        self._seams[0].cell_contents, self._seams[1].cell_contents = self._torch_norm, self._torch_value

    def _norm(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for spread in self.spreads:
            # A rank whose part has no gradient now (frozen) is asked for the norm of nothing, and takes part all the same.
            if not listed or spread.among(listed):
                return self._norm_over(spread, listed, float(norm_type), error_if_nonfinite)
        parts = [_dense_part(t) if t.is_sparse else t for t in listed]
        norm: Tensor = self._torch_norm(parts, norm_type, error_if_nonfinite, foreach)
        return norm

    def _norm_over(self, spread: _Spread, listed: list[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Of parameters that are spread over a group, the norm of all of them; of others, which all ranks hold, once."""
        own = {id(t) for t in spread.among(listed)}
        counted = [t for t in listed if id(t) in own and id(t) not in spread.elsewhere_now()]
        total = _total(counted, norm_type, spread.groups)
        rest = [t for t in listed if id(t) not in own]
        if rest:
            total = _vector_norm(torch.stack([total, _norm(rest, norm_type).to(total.device)]), norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise NonFiniteNormError(
                f"the total norm (order {norm_type}) of the gradients of all ranks is {total.item()}"
            )
        return _presented(total, listed)

    def _value(self, parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        sparse = [p.grad for p in listed if p.grad is not None and p.grad.is_sparse]
        dense = [p for p in listed if p.grad is not None and not p.grad.is_sparse]
        if dense or not sparse:
            self._torch_value(dense, clip_value, foreach)
        for gradient in sparse:
            if not gradient.is_coalesced():
                gradient.copy_(gradient.coalesce())  # in place: others may hold this very tensor
            gradient.values().clamp_(-float(clip_value), float(clip_value))


_patch = _Patch()
