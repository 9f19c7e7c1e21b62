"""Tensors without memory from the calls that would make tensors: `torch.empty`, `torch.randn`, `torch.zeros_like` and the like."""

from __future__ import annotations

from typing import Any

import torch

from epl.graph.deferred.place import Place
from epl.graph.deferred.recipe import Change, Draw, Recipe
from epl.graph.deferred.tensor import Cell, DeferredTensor, wrap
from epl.report.log import notice

aten = torch.ops.aten

EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
ZEROS = {"zeros", "zeros_like", "new_zeros"}
ONES = {"ones", "ones_like", "new_ones"}
FULL = {"full": 1, "full_like": 1, "new_full": 2}
"""With the place of the number among the arguments."""
UNIFORM = {"rand", "rand_like"}
NORMAL = {"randn", "randn_like"}
INTEGERS = {"randint": 0, "randint_like": 1}
"""With the place of the first bound among the arguments."""

NAMES = {*EMPTY, *ZEROS, *ONES, *FULL, *UNIFORM, *NORMAL, *INTEGERS, "normal"}


def make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, least: int) -> DeferredTensor | None:
    """What a factory gives, without memory; None if it is no factory, or gives fewer bytes than `least`."""
    name, _, overload = func.name().removeprefix("aten::").partition(".")
    if name not in NAMES or (name == "normal" and overload != "float_float") or "out" in kwargs:
        return None
    asked: Any = kwargs.get("device") or getattr(args[0], "device", "cpu")
    device = torch.device(asked)
    if device.type == "meta" or kwargs.get("pin_memory"):
        return None
    known = [x.epl_twin if isinstance(x, DeferredTensor) else x for x in args]
    twin = func(*known, **{**kwargs, "device": "meta", **({"generator": None} if "generator" in kwargs else {})})
    if twin.layout is not torch.strided or not twin.is_contiguous() or not twin.numel() or twin.nbytes < least:
        return None
    if device.type != "cpu":
        # Generators of other devices give each element of a tensor numbers of its own, so that no piece can be drawn alone.
        notice(
            f"under epl.split, a tensor of shape {tuple(twin.shape)} is built whole on {device.type}, and cut later: build the part on the CPU, or on "
            "the meta device, and no rank ever holds the whole"
        )
        return None
    recipe = Recipe(twin.numel(), twin.dtype, device)
    step = _step(name, args, kwargs, recipe)
    return wrap(Cell(recipe if step is None else recipe.then(step)), twin)


def _step(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Recipe) -> Change | Draw | None:
    place = Place(0, (recipe.numel,), (1,))
    if name in EMPTY:
        return None
    if name in ZEROS:
        return Change(place, aten.zero_.default, (), False)
    if name in ONES:
        return Change(place, aten.fill_.Scalar, (1,), False)
    if name in FULL:
        value = kwargs["fill_value"] if "fill_value" in kwargs else args[FULL[name]]
        return Change(place, aten.fill_.Scalar, (value,), False)
    generator = {"generator": kwargs.get("generator")}
    if name in UNIFORM:
        return Draw.now(place, recipe.dtype, aten.uniform_.default, (0, 1), generator)
    if name in NORMAL:
        return Draw.now(place, recipe.dtype, aten.normal_.default, (0, 1), generator)
    if name == "normal":
        return Draw.now(place, recipe.dtype, aten.normal_.default, args[:2], generator)
    bounds = [x for x in args[INTEGERS[name] : INTEGERS[name] + 2] if isinstance(x, int)]
    low, high = (0, *bounds)[-2:]
    return Draw.now(place, recipe.dtype, getattr(aten.random_, "from"), (low, high), generator)
