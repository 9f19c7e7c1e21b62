"""Torch's own clipping functions, however they were imported, made right for models that epl has spread over ranks.

install_clipping   lets clip_grad_norm_, get_total_norm and clip_grad_value_ of torch.nn.utils take sparse gradients
                   (torch 2.13 has no norm and no clamp for them)
count_over         makes their norms those of all ranks, for parameters of which every rank holds different ones
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epl import _torch
from epl.errors import NonFiniteNormError
from epl.parallel.clip import dense_part, norm_of, norm_over, presented, vector_norm


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


def count_over(
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup | None,
    *,
    counted_elsewhere: Iterable[int] = (),
    others: Iterable[nn.Parameter] = (),
    meet: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """From now on torch's clipping functions give the norm over all ranks of the group for these parameters; the undo.

    Those counted elsewhere (by id) are copies of a weight that another rank, or another parameter here, stands for. `others`
    stand here for parameters that other ranks hold: where one of them is clipped, this rank takes part. `meet` makes sure that
    all ranks have come before one waits for another. Models on the same ranks give the same group: gradients alone do not
    tell a rank that has none of them which model's norm is asked for.
    """
    held = tuple(parameters)
    known = frozenset(map(id, (*held, *others)))
    spread = _Spread(held, () if group is None else (group,), frozenset(counted_elsewhere), known, meet)
    remove = install_clipping()
    _patch.spreads.append(spread)

    def undo() -> None:
        if spread in _patch.spreads:
            _patch.spreads.remove(spread)
        remove()

    return undo


@dataclasses.dataclass(frozen=True, eq=False)
class _Spread:
    """Parameters of which every rank of a group holds different ones (the stages of a pipeline)."""

    parameters: tuple[nn.Parameter, ...]
    groups: tuple[dist.ProcessGroup, ...]
    elsewhere: frozenset[int]
    """By id: parameters that another rank holds as well, and counts."""
    known: frozenset[int]
    """By id: all parameters of the model, also those that are not here."""
    meet: Callable[[], None]

    def among(self, gradients: list[Tensor]) -> list[Tensor]:
        """Those of the gradients that belong to these parameters."""
        own = {id(p.grad) for p in self.parameters if p.grad is not None}
        return [g for g in gradients if id(g) in own]

    def elsewhere_now(self) -> set[int]:
        """By id: the gradients that another rank counts."""
        return {id(p.grad) for p in self.parameters if id(p) in self.elsewhere}


class _Patch:
    """What runs in the place of torch's functions; all but sparse and spread gradients is left to torch's own.

    Scaling by a norm works on sparse gradients in torch, so it is left alone.
    """

    def __init__(self) -> None:
        self.users = 0
        self.spreads: list[_Spread] = []
        self._asked: list[_Spread] | None = None
        """Whose parameters are being clipped, while that is known."""
        self._clipped: list[Tensor] = []
        self._seams = _torch.clipping_seams()
        self._torch_norm, self._torch_value, self._torch_clip = (seam.cell_contents for seam in self._seams)

    def apply(self) -> None:
        for seam, function in zip(self._seams, (self._norm, self._value, self._clip), strict=True):
            seam.cell_contents = function

    def remove(self) -> None:
        for seam, function in zip(self._seams, (self._torch_norm, self._torch_value, self._torch_clip), strict=True):
            seam.cell_contents = function

    def _clip(self, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """torch's clip_grad_norm_: its parameters tell which models are concerned, also where no gradient is here."""
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._asked = [s for s in self.spreads if any(id(p) in s.known for p in listed)]
        self._clipped = listed
        try:
            norm: Tensor = self._torch_clip(listed or parameters, *args, **kwargs)
        finally:
            self._asked, self._clipped = None, []
        return norm

    def _norm(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        spreads = self._asked
        if spreads is None:
            # A rank whose part has no gradient now (frozen) is asked for the norm of nothing, and takes part all the same.
            spreads = [s for s in self.spreads if s.among(listed)] if listed else self.spreads[:1]
        if spreads:
            return self._norm_over(spreads, listed, float(norm_type), error_if_nonfinite)
        parts = [dense_part(t) if t.is_sparse else t for t in listed]
        norm: Tensor = self._torch_norm(parts, norm_type, error_if_nonfinite, foreach)
        return norm

    def _norm_over(
        self, spreads: Sequence[_Spread], listed: list[Tensor], norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """Of parameters that are spread over a group, the norm of all of them; of others, which all ranks hold, once."""
        spreads[0].meet()
        totals, seen = [], set[int]()
        for spread in spreads:
            own = spread.among(listed)
            elsewhere = spread.elsewhere_now() | seen
            totals.append(norm_over([t for t in own if id(t) not in elsewhere], norm_type, spread.groups))
            seen |= {id(t) for t in own}
        rest = [t for t in listed if id(t) not in seen]
        if rest:
            totals.append(norm_of(rest, norm_type))
        total = vector_norm(torch.stack([t.to(totals[0].device) for t in totals]), norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise NonFiniteNormError(
                f"the total norm (order {norm_type}) of the gradients of all ranks is {total.item()}"
            )
        return presented(total, listed or self._clipped)

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
