"""Torch calls on lazy values that are neither recorded nor simply run: metadata, reads, backward, hooks, new tensors alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from epl import _torch
from epl.errors import LazyValueError, NotBuiltError
from epl.graph.spec import leaves_of
from epl.train.lazy.everywhere import CREATE_GRAPH
from epl.train.lazy.foreign import LAZY, ForeignParameter, node_of, refuse
from epl.train.lazy.node import foreign, name_of
from epl.train.lazy.read import bring_everywhere, read
from epl.train.lazy.record import record, run_for_real, run_on_numbers
from epl.train.lazy.step import differentiate
from epl.train.lazy.tensor import HANDLERS, LazyTensor
from epl.train.separate.rules import getter

Function = Callable[..., Any]
Args = tuple[Any, ...]
Named = dict[str, Any]


# ---- backward --------------------------------------------------------------------------------------------------------


def _on_backward(func: Function, args: Args, kwargs: Named) -> None:
    bind = _bound_method if func is torch.Tensor.backward else _bound_function
    roots, seeds, retain, create, inputs = bind(*args, **kwargs)
    if inputs is None:
        root, seed = _one_root(roots, seeds)
        if isinstance(root, LazyTensor):
            differentiate(root.epl_node, seed, retain=bool(retain), create=create)
        elif isinstance(root, ForeignParameter):
            refuse(root, "backward")
        else:
            torch.autograd.backward([root], [seed], retain_graph=retain, create_graph=create)
        return
    inputs = _listed(inputs)
    found = _gradients(roots, inputs, seeds, retain, create)
    for tensor, gradient in zip(inputs, found, strict=True):
        if gradient is not None and not isinstance(tensor, ForeignParameter):
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


def _bound_method(
    self: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> tuple[Any, ...]:
    return [self], [gradient], retain_graph, create_graph, inputs


def _bound_function(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> tuple[Any, ...]:
    tensors = _listed(tensors)
    seeds = [None] * len(tensors) if grad_tensors is None else _listed(grad_tensors)
    return tensors, seeds, retain_graph, create_graph, inputs


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _one_root(roots: Sequence[Any], seeds: Sequence[Any]) -> tuple[Any, torch.Tensor | None]:
    """Several roots are one sum, so that a model call under two of them runs once."""
    if len(roots) == 1:
        return roots[0], _real_seed(seeds[0])
    with torch.enable_grad():
        return sum(r if s is None else (r * s).sum() for r, s in zip(roots, seeds, strict=True)), None


def _real_seed(seed: Any) -> torch.Tensor | None:
    return read([seed.epl_node], "backward(gradient)")[0].detach() if isinstance(seed, LazyTensor) else seed


def _on_grad(func: Function, args: Args, kwargs: Named) -> tuple[torch.Tensor | None, ...]:
    return _grad(*args, **kwargs)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad with a lazy value among its outputs or inputs."""
    if is_grads_batched:
        raise NotBuiltError(CREATE_GRAPH)
    outputs, inputs = _listed(outputs), _listed(inputs)
    seeds = [None] * len(outputs) if grad_outputs is None else _listed(grad_outputs)
    found = _gradients(outputs, inputs, seeds, retain_graph, create_graph)
    if materialize_grads:
        found = [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True)]
    elif not allow_unused and any(g is None for g in found):
        raise LazyValueError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is the "
            "desired behavior."
        )
    return tuple(found)


def _gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], seeds: Sequence[Any], retain: Any, create: bool
) -> list[torch.Tensor | None]:
    lazy = [t for t in inputs if isinstance(t, LazyTensor)]
    if create and any(isinstance(t, LazyTensor) for t in outputs):
        raise NotBuiltError(CREATE_GRAPH)
    if lazy:
        bring_everywhere([t.epl_node for t in lazy], "autograd.grad with respect to a value of the model")
    wanted = [t.epl_node.value if isinstance(t, LazyTensor) else t for t in inputs]
    root, seed = _one_root(outputs, seeds)
    if isinstance(root, LazyTensor):
        return differentiate(root.epl_node, seed, retain=bool(retain), create=create, wanted=wanted)
    return list(torch.autograd.grad(root, wanted, seed, retain_graph=retain, create_graph=create, allow_unused=True))


