"""The user's forward, overheard: torch calls of the glue become nodes, modules that run as a whole become one node each.

Intercepted are torch functions (a torch function mode), `nn.Module.__call__` (not `forward`: a module's hooks belong to it)
and `autograd.Function.apply` (its backward is its own). `torch.utils.checkpoint` around glue is dissolved; a module that it
calls is marked, and checkpointed again when it is replayed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from epl import _torch
from epl.errors import RecordingError
from epl.graph.collections import Again, GraphKeys, overheard
from epl.graph.record import steps
from epl.graph.record.chance import is_random
from epl.graph.record.draws import Draws
from epl.graph.record.foresight import Foreseen, Foresight
from epl.graph.record.leaf import Leaves, Stamp
from epl.graph.record.peek import ANSWERS
from epl.graph.record.tree import children_of, leaves_of, skeleton, tensors_of
from epl.graph.record.where import inside_checkpoint, user_line
from epl.graph.record.writer import Writer

KEPT = frozenset({"register_hook", "retain_grad", "requires_grad_", "detach_", "__set__", "set_", "resize_", "collect"})
"""Calls of torch's, and one of ours, that do something which neither a result nor a version counter shows."""

_READS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__contains__",
    }
    | {"__format__", "is_nonzero", "equal", "allclose", "data_ptr", "__dlpack__"}
)
_QUESTIONS = frozenset(
    {"size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous", "__len__", "__hash__"}
    | {"untyped_storage"}
)
"""Torch calls that never give a tensor."""

_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})

WAYS_OUT = (
    "Two ways out: move that code into a module that belongs to one TaskGraph as a whole (inside it, everything runs as it "
    "is written), or write the stages by hand and use epl.forward_backward"
)


class Apart(NamedTuple):
    """What is computed apart from each other, for which a forward is written down: as errors tell it."""

    unread: str
    """Why a value cannot be read between modules."""
    ways_out: str


STAGES = Apart("it would be another one in every micro batch, and other stages do not have it", WAYS_OUT)
ROWS_OF_RANKS = Apart(
    "the ranks that share a split part have rows of their own, so each would read another value, go its own way, and not call the "
    "part as the others do",
    "The way out: move that code into a module that belongs to one TaskGraph as a whole (inside it, everything runs as it is written)",
)


