"""Hugging Face's own plans for tensor parallelism (`tp_plan`), as a start for the search.

A plan names modules, or parameters, by patterns (`layers.*.self_attn.q_proj`) and gives each a style. Only the dim that a style cuts is
taken from it; what then has to be sent follows from the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from epl.parallel.split.fixed import Fixed
from epl.parallel.split.parameters import seats_of

SOURCE = "Hugging Face's tp_plan"
_COLUMNS = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "local_colwise"})
_ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise", "local_rowwise"})
_TABLES = {"embedding_rowwise": 0, "embedding_colwise": 1}
# All others are about where values are gathered or how experts are run: nothing that our rules need to be told.


def hints_for(root: nn.Module) -> dict[str, Fixed]:
    """For the parameters of a module that Hugging Face has a plan for: where that cuts them."""
    patterns: dict[tuple[str, ...], str] = {}
    for plan in _plans(root):
        patterns.update({tuple(pattern.split(".")): style for pattern, style in plan.items()})
    if not patterns:
        return {}
    found: dict[str, Fixed] = {}
    for name, parameter in seats_of(root)[1].items():
        parts = tuple(name.split("."))
        for pattern, style in patterns.items():
            if _matches(pattern, parts) or _matches(pattern, parts[:-1]):
                fixed = _fixed(style, parameter)
                if fixed is not None:
                    found[name] = fixed
    return found


def _plans(root: nn.Module) -> Iterator[Mapping[str, str]]:
    """The plans that modules, or the configurations they hold, carry."""
    seen: set[int] = set()
    for module in root.modules():
        config = module.__dict__.get("config")
        for plan in (getattr(module, "_tp_plan", None), getattr(config, "base_model_tp_plan", None)):
            if isinstance(plan, Mapping) and id(plan) not in seen:
                seen.add(id(plan))
                yield plan


def _matches(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether they agree from their ends, as far as both go: the part may be a layer, or the whole model around the base model."""
    if not path:
        return False
    return all(p in ("*", n) for p, n in zip(reversed(pattern), reversed(path), strict=False))


def _fixed(style: Any, parameter: nn.Parameter) -> Fixed | None:
    sections = 2 if isinstance(style, str) and style.startswith("packed_") else 1
    if style in _COLUMNS:
        dim = 0 if parameter.ndim == 1 else parameter.ndim - 2
        return Fixed(dim, sections, SOURCE)
    if style in _ROWS:
        return Fixed(None if parameter.ndim == 1 else parameter.ndim - 1, sections, SOURCE)
    if style in _TABLES and parameter.ndim == 2:
        return Fixed(_TABLES[style], 1, SOURCE)
    return None
