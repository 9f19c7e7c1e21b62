"""Products: the contracted dim cut gives partial sums, another one a cut result; operands cut elsewhere are exchanged."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch

from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.rules.common import is_cut
from epl.parallel.split.rules.registry import rule
from epl.parallel.split.value import SplitTensor, block_of, enter, partial, same, settle, shard, whole
from epl.plan.split.cut import Cut

SUM = 0
"""Instead of a place from the end: the result is a partial sum."""


def local_bias(bias: Any, cut: Cut, ranks: SplitRanks) -> Any:
    """This rank's part of a bias beside an output whose last dim is cut."""
    return None if bias is None else block_of(bias, -1, cut, ranks, "the bias is cut differently")


def added_to(out: Any, bias: Any) -> Any:
    """A bias as it is added to a product: under autocast, in the lower precision of that."""
    return bias if bias is None or bias.dtype == out.dtype else bias.to(out.dtype)


@rule("linear")
def rule_linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    x, weight = settle(input), settle(weight)
    if isinstance(weight, SplitTensor) and weight.place == 0 and weight.ndim == 2:  # columns
        ranks, cut = weight.ranks, weight.cut
        x = whole(x, "columns of the weight are cut and so is the input")
        out = func(enter(x, ranks), weight.local, local_bias(bias, cut, ranks))
        return shard(out, out.ndim - 1, cut, ranks)
    if isinstance(weight, SplitTensor):  # rows
        ranks, cut = weight.ranks, weight.cut
        block = block_of(x, -1, cut, ranks, "rows of the weight are cut in another way than the input")
        out = func(block, weight.local)
        return partial(out, ranks, True, added_to(out, whole(bias)))
    if not isinstance(x, SplitTensor):
        return func(x, weight, whole(bias))
    if x.place == x.ndim - 1:
        return func(whole(x, "the weight is whole"), weight, whole(bias))
    ranks = x.ranks
    return shard(func(x.local, enter(weight, ranks), enter(whole(bias), ranks)), x.place, x.cut, ranks)


# ---- matmul ----------------------------------------------------------------------------------------------------------------

Operands = tuple[Any, Any, int | None, Cut | None, SplitRanks | None]


def product(first: Any, second: Any) -> Operands:
    """Local operands of a @ b (of two dims or more) and how the result is cut: a place from the end, SUM, or None for whole."""
    a, b = settle(first), settle(second)
    in_a = a.from_end if isinstance(a, SplitTensor) else 0
    in_b = b.from_end if isinstance(b, SplitTensor) else 0
    if not in_a and not in_b:
        return a, b, None, None, None
    if in_a == -1 or in_b == -2:  # the contracted dim
        lead = a if in_a == -1 else b
        ranks, cut = lead.ranks, lead.cut
        why = "contracted dim cut differently"
        return block_of(a, -1, cut, ranks, why), block_of(b, -2, cut, ranks, why), SUM, cut, ranks
    if in_a == -2 and in_b == -1:  # the smaller one travels
        if a.numel() < b.numel():
            a, in_a = whole(a, "both factors are cut"), 0
        else:
            b, in_b = whole(b, "both factors are cut"), 0
    if in_b == -1 and not (in_a and a.numel() > b.numel()):
        return enter(whole(a, "both factors are cut"), b.ranks), b.local, -1, b.cut, b.ranks
    if in_a == -2 and not (in_b and b.numel() > a.numel()):
        return a.local, enter(whole(b, "both factors are cut"), a.ranks), -2, a.cut, a.ranks
    if in_b == -1:
        b, in_b = whole(b, "both factors are cut"), 0
    if in_a == -2:
        a, in_a = whole(a, "both factors are cut"), 0
    lead, other = (a, b) if in_a else (b, a)  # a batch dim
    place, ranks, cut = lead.from_end, lead.ranks, lead.cut
    if cut.size == 1 and other.ndim >= -place and other.shape[place] != 1:
        return product(whole(lead, "spread over another's batch"), other) if in_a else product(other, whole(lead))
    a, b = (block_of(value, place, cut, ranks, "batch dims cut differently") for value in (a, b))
    return a, b, place, cut, ranks


def _made(out: torch.Tensor, place: int | None, cut: Cut | None, ranks: SplitRanks | None) -> Any:
    if place is None or ranks is None:
        return out
    return partial(out, ranks, True) if place == SUM else shard(out, out.ndim + place, cut, ranks)


@rule("matmul", "bmm", "mm", "__matmul__", "mv", "dot")
def rule_matmul(
    func: Any, input: Any, other: Any = None, *, mat2: Any = None, vec: Any = None, tensor: Any = None
) -> Any:
    given = [value for value in (other, mat2, vec, tensor) if value is not None]
    return multiplied(func, input, given[0])


def multiplied(func: Any, first: Any, second: Any) -> Any:
    """a @ b."""
    if first.ndim == 1 and second.ndim == 1:
        return (first * second).sum()
    if first.ndim == 1:
        return multiplied(torch.matmul, first.unsqueeze(0), second).squeeze(-2)
    if second.ndim == 1:
        return multiplied(torch.matmul, first, second.unsqueeze(-1)).squeeze(-1)
    a, b, place, cut, ranks = product(first, second)
    return _made(func(a, b), place, cut, ranks)


@rule("__rmatmul__")
def rule_rmatmul(func: Any, input: Any, other: Any) -> Any:
    return torch.matmul(other, input)


