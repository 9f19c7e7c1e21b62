"""Every private torch name epl leans on, each with the reason; tests/test_torch_canary.py checks that it still behaves.

Nothing else in epl may import an underscored torch name.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CellType, FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running now ends, on the thread that called `backward()`.

    The engine has no public way to say "after the last gradient"; DDP and FSDP use this same call.
    """
    Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """A number for the backward pass running on this thread, -1 outside one; nested passes have their own."""
    return torch._C._current_graph_task_id()


def gradient_accumulator(parameter: torch.Tensor) -> Node:
    """The autograd node that adds incoming gradients into `parameter.grad`.

    A hook before it sees the gradient after all of the user's own hooks and before it is added, which
    `register_post_accumulate_grad_hook` (the public one) cannot.
    """
    with torch.enable_grad(), no_tensor_subclass():
        grad_fn = parameter.expand_as(parameter).grad_fn
    assert grad_fn is not None
    node = grad_fn.next_functions[0][0]
    assert node is not None
    return node


def allow_foreach(kind: type[torch.Tensor]) -> None:
    """Let optimizers step many parameters of this class in one call, as they do with torch's own: the list of those classes is private."""
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def foreach_norm(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norms of many tensors in one call; the public functions take one tensor at a time."""
    return list(torch._foreach_norm(tensors, norm_type))


def foreach_mul_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply many tensors in place in one call; the public functions take one tensor at a time."""
    torch._foreach_mul_(tensors, factor)


def version_of(tensor: torch.Tensor) -> int:
    """How many times `tensor` was changed in place; the only way to know that a buffer moved without comparing it."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows `tensor` as a view of another; there is no public way to ask."""
    return tensor._is_view()


def module_without_compile(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module under `torch.compile(module)`, whose wrapper prefixes every name with `_orig_mod.`."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def clipping_seams() -> tuple[CellType, CellType, CellType]:
    """Where `get_total_norm` (which `clip_grad_norm_` clips by), `clip_grad_value_` and `clip_grad_norm_` keep what they run.

    Patching a name would miss everybody who wrote `from torch.nn.utils import get_total_norm` earlier. All names lead to
    the same wrapper, which runs what is in its one cell under `no_grad`; so the cell is what to replace.
    """
    from torch.nn.utils import clip_grad

    wrappers: tuple[Any, ...] = (clip_grad._get_total_norm, clip_grad.clip_grad_value_, clip_grad.clip_grad_norm_)
    norm, value, clip = (wrapper.__closure__[0] for wrapper in wrappers)
    return norm, value, clip


def inside_functional_call() -> bool:
    """Whether a caller of this is `torch.func.functional_call`, which puts other tensors into a module without telling it."""
    from torch.nn.utils import stateless

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is stateless._functional_call.__code__:
            return True
        frame = frame.f_back
    return False


def weight_of_l1_loss() -> torch.Tensor | None:
    """The `weight` given to the call of `F.l1_loss` that has asked `__torch_function__`: torch 2.13 forgets it on the way there."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.functional.l1_loss.__code__:
            found: torch.Tensor | None = frame.f_locals.get("weight")
            return found
        frame = frame.f_back
    return None


def lbfgs_parameters(optimizer: torch.optim.LBFGS) -> list[Any]:
    """The parameters that make up its flat vectors; it looks nowhere else for them while it steps."""
    found: list[Any] = optimizer._params
    return found


def set_lbfgs_parameters(optimizer: torch.optim.LBFGS, parameters: list[Any]) -> None:
    """Its vectors are now those of these parameters, as many and of the same shapes."""
    optimizer._params = parameters


Unscale = Callable[..., dict[torch.device, torch.Tensor]]


def replace_unscaling(make: Callable[[Unscale], Unscale]) -> Callable[[], None]:
    """`GradScaler` now unscales gradients by `make(its own way)`; the undo.

    It takes the scaler, the optimizer and more, and returns for each device whether a gradient was not finite. Both
    `unscale_` and `step` come through it, and no hook is there.
    """
    scaler, original = torch.amp.GradScaler, torch.amp.GradScaler._unscale_grads_
    scaler._unscale_grads_ = make(original)  # type: ignore[method-assign]

    def undo() -> None:
        scaler._unscale_grads_ = original  # type: ignore[method-assign]

    return undo


def no_tensor_subclass() -> AbstractContextManager[None]:
    """Inside, torch functions run without asking tensor subclasses (`__torch_function__`): for our own code about lazy values.

    The public `torch.overrides` has no such context.
    """
    return torch._C.DisableTorchFunctionSubclass()


def tensor_subclasses_asked() -> AbstractContextManager[None]:
    """Inside, torch functions ask tensor subclasses again, within `no_tensor_subclass` too: for code of others that runs in there.

    The public `torch.overrides` has no such context.
    """
    return torch._C._EnableTorchFunction()


Hooks = list[dict[int, Any]]


def _hooks_of(parameter: torch.Tensor) -> list[dict[int, Any]]:
    # The dicts themselves: torch runs what is in them, and keeps them when their attribute is set to None.
    return [h for h in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if h is not None]


def count_hooks(parameter: torch.Tensor) -> int:
    """How many gradient hooks (before and after accumulation) a parameter has; torch offers no list of them."""
    return sum(map(len, _hooks_of(parameter)))


def take_hooks(parameter: torch.Tensor) -> Hooks:
    """Take a parameter's gradient hooks off, to `give_hooks` back: torch can only remove one by its handle."""
    hooks = [dict(h) for h in _hooks_of(parameter)]
    for own in _hooks_of(parameter):
        own.clear()
    return hooks


def give_hooks(parameter: torch.Tensor, hooks: Hooks) -> None:
    """Undo `take_hooks`."""
    for own, taken in zip(_hooks_of(parameter), hooks, strict=True):
        own.update(taken)


def change_gradient_hooks(parameter: torch.Tensor, change: Callable[[Any], Any]) -> None:
    """Put `change(hook)` in the place of every hook that may change the parameter's gradient; the handles stay good for them."""
    own = parameter._backward_hooks or {}
    for key, hook in own.items():
        own[key] = change(hook)


def give_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """`tensor`, the same object, has this memory from now on. For tensors on the meta device, whose `data` cannot be set.

    `torch.utils.swap_tensors`, which does it in public, refuses tensors that anybody has a weak reference to.
    """
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, memory.requires_grad_(tensor.requires_grad))
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = before, after  # what runs them is in what was swapped


def resets_of(module: torch.nn.Module) -> list[Callable[[], object]]:
    """What fills a module's own parameters and buffers anew; torch's attention and transformer hide theirs."""
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return [reset for reset in found if callable(reset)]


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Whether it is a batch norm of any kind; their common class, which people derive from too, is private."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All tensors end to end in one new tensor."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def tree_leaves(tree: object) -> list[object]:
    """The leaves of nested lists, tuples and dicts, and of every class registered with torch's pytree (Hugging Face's outputs).

    torch.utils.pytree, the public one, needs optree and does not know what was registered here.
    """
    return list(_pytree.tree_leaves(tree))


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with every leaf replaced by `function(leaf)`; see `tree_leaves`."""
    return _pytree.tree_map(function, tree)


def tree_children(value: object) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The parts of a container registered with torch's pytree and how to rebuild it from others; None if it is none."""
    definition = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
    if definition is None:
        return None
    children, context = definition.flatten_fn(value)
    return list(children), lambda parts: definition.unflatten_fn(parts, context)


def fake_mode() -> AbstractContextManager[Any]:
    """A mode under which torch calls compute shapes only; what goes in need not be fake. There is no public one."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_fake(
    mode: Any, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What `torch.empty_strided` gives under this `fake_mode`, five times as fast: recordings make them by the hundred."""
    with unset_fake_temporarily():
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it was made under a `fake_mode`."""
    return isinstance(tensor, FakeTensor)


def fake_mode_is_on() -> bool:
    """Whether torch calls compute shapes only, in this thread: there is no public way to ask."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def without_fake_mode() -> AbstractContextManager[Any]:
    """Inside, torch calls compute real numbers although a `fake_mode` is on."""
    return unset_fake_temporarily()


@contextmanager
def fake_failures_unsaid() -> Iterator[None]:
    """Inside, a fake mode does not log the traceback of an operation that has no shape without numbers."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises when it is asked for a number, or for a shape that depends on numbers."""

NO_FAKE_KERNEL = UnsupportedOperatorException
"""What a fake tensor raises for an operation whose shapes it does not know."""


def no_torch_function() -> AbstractContextManager[None]:
    """Inside, no torch function mode and no tensor subclass is asked: for a module that is not looked into, at full speed."""
    return torch._C.DisableTorchFunction()


def count_function_modes() -> int:
    """How many torch function modes are on; a user's own (`with torch.device("cuda")` is one) must be left on."""
    return torch._C._len_torch_function_stack()


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common if and only if they share memory; fake ones, whose addresses are all 0, too."""
    try:
        memory: int = tensor.untyped_storage()._cdata
        return memory
    except (NotImplementedError, RuntimeError):  # sparse tensors have no single storage
        return id(tensor)


def is_loss(module: torch.nn.Module) -> bool:
    """Whether it is one of torch's loss modules, or derived from their common class."""
    return isinstance(module, torch.nn.modules.loss._Loss)


Applied = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def function_applications(apply: Applied) -> Iterator[None]:
    """Inside, `MyFunction.apply(*args)` calls `apply(MyFunction, original, args, kwargs)`.

    `autograd.Function.apply` asks no torch function mode and no tensor subclass. It calls `super().apply`, and that is what is
    replaced: so `op = MyFunction.apply`, bound earlier, is seen too.
    """
    base: Any = torch.autograd.function._SingleLevelFunction
    before = base.__dict__.get("apply")
    watch_function_applications(apply)
    try:
        yield
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before


def watch_function_applications(apply: Applied) -> Callable[[], None]:
    """From now on, `MyFunction.apply(*args)` calls `apply(MyFunction, original, args, kwargs)`; see `function_applications`.

    `original` is whoever watched before. The undo; if somebody else watches by now, `apply` goes on being called.
    """
    base: Any = torch.autograd.function._SingleLevelFunction
    before: Any = base.__dict__.get("apply")

    class Application:
        def __get__(self, _: object, owner: Any) -> Callable[..., Any]:
            original = super(base, owner).apply if before is None else before.__get__(None, owner)  # type: ignore[misc]
            return lambda *args, **kwargs: apply(owner, original, args, kwargs)

    made = base.apply = Application()

    def undo() -> None:
        if base.__dict__.get("apply") is made:
            if before is None:
                del base.apply
            else:
                base.apply = before

    return undo


def replace_checkpoints(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """`torch.utils.checkpoint` without reentry now runs by `make(its own way)`; the undo.

    That is called as (function, preserve_rng_state, context_fn, ...). A `context_fn` of the user's is his own, and nobody else
    can put something around what is computed again in backward.
    """
    from torch.utils import checkpoint as module

    original = module._checkpoint_without_reentrant_generator
    made = module._checkpoint_without_reentrant_generator = make(original)

    def undo() -> None:
        if module._checkpoint_without_reentrant_generator is made:
            module._checkpoint_without_reentrant_generator = original

    return undo


def function_spaces() -> list[Any]:
    """Where torch keeps functions that `torch.nn.functional` hands out under its own names (`gelu`, `softplus`, …)."""
    return [torch._C._nn]


def files_of_dynamo() -> tuple[str, str]:
    """With what the files begin whose frames stand between a function that dynamo leaves alone (`without_dynamo`) and its caller.

    Only the call stack tells who the caller is, and those frames are not the caller's.
    """
    folder = os.path.dirname(torch.__file__)
    return os.path.join(folder, "_dynamo") + os.sep, os.path.join(folder, "_compile.py")


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, never traced by `torch.compile`; the public decorator imports the whole compiler at once."""
    disable: Any = getattr(torch, "_disable_dynamo")  # noqa: B009  typed as not exported
    found: Callable[..., Any] = disable(function)
    return found


def compiled_unless(eager: Callable[[], bool]) -> Callable[[], None]:
    """Where `eager()`, what `torch.compile` has made now runs as it is written; the undo.

    `torch.compiler.set_stance` does that for all threads at once. Without effect as long as nobody has loaded the compiler.
    """
    frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frame is None:
        return lambda: None
    original = frame._stance

    class Stance:
        @property
        def stance(self) -> str:
            return "force_eager" if eager() else original.stance

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    made = frame._stance = Stance()

    def undo() -> None:
        if frame._stance is made:
            frame._stance = original

    return undo


def wrapper_tensor(cls: type[Any], spec: Any) -> Any:
    """A tensor of class `cls` with the shape, strides, dtype and device of `spec` and no memory; there is no public way."""
    return torch.Tensor._make_wrapper_subclass(
        cls, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device, requires_grad=spec.requires_grad
    )


def backward_keeps_graph() -> bool:
    """Whether the backward pass running on this thread was asked to retain its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, differentiably, as a tensor that may be changed in place; a view of a leaf may not."""
    found: torch.Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return found


LOADING_STATE = torch.nn.Module._load_from_state_dict.__code__
"""The code that copies a state dict's entries into one module's own tensors: a copy into another rank's parameter is meant
seriously unless it comes from here."""

CONVERTING = torch.nn.Module._apply.__code__
"""The code that `module.to`, `.double()` and the like walk a module's tensors with: there, and only there, another rank's
parameter may change its dtype without its numbers."""


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `note(operation, args)` is called for every basic operation; there is no public way to see them."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._note(func, args)
        return func(*args, **(kwargs or {}))


def changed_arguments(operation: Any, args: tuple[Any, ...]) -> list[Any]:
    """Which of its arguments a basic operation writes into, by its own declaration; batch norm's statistics are not declared."""
    if operation._overloadpacket in (torch.ops.aten.native_batch_norm, torch.ops.aten.cudnn_batch_norm):
        return [args[3], args[4]] if args[5] else []
    declared = operation._schema.arguments
    return [x for x, a in zip(args, declared, strict=False) if a.alias_info is not None and a.alias_info.is_write]


def draws(operation: Any) -> bool:
    """Whether a basic operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def nn_functions() -> Any:
    """The namespace of compiled `torch.nn.functional` functions: what dispatches there shows these, not the public names."""
    return torch._C._nn


def wrapper_subclass(kind: type[torch.Tensor], shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """A tensor of this kind without memory, with the dtype and device of another: how a subclass shows a shape that it does not hold."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=like.dtype, device=like.device)


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `answer(operation, args, kwargs)` is what every basic operation gives; factories, which no subclass sees, too."""

    def __init__(self, answer: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._answer(func, args, kwargs or {})


NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that wants to see basic operations only: the public default turns every result into it."""


def storageless(kind: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of this kind, on this device, with the shape and strides of another and no memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=device
    )


def seen_as_plain() -> AbstractContextManager[Any]:
    """Inside, operations do not ask `__torch_dispatch__`: what `t_` does to shape and strides, it then does to a `storageless` tensor."""
    return no_dispatch()


def become(tensor: torch.Tensor, kind: type[torch.Tensor], inside: torch.Tensor) -> None:
    """`tensor`, the same object, has this class and what is inside of another tensor (which nobody may use any more)."""
    was_parameter = isinstance(tensor, torch.nn.Parameter)
    gradient, tensor.grad = tensor.grad, None
    give_memory(tensor, inside)
    tensor.__class__ = kind
    tensor.__dict__.pop("_is_param", None)
    if was_parameter and not issubclass(kind, torch.nn.Parameter):
        mark_parameter(tensor)
    if gradient is not None and gradient.shape == tensor.shape:
        tensor.grad = gradient.to(tensor)


def mark_parameter(tensor: torch.Tensor) -> None:
    """`isinstance(tensor, nn.Parameter)` from now on: how `nn.Parameter(…)` marks tensors of other classes."""
    tensor._is_param = True


def current_fake_mode() -> Any:
    """The `fake_mode` that is on in this thread, or None; a subclass that it does not know is asked without being told."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def without_operation_modes() -> AbstractContextManager[Any]:
    """Inside, no mode below torch functions (`OperationMode`, `fake_mode`) is on: for our own memory, which is to be real."""
    return _disable_current_modes()
