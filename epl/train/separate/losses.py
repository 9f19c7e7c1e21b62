"""Rules of torch's losses: a mean becomes the sum over a micro batch, divided by what the whole batch would be divided by."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from epl.train.separate.analysis import Analysis
from epl.train.separate.program import VALUES, Entry, Given
from epl.train.separate.rules import rule
from epl.train.separate.state import CONST, SUM, Cut, Over, Piece, Rows

ELEMENT_LOSSES = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss
  soft_margin_loss hinge_embedding_loss margin_ranking_loss"""
ROW_LOSSES = (
    "cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss"
)
_OVER_WEIGHTS = (
    F.mse_loss,
    F.l1_loss,
)  # their mean is over the sum of `weight`, if given; huber_loss divides by the count


def _arguments(entry: Entry) -> tuple[dict[str, Any], str]:
    """Arguments by name, and the reduction; the legacy size_average and reduce are left to the whole batch."""
    bound = _signature(entry.op).bind(*entry.args, **entry.kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    if named.pop("size_average", None) is not None or named.pop("reduce", None) is not None:
        raise TypeError("legacy reduction")
    return named, named.pop("reduction", "mean")


@functools.cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _reduced(
    rows: Rows, func: Callable[..., Any], named: dict[str, Any], reduction: str, count: int, first: int
) -> Piece:
    """`func` gives a loss per row or element; reduced as the whole batch would."""
    named = {**named, "reduction": "none"}
    if reduction == "none":
        return Piece(rows, func, (), named)
    over = {"mean": count, "sum": None, "batchmean": first}[reduction]
    return Piece(SUM, summed, (func,), named, over)


def summed(func: Callable[..., torch.Tensor], **named: Any) -> torch.Tensor:
    """The sum of a loss per element."""
    return func(**named).sum()


@rule(ELEMENT_LOSSES, F)
def element_loss(a: Analysis, entry: Entry, *args: Any, **kwargs: Any) -> Piece | None:
    named, reduction = _arguments(entry)
    tensors = {k: v for k, v in named.items() if isinstance(v, VALUES)}
    lined = a.align(list(tensors.values()))
    if lined is None:
        return None
    values, rows = lined
    call = {**named, **dict(zip(tensors, values, strict=True))}
    weight = named.get("weight")
    if entry.op in _OVER_WEIGHTS and weight is not None and reduction == "mean":
        if not isinstance(weight, Given):
            return None
        return Piece(SUM, summed, (entry.op,), {**call, "reduction": "none"}, Over(torch.sum, (weight,)))
    shapes = [a.shape(t) for t in tensors.values()]
    first = shapes[0][0] if shapes[0] else 1
    return _reduced(rows, entry.op, call, reduction, _broadcast(shapes).numel(), first)


def _broadcast(shapes: list[torch.Size]) -> torch.Size:
    found: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return found


@rule(ROW_LOSSES, F)
def row_loss(a: Analysis, entry: Entry, *args: Any, **kwargs: Any) -> Piece | None:
    named, reduction = _arguments(entry)
    tensors = {k: v for k, v in named.items() if isinstance(v, VALUES) and k != "weight"}
    states = {a.state(t) for t in tensors.values()} - {CONST}
    (rows,) = states if len(states) == 1 else (None,)
    if not isinstance(rows, Rows) or rows.dim != 0 or a.state(named.get("weight")) is not CONST:
        return None
    shapes = [a.shape(t) for t in tensors.values()]
    if any(shape[:1] != (rows.total,) for shape in shapes) or max(map(len, shapes)) != 2:
        return None
    call = {**named, **{k: Cut(t, rows) if a.state(t) is CONST else t for k, t in tensors.items()}}
    return _reduced(rows, entry.op, call, reduction, rows.total, rows.total)


@rule("cross_entropy nll_loss", F)
def class_loss(a: Analysis, entry: Entry, *args: Any, **kwargs: Any) -> Piece | None:
    named, reduction = _arguments(entry)
    x, target, weight = named["input"], named["target"], named.get("weight")
    s, r = a.state(x), a.state(target)
    if (
        not isinstance(s, Rows)
        or s.dim != 0
        or len(a.shape(x)) < 2
        or a.state(weight) is not CONST
        or r not in (CONST, s)
    ):
        return None
    call = {
        **named,
        "target": Cut(target, s) if r is CONST else target,
        "reduction": "none" if reduction == "none" else "sum",
    }
    over: float | Over | None = None
    if reduction == "mean":
        if a.spec(target).dtype.is_floating_point:
            over = a.shape(x).numel() // a.shape(x)[1]
        elif isinstance(target, Given) and (weight is None or isinstance(weight, Given)):
            over = Over(class_total, (target, weight, named["ignore_index"]))
        else:
            return None  # targets computed from the output: how many are ignored is known only afterwards
    return Piece(s if reduction == "none" else SUM, entry.op, (), call, over)


def class_total(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """What the mean of a class loss divides by: the targets that count, each with its class's weight."""
    counted = target != ignore_index
    return counted.sum() if weight is None else weight.detach()[target[counted]].sum()


@rule("ctc_loss", F)
def ctc_loss(a: Analysis, entry: Entry, *args: Any, **kwargs: Any) -> Piece | None:
    named, reduction = _arguments(entry)
    x, targets = named["log_probs"], named["targets"]
    s = a.state(x)
    if not isinstance(s, Rows) or s.dim != 1 or len(a.shape(x)) != 3:
        return None
    if a.state(targets) is not CONST or len(a.shape(targets)) != 2:  # targets end to end: where a row begins is a value
        return None
    rows = Rows(0, *s.kind)
    lengths = {}
    for k in ("input_lengths", "target_lengths"):
        given = named[k]
        if a.state(given) is not CONST:
            return None
        lengths[k] = Cut(given if isinstance(given, VALUES) else torch.as_tensor(given), rows)
    call = {**named, "targets": Cut(targets, rows), **lengths, "reduction": "none"}
    if reduction == "mean":
        return Piece(SUM, ctc_mean, (), call, s.total)
    return Piece(rows, F.ctc_loss, (), call) if reduction == "none" else Piece(SUM, summed, (F.ctc_loss,), call)


def ctc_mean(**named: Any) -> torch.Tensor:
    """The sum of each row's loss over the length of its target."""
    per_row: torch.Tensor = F.ctc_loss(**named) / named["target_lengths"].clamp(min=1)
    return per_row.sum()
