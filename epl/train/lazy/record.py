"""The two answers to a torch call with a lazy argument: write it down, or run it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

from epl import _torch
from epl.errors import LazyValueError
from epl.graph.context import Context
from epl.graph.spec import Spec, leaves_of, swap
from epl.train.lazy.foreign import LAZY, ForeignParameter, node_of, refuse, refuse_foreign
from epl.train.lazy.infer import Inferred, NeedsDataError, infer
from epl.train.lazy.live import live_nodes
from epl.train.lazy.meeting import asks, meet
from epl.train.lazy.node import Node, home_of, name_of, topological
from epl.train.lazy.read import bring_everywhere, gather_at_home, read
from epl.train.lazy.tensor import LazyTensor
from epl.train.lazy.whole import compute, finish_node
from epl.train.separate.operations import copy_then, pick, rows_where

Function = Callable[..., Any]
_NOT_IN_PLACE = ("__invert__", "__iter__", "__int__", "__index__")


def record(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write the operation down (or, when every lazy argument is computed, run it) and return a lazy result."""
    in_place = is_in_place(func, kwargs)
    target = args[0] if args else next(iter(kwargs.values()))  # torch.nn.init names all its arguments
    if in_place and isinstance(target, ForeignParameter):
        refuse(target, name_of(func))
    if kwargs.get("out") is not None or (in_place and not (args and isinstance(target, LazyTensor))):
        return run_for_real(func, args, kwargs, f"writing into a real tensor ({name_of(func)})")
    nodes = [node_of(t) for t in leaves_of((args, kwargs), LAZY)]
    _check_wrappers(args, kwargs)
    if any(node.at_lanes for node in nodes) and in_place:
        gather_at_home([node for node in nodes if node.at_lanes], name_of(func))
    if all(node.done and not node.at_lanes for node in nodes):
        return _run_now(func, args, kwargs, nodes)
    if in_place:
        return _record_in_place(func, args, kwargs)
    if _is_real_mask(func, args):
        return _write(rows_where, args, kwargs, Inferred(_masked_spec(*args), False))
    try:
        inferred = infer(func, *_specs(args, kwargs))
    except NeedsDataError as error:
        if func is torch.Tensor.__getitem__ and isinstance(args[0], LazyTensor):
            return _with_real_index(func, args, kwargs)
        return run_for_real(func, args, kwargs, f"{name_of(func)}, whose result depends on numbers,", why=str(error))
    if not leaves_of(inferred.spec, Spec):
        return run_on_numbers(func, args, kwargs)
    return _write(func, args, kwargs, inferred)


def run_on_numbers(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation needs numbers and no gradients: every lazy argument is computed, known to every rank, and it runs."""
    lazy = leaves_of((args, kwargs), LAZY)
    values = dict(zip(map(id, lazy), read([node_of(t) for t in lazy], name_of(func)), strict=True))
    args, kwargs = swap((args, kwargs), LAZY, lambda t: values[id(t)])
    return func(*args, **kwargs)


def run_for_real(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], doing: str, *, why: str = "") -> Any:
    """The operation runs on real tensors, with gradients, on every rank; what it returns is real. `why`: what was in the way of
    foreseeing it, for the message if that cannot be."""
    lazy = leaves_of((args, kwargs), LAZY)
    nodes = [node_of(t) for t in lazy]
    differentiable = Context.now().grad and any(n.requires_grad and not n.spent for n in nodes)
    if differentiable:
        for node in nodes:
            refuse_foreign(node, f"{doing} since {why.partition(chr(10))[0]}" if why else doing)
        bring_everywhere(nodes, doing)
        values = {id(t): node_of(t).value for t in lazy}
    else:
        values = dict(zip(map(id, lazy), read(nodes, doing), strict=True))
    args, kwargs = swap((args, kwargs), LAZY, lambda t: values[id(t)])
    return func(*args, **kwargs)


def run_below(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation was reached below torch functions, where autograd is done already: it runs on numbers, and what arrives at
    the lazy tensors, leaves to autograd, goes on from their values."""
    doing = "code below torch functions (vmap, TorchScript, torch.tensor)"
    lazy = leaves_of((args, kwargs), LAZY)
    with enable_reentrant_dispatch():
        bring_everywhere([n for t in lazy if (n := node_of(t)).requires_grad and not n.spent], doing)
        values = dict(zip(map(id, lazy), read([node_of(t) for t in lazy], doing), strict=True))
    args, kwargs = swap((args, kwargs), LAZY, lambda t: values[id(t)].detach())
    return func(*args, **kwargs)


def is_in_place(func: Function, kwargs: dict[str, Any]) -> bool:
    """Whether it changes its first argument, by torch's naming."""
    name = name_of(func)
    return (
        kwargs.get("inplace") is True
        or name == "__setitem__"
        or (name.endswith("_") and not name.startswith("_"))
        or (name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE)
    )


# ---- writing down ----------------------------------------------------------------------------------------------------


def _specs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def spec(tensor: torch.Tensor) -> Spec:
        found: Spec = node_of(tensor).spec if isinstance(tensor, LAZY) else Spec.of(tensor)
        return found

    found: tuple[tuple[Any, ...], dict[str, Any]] = swap((args, kwargs), torch.Tensor, spec)
    return found


def _node(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], inferred: Inferred) -> Node:
    args, kwargs = swap((args, kwargs), LAZY, node_of)
    node = Node(func, args, kwargs, Context.now(), inferred.spec)
    node.has_effects = inferred.has_effects
    if any(s.is_view for s in leaves_of(inferred.spec, Spec)):
        for parent in node.parents:
            parent.viewed = True
    return node