# ---- hooks -----------------------------------------------------------------------------------------------------------


class HookHandle:
    """What `register_hook` on a lazy value gives: `remove()` takes the hook off again, before or after the value is there."""

    def __init__(self, node: Any, hook: Function) -> None:
        self._node, self._hook = node, hook
        self._handle: Any = None
        node.hooks.append(self._attach)

    def _attach(self, value: torch.Tensor) -> None:
        self._handle = value.register_hook(self._hook)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """The hook is not called any more."""
        if self._handle is not None:
            self._handle.remove()
        elif self._attach in self._node.hooks:
            self._node.hooks.remove(self._attach)


def _on_hook(func: Function, args: Args, kwargs: Named) -> Any:
    if isinstance(args[0], ForeignParameter):
        with _torch.no_tensor_subclass():  # it never runs: the owner has the same hook on the real one
            return func(*args, **kwargs)
    node = node_of(args[0])
    if node.done:
        if node.graph == "home":
            bring_everywhere([node], name_of(func))
        return func(node.value, *args[1:], **kwargs)
    if not node.requires_grad:
        raise LazyValueError("cannot register a hook on a tensor that doesn't require gradient")
    if func is torch.Tensor.register_post_accumulate_grad_hook:
        raise LazyValueError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    if func is torch.Tensor.register_hook:
        return HookHandle(node, *args[1:], **kwargs)
    node.hooks.append(torch.Tensor.retain_grad)
    return None


# ---- metadata, reads, tensors alike ----------------------------------------------------------------------------------


def _on_metadata(func: Function, args: Args, kwargs: Named) -> Any:
    with _torch.no_tensor_subclass():
        return func(*args, **kwargs)


def _on_type(func: Function, args: Args, kwargs: Named) -> Any:
    """t.type() asks, t.type(dtype) converts."""
    return _on_metadata(func, args, kwargs) if len(args) == 1 and not kwargs else record(func, args, kwargs)


def _on_like(func: Function, args: Args, kwargs: Named) -> Any:
    """zeros_like, new_ones, …: a real tensor; only shape and dtype are needed."""
    if not isinstance(args[0], LAZY):  # zeros.new_full(size, lazy)
        return run_on_numbers(func, args, kwargs)
    spec = node_of(args[0]).spec
    stand_in = torch.empty((1,) * len(spec.shape), dtype=spec.dtype, device=spec.device).expand(spec.shape)
    if leaves_of((args[1:], kwargs), LAZY):
        return run_on_numbers(func, (stand_in, *args[1:]), kwargs)
    if name_of(func).endswith("_like"):
        kwargs = {"memory_format": torch.contiguous_format, **kwargs}
    return func(stand_in, *args[1:], **kwargs)


def _on_l1_loss(func: Function, args: Args, kwargs: Named) -> Any:
    weight = _torch.weight_of_l1_loss()
    return record(func, args, kwargs if weight is None else {**kwargs, "weight": weight})


def _on_deepcopy(func: Function, args: Args, kwargs: Named) -> Any:
    """A copy of the numbers; the graph is not copied, as torch would refuse to."""
    return run_on_numbers(func, args, kwargs)


def _attribute(give: Callable[[Any], Any]) -> Callable[[Function, Args, Named], Any]:
    return lambda func, args, kwargs: give(args[0])


def _is_leaf(tensor: torch.Tensor) -> bool:
    node = node_of(tensor)
    if node.graph == "everywhere":
        return bool(node.value.is_leaf)
    return not node.requires_grad or node.func is foreign


def _grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    node = node_of(tensor)
    value = None if node.at_lanes else node.value
    return value.grad if isinstance(value, torch.Tensor) and (value.is_leaf or value.retains_grad) else None


