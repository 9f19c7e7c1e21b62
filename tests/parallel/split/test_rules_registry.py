"""The table of rules: what torch hands to a rule must not keep it from being followed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import get_testing_overrides

from epl.parallel.split.rules.registry import RULES, named_alike
from tests.parallel.split.compare import compare, even

NOT_SO = {"layer_norm": {"cudnn_enabled"}, "topk": {"descending"}}
"""Names in torch's table of signatures that the function itself does not have."""


def _handed_on(func: Any) -> list[tuple[int, list[str]]]:
    """How a Python function of torch calls handle_torch_function: so many arguments by place, these by name."""
    try:
        source = textwrap.dedent(inspect.getsource(func))
    except (TypeError, OSError):
        return []
    return [
        (
            len(call.args) - 2 if not any(isinstance(arg, ast.Starred) for arg in call.args) else -1,
            [word.arg for word in call.keywords if word.arg is not None],
        )
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "handle_torch_function"
    ]


def _default(func: Any, name: str) -> Any:
    """What a function takes for an argument; for one that must be given, something that no default is."""
    default = inspect.signature(func).parameters[name].default
    return object() if default is inspect.Parameter.empty else default


def test_what_python_functions_of_torch_hand_on_is_known() -> None:
    # F.normalize(w) calls its rule with out=None, which that did not know: every rank gathered a head's whole weight.
    seen = set()
    for func, found in RULES.items():
        for places, names in _handed_on(func) if inspect.isfunction(func) else ():
            seen.add(func.__name__)
            named = named_alike(found, func, {name: _default(func, name) for name in names})
            assert named is not None, f"{func.__name__}: its rule does not know all of {names}"
            if places >= 0:
                inspect.signature(found).bind(func, *[None] * places, **named)
    assert {"normalize", "norm", "tensordot", "cross_entropy", "layer_norm"} <= seen


def test_defaults_written_out_change_nothing() -> None:
    signatures = get_testing_overrides()
    checked = 0
    for func, found in RULES.items():
        if func not in signatures:
            continue
        given = {
            each.name: each.default
            for each in inspect.signature(signatures[func]).parameters.values()
            if each.default is not each.empty and each.name not in NOT_SO.get(func.__name__, ())
        }
        assert named_alike(found, func, given) is not None, f"{func.__name__}: its rule does not know all of {given}"
        checked += 1
    assert checked > 500


@pytest.mark.parametrize(
    ("func", "given", "expected"),
    [
        (F.normalize, {"dim": 0, "out": None}, {"dim": 0}),
        (F.normalize, {"dim": 0, "out": torch.empty(1)}, None),
        (torch.Tensor.sum, {"axis": 1, "keepdims": True}, {"dim": 1, "keepdim": True}),
        (torch.norm, {"out": None, "dtype": None}, {"dtype": None}),
        (torch.matmul, {"other": 1, "out": 2}, None),
    ],
)
def test_names(func: Any, given: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert named_alike(RULES[func], func, given) == expected


@pytest.mark.parametrize(
    "program",
    [
        F.normalize,
        lambda w: F.normalize(w, dim=-1),
        lambda w: torch.norm(w, dim=1),
        lambda w: w / w.norm(dim=1, keepdim=True),
        lambda w: w / torch.norm(w, p=2, dim=1, keepdim=True).clamp(min=1e-12),
        lambda w: w / torch.linalg.vector_norm(w, dim=1, keepdim=True),
        lambda w: w / torch.linalg.norm(w, dim=1, keepdim=True),
        lambda w: w * torch.rsqrt((w * w).sum(1, keepdim=True)),
        lambda w: torch.tensordot(w, torch.ones(6, 2, dtype=w.dtype), 1),
    ],
)
def test_rows_of_a_weight_are_normalised_where_they_are(program: Any) -> None:
    sent = compare(program, [torch.randn(8, 6, dtype=torch.float64)], [(0, even(8, 2))], 2)[0]
    assert [call for call in sent.calls if call == "all-gather"] == ["all-gather"], "the result, by `compare` itself"
    assert [what for what, _, why in sent.notes if "all-gather" in what and "becomes whole" not in why] == []