class NotALeaf(BaseException):
    """A module opened a scope inside its forward: it has to be looked into. Not an Exception: a model must not catch it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module).__name__)
        self.module = module


class HooksInside(BaseException):
    """A forward failed that has hooks on modules: it may count on what they take out. Not an Exception, as above.

    `modules`: those that run as a whole and have modules with hooks inside.
    """

    def __init__(self, error: Exception, modules: list[nn.Module]) -> None:
        super().__init__(str(error))
        self.error, self.modules = error, modules


class Recorder(TorchFunctionMode):
    """Writes down what happens inside `listening()`."""

    def __init__(
        self, writer: Writer, leaves: Leaves, foresight: Foresight, draws: Draws, paths: dict[nn.Module, str | None]
    ) -> None:
        """`paths`: the names of the modules that are leaves."""
        super().__init__()
        self.writer, self.draws = writer, draws
        self.inside: nn.Module | None = None
        """The leaf that is running."""
        self.tell: Callable[[int], None] = lambda count: None
        """Called with the number of leaves that have run."""
        self.taskgraph_of: Callable[[nn.Module], str | None] = lambda module: None
        self.apart = STAGES
        self.refused: RecordingError | None = None
        self._leaves, self._foresight = leaves, foresight
        self._paths = paths
        self._deaf = False
        self._thread = threading.get_ident()
        self._count = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, this thread's torch and module calls are written down."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or (self._deaf and self.inside is None):
                return original(module, *args, **kwargs)
            if self._deaf:
                return self._leaves.run_part(module, original, args, kwargs, self.writer.objects.is_known)
            return self._module(original, module, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            with _torch.function_applications(self._function), overheard(self._collect), self:
                yield
        finally:
            if nn.Module.__call__ is call:
                nn.Module.__call__ = original  # type: ignore[method-assign]
        if self.refused is not None:  # the forward has caught it and gone on as it would not with real numbers
            raise self.refused

    def refuse(self, what: str) -> NoReturn:
        """Say what in the user's line cannot be written down, and what to do."""
        self.refused = RecordingError(f"{what}, at {user_line() or 'an unknown line'}. {self.apart.ways_out}")
        raise self.refused

    # ---- torch functions ---------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if self._deaf or name in _QUESTIONS:
            return func(*args, **kwargs)
        if name == "__get__":  # x.shape, x.device and the like: by far the most frequent
            answer = func(*args)
            if not isinstance(answer, torch.Tensor):
                return answer
        if func in _BACKWARD:
            self.refuse("the forward differentiates between its modules, which may be on different stages")
        inputs, args, kwargs = self._fakes(args, kwargs)
        known = self.draws.knows(inputs)
        foreseeable = not known and name not in KEPT and not self.draws.is_source(func)
        call = self._foresight.call(func, args, kwargs, self.writer.spec_of) if foreseeable else None
        foreseen = None if call is None else self._foresight.foresee(call, inputs)
        versions = [_torch.version_of(t) for t in inputs]
        changed = None if call is None or foreseen is not None else self._foresight.change(call, inputs)
        try:
            if changed is not None:
                (result,) = changed
            else:
                result = func(*args, **kwargs) if foreseen is None else foreseen.result
        except Exception as error:
            return self._unknown(func, args, kwargs, inputs, error)
        if self.draws.is_draw(func, kwargs, result):
            node = self.writer.write("call_function", steps.drawn, (self.draws.draw(result, func, args, kwargs),))
            self.writer.bind(result, node)
            return result
        made = tensors_of(result)
        touched = [t for t, before in zip(inputs, versions, strict=True) if _torch.version_of(t) != before]
        if foreseen is not None:
            self._believe(made, foreseen)
        elif not touched and not name.endswith("_") and not is_random(func) and any(map(self.writer.is_bound, made)):
            # contiguous and its like return what they were given where nothing is to be done: at another size there may be,
            # and all sizes must have the same nodes.
            with self._not_listening():
                result = self._own(result, inputs, versions)
                if call is not None:
                    self._foresight.observe(call, inputs, result, self.writer.memory_of)
        elif not touched and name not in KEPT and all(map(self.writer.is_bound, made)):
            return result
        elif call is not None and not touched:
            self._foresight.observe(call, inputs, result, self.writer.memory_of)
        elif call is not None and changed is None:
            self._foresight.observe_change(call, inputs, touched, result, self.writer.spec_of)
        if known and isinstance(result, torch.Tensor) and not touched:
            self.draws.compute(result, func, args, kwargs)
        self.draws.forget(touched)
        node = self.writer.write("call_function", func, self.writer.argument(args), self.writer.argument(kwargs))
        node.meta["random"] = is_random(func)
        if name in KEPT:
            self.writer.forget_specs()
        self.writer.result(node, result, inputs, versions)
        return result

    def _believe(self, made: list[torch.Tensor], foreseen: Foreseen) -> None:
        for tensor, spec, other in zip(made, foreseen.specs, foreseen.shares, strict=True):
            self.writer.note_spec(tensor, spec)
            if other is not None:
                self.writer.share(tensor, other)

    def _unknown(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], error: Exception) -> Any:
        """The forward wants to know something that a fake tensor does not."""
        name = getattr(func, "__name__", str(func))
        needs_data = isinstance(error, _torch.NEEDS_DATA)
        if self.draws.knows(inputs) and (needs_data or name in _READS):
            return self.draws.guard(func, args, kwargs)
        if name in ANSWERS and not isinstance(error, RecordingError):
            with self._not_listening():
                answer = self.draws.ask(func, self.writer.argument(args), self.writer.argument(kwargs))
            if answer is not None:
                return answer[0]
        if name in _READS and (needs_data or not isinstance(error, RecordingError)):
            self.refuse(
                f"the forward reads the value of a tensor of shape {tuple(inputs[0].shape) if inputs else ()} ({name}) "
                f"between its modules: {self.apart.unread} (what follows from the inputs of the model alone may be read)"
            )
        if needs_data:
            self.refuse(f"the shape of what {name} returns depends on the values of its arguments, between the modules")
        if isinstance(error, _torch.NO_FAKE_KERNEL):
            self.refuse(f"the shape of what {name} returns is not known without running it")
        raise error

    def _fakes(self, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], Any, Any]:
        """The tensors among the arguments, and the arguments with fakes in the place of real constants."""
        whole = self.writer.objects.is_known
        inputs = tensors_of((args, kwargs), whole)
        if all(map(_torch.is_fake, inputs)):
            return inputs, args, kwargs
        leaves, fill = skeleton((args, kwargs), whole)
        args, kwargs = fill([self.writer.fake_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        return tensors_of((args, kwargs), whole), args, kwargs

    # ---- modules -----------------------------------------------------------------------------------------------------

    def _module(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(module)
        if path is None:
            if module._backward_hooks or module._backward_pre_hooks:
                self.refuse(
                    f"a backward hook is registered on a {type(module).__name__} whose parts are on different stages, or "
                    "which is part of no stage as a whole"
                )
            return original(module, *args, **kwargs)
        inputs, args, kwargs = self._fakes(args, kwargs)
        given = [(each, len(each)) for each in _mutable_containers((args, kwargs))]
        node = self.writer.write("call_module", path, self.writer.argument(args), self.writer.argument(kwargs))
        node.meta["taskgraph"] = self.taskgraph_of(module) or node.meta["taskgraph"]
        node.meta["checkpoint"] = inside_checkpoint()
        versions = [_torch.version_of(t) for t in inputs]
        self.writer.objects.module_starts()
        with self._not_listening(), self._uses_seen(node, (args, kwargs)):
            self.inside = module
            result = self._leaves.run(module, original, args, kwargs, self.writer.objects.is_known)
            self.inside = None
            node.meta["foreseen"] = self._leaves.foresaw(module)
            result = self._own(result, inputs, versions)
        self.writer.last_leaf = path
        if any(len(each) != size for each, size in given):
            self.refuse(f"the module {path} changes a list or dict that it is given, which another stage would not see")
        self.writer.result(node, result, inputs, versions)
        self.writer.objects.module_returned(node)
        self._count += 1
        self.tell(self._count)
        return result

    @contextlib.contextmanager
    def _uses_seen(self, node: fx.Node, arguments: Any) -> Iterator[None]:
        """Inside runs a module; if it uses what an earlier one has put into an object, that is written down."""
        objects = self.writer.objects
        things = [leaf for leaf in leaves_of(arguments, objects.is_known) if not isinstance(leaf, torch.Tensor)]
        fillers, used = objects.fillers(things), self._leaves.readers.setdefault(str(node.target), set())

        def see(operation: Any, operands: Any) -> None:
            used.update(str(fillers[id(t)].target) for t in tensors_of(operands) if id(t) in fillers)

        with _torch.OperationWatch(see) if fillers else contextlib.nullcontext():
            yield
        for filler in dict.fromkeys(fillers.values()):
            if str(filler.target) in used:
                objects.after(node, filler)

    def _own(self, result: Any, inputs: list[torch.Tensor], versions: list[int]) -> Any:
        """The result, with tensors of its own where the module returns one that it was given, unchanged: what it returns
        is to be used where the module runs."""
        touched = {id(t) for t, before in zip(inputs, versions, strict=True) if _torch.version_of(t) != before}

        def own_one(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not self.writer.is_bound(leaf) or id(leaf) in touched:
                return leaf
            own = self._leaves.fresh(self.writer.spec_of(leaf))
            self.writer.share(own, leaf)
            return own

        leaves, fill = skeleton(result)
        owned = [own_one(leaf) for leaf in leaves]
        return result if all(map(lambda a, b: a is b, owned, leaves)) else fill(owned)

    # ---- autograd functions ------------------------------------------------------------------------------------------

    def _function(self, owner: Any, original: Any, args: Any, kwargs: Any) -> Any:
        if self._deaf or threading.get_ident() != self._thread or owner is Stamp:
            return original(*args, **kwargs)
        if owner is CheckpointFunction:
            function, _, *rest = args
            return function(*rest)
        if owner.__module__ == "torch.utils.checkpoint":
            return original(*args, **kwargs)
        inputs, args, kwargs = self._fakes(args, kwargs)
        node = self.writer.write("call_function", owner.apply, self.writer.argument(args), self.writer.argument(kwargs))
        node.meta["random"] = False
        versions = [_torch.version_of(t) for t in inputs]
        try:
            with self._not_listening():
                result = self._own(original(*args, **kwargs), inputs, versions)
        except (*_torch.NEEDS_DATA, _torch.NO_FAKE_KERNEL):
            self.refuse(f"the forward of the autograd function {owner.__qualname__} needs the values of its arguments")
        self.writer.result(node, result, inputs, versions)
        return result

    # ---- collections -------------------------------------------------------------------------------------------------

    def _collect(self, again: Again, value: torch.Tensor, key: GraphKeys) -> None:
        """The glue adds a value to a collection; what a module that runs as a whole adds, it adds whenever it runs."""
        if not self._deaf and threading.get_ident() == self._thread:
            self.writer.write("call_function", again, (self.writer.node_of(self.writer.fake_of(value)), key))

    @contextlib.contextmanager
    def _not_listening(self) -> Iterator[None]:
        self._deaf = True
        # Modes of the user's own stay on, and ours with them: it then lets everything pass.
        alone = _torch.count_function_modes() <= 1
        try:
            with _torch.no_torch_function() if alone else contextlib.nullcontext():
                yield
        finally:
            self._deaf = False


def _mutable_containers(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, dict)):
        yield tree
    inner = children_of(tree)
    for child in inner[0] if inner is not None else ():
        yield from _mutable_containers(child)
