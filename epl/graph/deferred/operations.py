"""What every basic operation does to tensors without memory; the table of those that need none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from epl import _torch
from epl.errors import StateError
from epl.graph.deferred import recipe
from epl.graph.deferred.factories import make
from epl.graph.deferred.place import Place
from epl.graph.deferred.recipe import Change, Copy, Derived, Draw, Loaded, Memo, Origin, Recipe, Step
from epl.graph.deferred.tensor import Cell, DeferredTensor, check_unsettled, numbers_of, order_of, plain, wrap

FILLS = {"fill", "zero"}
"""What is there afterwards does not depend on what was there before."""

ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "neg", "abs", "clamp", "clamp_min", "clamp_max"}
"""With numbers: correctly rounded, so that vector and remainder code give the same bits."""

EXACT = ARITHMETIC | {"lt", "le", "gt", "ge", "eq", "ne", "isnan", "where", "bitwise_and", "bitwise_or", "bitwise_not"}
EXACT |= {"logical_and", "logical_or", "logical_not", "maximum", "minimum"}
"""With numbers and with each other, element by element: what `trunc_normal_` and checks of weights are made of."""

ALIGNED = {"erfinv"}
"""The same bits only where pieces begin and end as for the whole."""

TURNS = {"t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}
"""Give a tensor itself another look at the same memory."""

CONVERSIONS = {"_to_copy", "clone"}

REDUCTIONS = {"any": True, "all": False}
"""Questions about all elements, with what a single element may answer for all."""

DRAWS = {"uniform", "normal", "random", "log_normal", "cauchy"}
"""In order, element by element (normal: 16 by 16). Not bernoulli and exponential, which may leave the order to a library."""

KEPT = 1 << 24
"""Bytes up to which a tensor that is copied in is kept as a copy: people fill rows from one buffer, over and over."""


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operation gives, where at least one argument has no memory."""
    mode = _torch.current_fake_mode()
    if mode is not None:  # a recording: shapes only
        args, kwargs = _torch.tree_map(lambda x: _fake(mode, x), (args, kwargs))
        return func(*args, **kwargs)
    deferred = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, DeferredTensor)]
    for tensor in deferred:
        check_unsettled(tensor)
    name = func.name().removeprefix("aten::").partition(".")[0]
    if args and isinstance(args[0], DeferredTensor):
        first, others = args[0], deferred[1:]
        if torch.Tag.inplace_view in func.tags:
            return _changed_shape(first, name, func, args[1:], kwargs)
        found: Any = None
        if func.is_view:
            found = _view(first, func, args[1:], kwargs)
        elif first.epl_cell.whole is None and name == "copy_":
            found = _write_down(first, _copy(first, args[1]))
        elif first.epl_cell.whole is None and name.endswith("_") and not others:
            found = _write_down(first, _change(first, name.removesuffix("_"), func, args[1:], kwargs))
        elif name in REDUCTIONS and func.name() == f"aten::{name}":
            found = _ask(first, func, REDUCTIONS[name])
        elif not any(x.epl_cell.whole is not None for x in deferred):
            found = _derive(name, func, args, kwargs)
        if found is not None:
            return found
    made = make(func, args, kwargs, least=0)
    return made if made is not None else _build(name, func, args, kwargs)


def _fake(mode: Any, value: Any) -> Any:
    if not isinstance(value, DeferredTensor):
        return value
    return _torch.make_fake(mode, value.shape, value.stride(), value.dtype, value.device)


# ---- views -----------------------------------------------------------------------------------------------------------


