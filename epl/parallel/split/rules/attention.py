"""Attention: by heads or by rows, each rank its own; torch's Python functions with their bodies opened."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn import functional

from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.rules.common import is_cut
from epl.parallel.split.rules.dropout import own_stream
from epl.parallel.split.rules.registry import RULES, Rule, rule
from epl.parallel.split.value import SplitTensor, block_of, enter, same, settle, shard, whole
from epl.plan.split.cut import Cut


@rule("scaled_dot_product_attention")
def rule_sdpa(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    query, key, value = settle(query), settle(key), settle(value)
    found = [item for item in (query, key, value) if isinstance(item, SplitTensor)]
    if not found:
        return func(query, key, value, whole(attn_mask), dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    lead = query if isinstance(query, SplitTensor) else found[0]
    place, ranks, cut = lead.from_end, lead.ranks, lead.cut
    if dropout_p and region.exact_dropout and not ranks.plan:
        return _written_out(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if 0 in cut.lengths:  # torch has no gradient for attention of nothing
        return NotImplemented
    if lead is query and place == -2 and not is_causal and not dropout_p:  # some queries, all keys
        local = [query.local, *(enter(whole(item, "keys and values of all places"), ranks) for item in (key, value))]
    else:
        if place > -3:
            return NotImplemented
        local = []
        for item in (query, key, value):
            block = _heads(item, lead, place, cut, ranks, enable_gqa)
            if block is None:
                return NotImplemented
            local.append(block)
    if isinstance(attn_mask, torch.Tensor):
        attn_mask = block_of(attn_mask, place, cut, ranks, "the mask is cut differently")
    if dropout_p:
        with own_stream(ranks):
            out = func(*local, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    else:
        out = func(*local, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return shard(out, out.ndim + place, cut, ranks)


def _heads(item: Any, lead: SplitTensor, place: int, cut: Cut, ranks: SplitRanks, grouped: bool) -> Any:
    """This rank's heads (or rows) of a query, key or value beside the one that is cut; None where they are not to be had."""
    size = item.shape[place] if item.ndim >= -place else 1
    if size == lead.shape[place]:
        if is_cut(item) and item.from_end == place and not same(item.cut, cut, ranks):
            return None
        return block_of(item, place, cut, ranks, "heads are cut differently")
    if not grouped or place != -3:
        return None
    if not isinstance(item, SplitTensor):  # whole: one head of keys for all queries, mostly
        if size == 1:
            return enter(item, ranks)
        times, odd = divmod(lead.shape[place], size)
        return None if odd or not times else block_of(item.repeat_interleave(times, place), place, cut, ranks, "")
    if not is_cut(item) or item.from_end != place:
        return None
    same(item.cut, cut, ranks)  # while planning: one axis for both, groups of heads
    if item.cut.axis.counts != cut.axis.counts:
        return None
    # Fewer heads of keys: the same granules, each of them fewer heads.
    fits = (
        len(cut.inners) == len(item.cut.inners) == 1 and cut.inners[0] * size == item.cut.inners[0] * lead.shape[place]
    )
    return item.local if fits else None


def _written_out(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float | None, gqa: bool
) -> Any:
    """Attention step by step, so that its dropout draws one device's mask."""
    if gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return functional.dropout(scores.softmax(-1), dropout_p) @ value


def opened(function: Any) -> Rule:
    """A Python function of torch.nn.functional without its own dispatch, so that its body runs on split values."""
    never = {
        name: lambda *args: False
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    }
    space = {**functional.__dict__, **never}
    code = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    code.__kwdefaults__ = function.__kwdefaults__

    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        return code(*args, **kwargs)

    return run


OPENED = {functional.multi_head_attention_forward}
"""Functions whose body runs on split values; the chooser looks into them as well."""

for _function in OPENED:
    RULES[_function] = opened(_function)