def _write(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], inferred: Inferred) -> Any:
    return _tensors(_node(func, args, kwargs, inferred))


def _tensors(node: Node) -> Any:
    """Lazy tensors for the results of a node."""
    if isinstance(node.spec, Spec):
        return LazyTensor(node)
    index = itertools.count()
    return swap(node.spec, Spec, lambda s: LazyTensor(Node(pick, (node, next(index)), {}, node.context, s)))


def _is_real_mask(func: Function, args: tuple[Any, ...]) -> bool:
    """x[mask]: the mask is data that every rank has, so the result's shape is known without reading anything lazy."""
    if func is not torch.Tensor.__getitem__ or not isinstance(args[0], LazyTensor):
        return False
    mask = args[1]
    if not isinstance(mask, torch.Tensor) or isinstance(mask, LAZY) or mask.dtype is not torch.bool:
        return False
    shape = node_of(args[0]).spec.shape
    return mask.dim() > 0 and mask.shape == shape[: mask.dim()]


def _masked_spec(x: LazyTensor, mask: torch.Tensor) -> Spec:
    spec: Spec = x.epl_node.spec
    shape = torch.Size([int(mask.sum()), *spec.shape[mask.dim() :]])
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    grad = spec.requires_grad and Context.now().grad
    return spec._replace(shape=shape, stride=stride, requires_grad=grad, is_view=False)