def _view(first: DeferredTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shown = func(first.epl_twin, *args, **kwargs)
    some = shown if isinstance(shown, list | tuple) else [shown]
    # A view as another dtype counts elements of another size, and a conjugated one has other numbers.
    if any(twin.dtype != first.dtype or twin.is_conj() or twin.is_neg() for twin in some):
        return None
    made = [wrap(first.epl_cell, twin) for twin in some]
    return made if isinstance(shown, list | tuple) else made[0]


def _changed_shape(
    first: DeferredTensor, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DeferredTensor:
    """Operations that make another view of a tensor itself."""
    if name == "detach_":
        return first
    if name in TURNS:  # `nn.init.orthogonal_` turns what it has drawn
        twin = first.epl_twin.detach()
        func(twin, *args, **kwargs)
        with _torch.seen_as_plain():
            func(first, *args, **kwargs)
        first.show(first.epl_cell, twin)
        return first
    source = args[0] if args else None
    if name == "set_" and isinstance(source, torch.Tensor) and _same_look(first, source):  # parametrize does this
        if isinstance(source, DeferredTensor):
            first.show(source.epl_cell, source.epl_twin)
            return first
        size = source.untyped_storage().nbytes() // source.itemsize
        cell = Cell(Recipe(size, source.dtype, source.device))
        cell.whole = source.detach().as_strided((size,), (1,), 0)
        first.show(cell, source.detach().to("meta").as_strided(source.shape, source.stride(), source.storage_offset()))
        return first
    raise StateError(
        f"{name} on a parameter of shape {tuple(first.shape)} under epl.split, which has no memory before the first call of the model: its "
        "shape and memory cannot be changed in place. Make another tensor of it, or do this before the scope"
    )


def _same_look(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.stride() == other.stride()
    return same and one.dtype == other.dtype and one.device == other.device


# ---- written down ----------------------------------------------------------------------------------------------------


def _write_down(first: DeferredTensor, step: Step | None) -> DeferredTensor | None:
    if step is None:
        return None
    if first.numel():
        first.epl_cell.recipe = first.epl_cell.recipe.then(step)
    return first


def _change(first: DeferredTensor, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
    """The step that an operation in place is; None if it is none that can be done in parts."""
    if name in DRAWS:
        order = order_of(first)
        if order is None or first.device.type != "cpu":
            # A generator of another device counts otherwise: each element of the whole has numbers of its own there, and a
            # kernel for a piece would begin anew.
            return None
        return Draw.now(order, first.dtype, func, args, kwargs) if first.numel() else Change(order, _nothing, (), False)
    if name not in FILLS | ARITHMETIC | ALIGNED or not _only_numbers(name, args, kwargs):
        return None
    place = Place.of(first.epl_twin)
    if place is None or place.margin > recipe.PIECE:
        return None
    if name in ALIGNED and not _is_aligned(place, first.epl_cell.recipe.numel):
        return None
    func(first.epl_twin, *args)  # an error of the user's is raised now
    return Change(place, func, tuple(map(_kept, args)), name not in FILLS)


def _nothing(view: torch.Tensor) -> None:
    """What drawing no numbers does."""


def _only_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is nothing beside tensors without memory but numbers."""
    if kwargs or (name in ("add", "sub", "rsub") and len(args) > 1):
        return False  # with alpha it is a fused multiplication in the vector code and none in the remainder
    return all(
        x.dim() == 0 if type(x) is torch.Tensor else x is None or isinstance(x, int | float | complex | DeferredTensor)
        for x in args
    )


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_aligned(place: Place, numel: int) -> bool:
    step = recipe.ALIGNMENT
    return place.in_one_piece and place.first % step == 0 and (place.last == numel or place.last % step == 0)


def _copy(first: DeferredTensor, source: Any) -> Step | None:
    place = Place.of(first.epl_twin)
    if isinstance(source, DeferredTensor):
        order, theirs = order_of(first), order_of(source)
        if order is None or theirs is None or source.shape != first.shape or source.epl_cell.whole is not None:
            return None
        return Copy(order, Origin(source.epl_cell.recipe, theirs.first))
    if type(source) not in (torch.Tensor, nn.Parameter) or source.layout is not torch.strided or source.is_meta:
        return None
    if source.dim() == 0:
        if place is None or place.margin > recipe.PIECE:
            return None
        return Change(place, torch.Tensor.copy_, (source.detach().to(first.device, copy=True),), False)
    order = order_of(first)
    if order is None or source.shape != first.shape:
        return None
    small = source.nbytes <= KEPT or not source.is_contiguous()
    return Loaded(order, source.detach().clone(memory_format=torch.contiguous_format) if small else source)


# ---- derived ---------------------------------------------------------------------------------------------------------


def _derive(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What an operation element by element makes of tensors that lie alike; None if it is none."""
    first, operation = args[0], dict(kwargs)
    device = first.device
    if name in CONVERSIONS:
        operation.pop("memory_format", None)  # the elements of a piece are a line
        device = torch.device(operation.get("device") or device)
        if operation.get("pin_memory") or operation.get("layout") not in (None, torch.strided):
            return None
        kwargs = {**kwargs, "device": "meta"} if name == "_to_copy" else kwargs
    elif name not in EXACT | ALIGNED or not _only_numbers(name, args[1:], kwargs):
        return None
    place = Place.of(first.epl_twin)
    if place is None or not place.in_one_piece:
        return None
    tensors = [x for x in args if isinstance(x, DeferredTensor)]
    if any(x.shape != first.shape or x.stride() != first.stride() for x in tensors):
        return None
    twin = func(*(x.epl_twin if isinstance(x, DeferredTensor) else x for x in args), **kwargs)
    if twin.stride() != first.stride():
        return None
    if device.type == "meta":
        found: torch.Tensor = twin
        return found
    origins = tuple(
        Origin(x.epl_cell.recipe, int(x.epl_twin.storage_offset())) if isinstance(x, DeferredTensor) else _kept(x)
        for x in args
    )
    return wrap(Cell(Recipe(twin.numel(), twin.dtype, device, Derived(func, origins, operation))), twin)


def _ask(first: DeferredTensor, func: Any, decisive: bool) -> torch.Tensor | None:
    """`any` and `all`, piece by piece, until the answer is known."""
    place, memo = Place.of(first.epl_twin), Memo()
    if first.epl_cell.whole is not None or place is None or not place.in_one_piece:
        return None
    found: torch.Tensor = func(torch.zeros(0, dtype=first.dtype, device=first.device))
    with _torch.without_operation_modes():
        for low, high in first.epl_cell.recipe.pieces(place.first, place.last):
            found = func(first.epl_cell.recipe.numbers(low, high, memo))
            if bool(found) is decisive:
                break
    return found


# ---- built whole -----------------------------------------------------------------------------------------------------


def _build(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on real memory."""
    written = set(map(id, _torch.changed_arguments(func, args)))
    written |= set(map(id, _torch.tree_leaves(kwargs)))
    originals: dict[int, DeferredTensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, DeferredTensor):
            return value
        # A few elements that are only read (`weight[0].sum()`) can be made for the occasion.
        few = numbers_of(value) if id(value) not in written else None
        found = plain(value, name) if few is None else few
        originals[id(found)] = value
        return found

    # Both are kept until the end: a result is recognised by its identity.
    real_args, real_kwargs = _torch.tree_map(real, (args, kwargs))
    result = func(*real_args, **real_kwargs)
    return _torch.tree_map(lambda x: originals.get(id(x), x), result)