@rule("addmm", "baddbmm", "addbmm", "addmv")
def rule_addmm(
    func: Any,
    input: Any,
    first: Any = None,
    second: Any = None,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    mat1: Any = None,
    mat2: Any = None,
    batch1: Any = None,
    batch2: Any = None,
    mat: Any = None,
    vec: Any = None,
) -> Any:
    given = [value for value in (first, mat1, batch1, mat, second, mat2, batch2, vec) if value is not None]
    out = torch.matmul(*given)
    if func.__name__ == "addbmm":
        out = out.sum(0)
    out = out if alpha == 1 else out * alpha
    if beta == 0:  # then torch does not look at it, not even for NaN
        return out + torch.zeros((), dtype=input.dtype, device=input.device)
    return out + added_to(out, input if beta == 1 else input * beta)


# ---- einsum ----------------------------------------------------------------------------------------------------------------


def explicit(equation: str, dims: Sequence[int]) -> tuple[list[str], str] | None:
    """The terms and the result of an equation, without dots and with the result written out; None if it is not a valid one."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(dims):
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    widths = [n - len(term.replace("...", "")) if "..." in term else 0 for term, n in zip(terms, dims, strict=True)]
    dots = "".join(free[: max(widths)]) if max(widths) <= len(free) else ""
    if min(widths) < 0 or max(widths) > len(free):
        return None
    terms = [
        term.replace("...", dots[len(dots) - width :]) if "..." in term else term
        for term, width in zip(terms, widths, strict=True)
    ]
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        result = dots + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    else:
        result = result.replace("...", dots)
    if "." in result or any("." in term or len(term) != n for term, n in zip(terms, dims, strict=True)):
        return None
    return terms, result


@rule("einsum", spaces=(torch,))
def rule_einsum(func: Any, equation: Any, *operands: Any) -> Any:
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str):
        return NotImplemented
    values = [settle(value) for value in given]
    found = explicit(equation, [value.ndim for value in values])
    if found is None:
        return NotImplemented
    terms, result = found
    values = [
        whole(value, "a diagonal of a cut dim") if is_cut(value) and term.count(term[value.place]) > 1 else value
        for term, value in zip(terms, values, strict=True)
    ]
    lead = _leading(terms, values)
    if lead is None:
        return func(equation, *values)
    label, cut, ranks = lead
    local = []
    for term, value in zip(terms, values, strict=True):
        if label not in term:
            local.append(enter(whole(value, "einsum operands cut differently"), ranks))
        else:
            place = term.index(label) - value.ndim
            local.append(block_of(value, place, cut, ranks, "einsum operands cut differently"))
    out = func(f"{','.join(terms)}->{result}", *local)
    return shard(out, result.index(label), cut, ranks) if label in result else partial(out, ranks, True)


def _leading(terms: Sequence[str], values: Sequence[Any]) -> tuple[str, Cut, SplitRanks] | None:
    """The label that the work is cut along: the one for which the least has to travel, and no parameter."""
    best: tuple[int, str, Cut, SplitRanks] | None = None
    for term, value in zip(terms, values, strict=True):
        if not isinstance(value, SplitTensor):
            continue
        label, cut, moved = term[value.place], value.cut, 0
        sizes = [other.shape[t.index(label)] for t, other in zip(terms, values, strict=True) if label in t]
        if cut.size == 1 and max(sizes) > 1:
            continue
        for t, other in zip(terms, values, strict=True):
            if other is value or not isinstance(other, SplitTensor):
                continue
            if t[other.place] != label or not same(other.cut, cut, value.ranks):
                pinned = 1 << 60 if other.local.is_leaf and other.requires_grad else 0
                moved += pinned + other.numel() // (value.ranks.ways if label in t else 1)
        if best is None or moved < best[0]:
            best = moved, label, cut, value.ranks
    if best is None and any(isinstance(value, SplitTensor) for value in values):
        first = next(value for value in values if isinstance(value, SplitTensor))
        raise AssertionError(f"no label to cut along for {first!r}")
    return None if best is None else best[1:]


@rule("tensordot", spaces=(torch,))
def rule_tensordot(func: Any, a: Any, b: Any, dims: Any = 2) -> Any:
    if isinstance(dims, torch.Tensor):
        return NotImplemented
    if isinstance(dims, int):
        in_a, in_b = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    else:
        in_a, in_b = ([d] if isinstance(d, int) else list(d) for d in dims)
    letters = iter(string.ascii_letters)
    first = [next(letters) for _ in range(a.ndim)]
    second = [next(letters) for _ in range(b.ndim)]
    for i, j in zip(in_a, in_b, strict=True):
        second[j] = first[i]
    gone = {first[i] for i in in_a}
    result = [letter for letter in (*first, *second) if letter not in gone]
    return torch.einsum(f"{''.join(first)},{''.join(second)}->{''.join(result)}", a, b)


@rule("inner")
def rule_inner(func: Any, input: Any, other: Any) -> Any:
    if not input.ndim or not other.ndim:
        return input * other
    return torch.tensordot(input, other, ([-1], [-1]))


@rule("bilinear")
def rule_bilinear(func: Any, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    out = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return out if bias is None else out + bias


@rule("outer", "ger")
def rule_outer(func: Any, input: Any, vec2: Any) -> Any:
    return input.unsqueeze(1) * vec2.unsqueeze(0)