def _with_real_index(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[lazy mask]: only the index need be known to all."""
    index = leaves_of(args[1], LazyTensor)
    if not index:
        return run_for_real(func, args, kwargs, "indexing")
    values = dict(zip(map(id, index), read([t.epl_node for t in index], "an index"), strict=True))
    real = swap(args[1], LazyTensor, lambda t: values[id(t)])
    return record(func, (args[0], real), kwargs)


def _check_wrappers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with _torch.no_tensor_subclass():
        for tensor in leaves_of((args, kwargs), LazyTensor):
            if tensor.grad_fn is not None:
                raise LazyValueError(
                    "this lazy value came out of an autograd.Function that was called around the recorder"
                )


# ---- in place --------------------------------------------------------------------------------------------------------


def _record_in_place(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.op_(…) on a lazy x: record x.op(…) and let the same Python object stand for the result."""
    target: LazyTensor = args[0]
    node = target.epl_node
    refuse_foreign(node, name_of(func))
    if node.viewed or node.spec.is_view:  # aliases: let real tensors do it
        _compute_all_live(name_of(func))
        return record(func, args, kwargs)
    target.epl_node = _changed_copy(func, args, kwargs).epl_node
    return None if name_of(func) == "__setitem__" else target


def _changed_copy(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyTensor:
    """What the first argument is after the operation, without changing it."""
    spec, name, out = node_of(args[0]).spec, name_of(func), None
    plain = getattr(torch.Tensor, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    if kwargs.get("inplace") is True:
        out = record(func, args, {**kwargs, "inplace": False})
    elif plain is not None:
        out = record(plain, args, kwargs)
    if not isinstance(out, LazyTensor) or (out.epl_node.spec.shape, out.epl_node.spec.dtype) != (
        spec.shape,
        spec.dtype,
    ):
        out = record(copy_then, (func, *args), kwargs)
    assert isinstance(out, LazyTensor)
    return out


def _compute_all_live(doing: str) -> None:
    live = [n for n in live_nodes() if not n.done and n.carrier is not None]
    carrier = live[0].carrier
    assert carrier is not None
    asked = meet(carrier, f"changing a view of a value in place ({doing})", live, ask=asks(carrier, live))
    compute(live, f"{doing} changes a view of a value in place, at {live[-1].place}", asked=asked)


# ---- running now -----------------------------------------------------------------------------------------------------


def _run_now(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], nodes: list[Node]) -> Any:
    """Every lazy argument is computed: run it, on every rank if each has what it takes, else at home."""
    homes = {home_of(n.carrier) for n in nodes if n.carrier is not None and not n.everywhere}
    if len(homes) > 1 or {"everywhere", "home"} <= {n.graph for n in nodes}:
        bring_everywhere(nodes, name_of(func))
    if is_in_place(func, kwargs):
        return _change_now(func, args, kwargs, nodes)
    try:
        inferred = infer(func, *_specs(args, kwargs))
    except NeedsDataError:
        return run_for_real(func, args, kwargs, f"{name_of(func)}, whose result depends on numbers,")
    specs = leaves_of(inferred.spec, Spec)
    if not specs:
        return run_on_numbers(func, args, kwargs)
    if inferred.has_effects:
        bring_everywhere(nodes, name_of(func))
    node = _node(func, args, kwargs, inferred)
    here = _each_alone(nodes, any(s.requires_grad for s in specs))
    if here or _is_home(nodes):
        real_args, real_kwargs = swap((args, kwargs), LAZY, lambda t: node_of(t).value)
        value = func(*real_args, **real_kwargs)
    else:
        value = None
    _settle(node, value, here)
    out = _tensors(node)
    for result in leaves_of(out, LazyTensor):
        if result.epl_node is not node:
            _settle(result.epl_node, None if value is None else pick(value, result.epl_node.args[1]), here)
    return out


def _each_alone(nodes: list[Node], differentiable: bool) -> bool:
    """Whether every rank can run an operation on these values by itself."""
    return all(n.everywhere and (n.graph != "home" or not differentiable) for n in nodes)


def _is_home(nodes: list[Node]) -> bool:
    carrier = next(n.carrier for n in nodes if n.carrier is not None)
    return carrier.is_home


def _settle(node: Node, value: Any, here: bool) -> None:
    finish_node(node, value, here)
    if here:
        # A value of every rank's own: it needs no recorded operation behind it, only autograd's, if it has one.
        tracked = any(t.requires_grad for t in leaves_of(value, torch.Tensor))
        node.graph = "everywhere" if tracked else None
        node.let_go()


def _change_now(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], nodes: list[Node]) -> Any:
    target: LazyTensor = args[0]
    node = target.epl_node
    result = None if name_of(func) == "__setitem__" else target
    aliased = node.viewed or node.spec.is_view
    here = _each_alone(nodes, Context.now().grad and any(n.requires_grad for n in nodes))
    if not aliased and not here:
        target.epl_node = _changed_copy(func, args, kwargs).epl_node
        return result
    if here and (not aliased or node.graph == "everywhere"):
        real_args, real_kwargs = swap((args, kwargs), LAZY, lambda t: node_of(t).value)
        func(*real_args, **real_kwargs)
        node.spec = Spec.of(node.value)
        node.graph = "everywhere" if node.value.requires_grad else None
        return result
    # Values share memory at home alone: it happens there, and copies that other ranks have are out of date.
    if _is_home(nodes):
        real_args, real_kwargs = swap((args, kwargs), LAZY, lambda t: node_of(t).value)
        func(*real_args, **real_kwargs)
    graph = any(n.graph == "home" for n in nodes) and Context.now().grad
    for n in {*topological([node], lambda n: False), *live_nodes()}:
        if n.done and (n.viewed or (isinstance(n.spec, Spec) and n.spec.is_view)):
            n.changed, n.everywhere = True, False
            if graph and n.graph is None and not n.spent:
                n.graph, n.spec = "home", n.spec._replace(requires_grad=True)
    return result