_GETTERS: dict[str, Callable[[Any], Any]] = {
    "requires_grad": lambda t: node_of(t).requires_grad,
    "is_leaf": _is_leaf,
    "grad_fn": lambda t: None if _is_leaf(t) else node_of(t),
    "grad": _grad_of,
    "retains_grad": lambda t: bool(node_of(t).hooks) or bool(getattr(node_of(t).value, "retains_grad", False)),
    "_version": lambda t: 0,
    "_backward_hooks": lambda t: None,
    "_base": lambda t: None,
    "_grad_fn": lambda t: None,
    "data": lambda t: t.detach(),
}
_ATTRIBUTES = """shape dtype device layout ndim is_cuda is_cpu is_sparse is_sparse_csr is_quantized is_meta is_mkldnn is_mps is_xpu is_xla is_ipu
  is_maia is_mtia is_vulkan is_nested itemsize nbytes output_nr name grad_dtype _has_symbolic_sizes_strides _post_accumulate_grad_hooks"""
_QUESTIONS = """dim ndimension size numel nelement stride is_contiguous is_floating_point is_complex is_signed element_size get_device
  __len__ __hash__ is_inference dim_order is_same_size is_pinned is_shared is_conj is_neg is_distributed is_coalesced storage_offset"""
_READS = """item tolist numpy __array__ __bool__ __int__ __float__ __complex__ __index__ __format__ __repr__ __str__ __contains__
  __reduce_ex__ is_nonzero data_ptr storage untyped_storage __dlpack__"""
_REAL = "share_memory_ pin_memory __reversed__ set_ resize_ apply_ map_ to_sparse"


def _on_requires_grad(func: Function, args: Args, kwargs: Named) -> Any:
    """A value without gradients becomes a real leaf, on every rank; the lazy tensor stands for it from now on."""
    if isinstance(args[0], ForeignParameter):
        return _on_metadata(func, args, kwargs)
    node, flag = node_of(args[0]), (kwargs.get("requires_grad", args[1] if len(args) > 1 else True))
    if flag == node.requires_grad:
        return args[0]
    if not flag:
        raise LazyValueError("you can only change requires_grad flags of leaf variables.")
    leaf = read([node], name_of(func))[0].detach().requires_grad_()
    node.value, node.graph, node.spec = leaf, "everywhere", node.spec._replace(requires_grad=True)
    return leaf


def _on_real(func: Function, args: Args, kwargs: Named) -> Any:
    return run_for_real(func, args, kwargs, name_of(func))


def install() -> None:
    """Fill the table of handlers."""
    HANDLERS.update(
        {
            torch.Tensor.backward: _on_backward,
            torch.autograd.backward: _on_backward,
            torch.autograd.grad: _on_grad,
            F.l1_loss: _on_l1_loss,
            torch.Tensor.type: _on_type,
            torch.Tensor.__deepcopy__: _on_deepcopy,
            torch.Tensor.requires_grad_: _on_requires_grad,
            torch.Tensor.requires_grad.__set__: _on_requires_grad,  # type: ignore[attr-defined]
        }
    )
    for name, give in _GETTERS.items():
        if hasattr(torch.Tensor, name):
            HANDLERS[getter(getattr(torch.Tensor, name))] = _attribute(give)
    for name in _ATTRIBUTES.split():
        HANDLERS[getter(getattr(torch.Tensor, name))] = _on_metadata
    for space, names, handler in (
        (torch.Tensor, _QUESTIONS, _on_metadata),
        (torch, "is_floating_point is_complex numel is_same_size is_signed is_inference", _on_metadata),
        (torch, "_has_compatible_shallow_copy_type", _on_metadata),
        (torch.Tensor, _READS, run_on_numbers),
        (torch, "is_nonzero equal allclose", run_on_numbers),
        (torch.Tensor, "equal allclose", run_on_numbers),
        (torch.Tensor, _REAL, _on_real),
        (torch.Tensor, "register_hook register_post_accumulate_grad_hook retain_grad", _on_hook),
        (torch, "zeros_like ones_like empty_like full_like rand_like randn_like randint_like", _on_like),
        (torch.Tensor, "new new_zeros new_ones new_empty new_full new_tensor", _on_like),
    ):
        for name in names.split():
            if hasattr(space, name):
                HANDLERS[getattr(space, name)] = handler
