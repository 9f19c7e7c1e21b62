"""Nodes written down in the order in which the forward makes their values, and which node made which tensor.

A value that is changed in place is from then on the value of the node that changed it, and so are the values that share
its memory: whoever uses them later depends on the change.

    x = embed(ids)            %embed    call_module
    v = x[0]                  %getitem  (%embed, 0)          views: %embed
    v += 1                    %iadd     (%getitem, 1)        effect: %getitem
                              %changed  (%embed, %iadd)
    return head(x)            %head     (%changed)

`meta["changes"]` of the node that changed them lists those values, as they were called before.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from epl import _torch
from epl.errors import RecordingError
from epl.graph.context import Context
from epl.graph.record import steps
from epl.graph.record.fakes import FakeModel, Held
from epl.graph.record.objects import Objects
from epl.graph.record.tree import children_of, is_plain, leaves_of, objects_of, tensors_inside, tensors_of
from epl.graph.record.where import user_line
from epl.graph.spec import Spec

Place = int | tuple[int, int] | None
"""Of a tensor in its node's value: the value itself, its i-th tensor, or the i-th tensor of its k-th object."""


class _Binding(NamedTuple):
    tensor: torch.Tensor  # kept: ids are unique only while their owners live
    node: fx.Node
    place: Place


class Writer:
    """The graph of one recording, as far as it is written."""

    def __init__(self, model: FakeModel, scope: Callable[[], str | None]) -> None:
        self.graph = fx.Graph()
        self.held: dict[fx.Node, Held] = {}
        """Of get_attr nodes: where the model holds the tensor."""
        self.objects = Objects(model.modules, lambda target, args: self.write("call_function", target, args))
        self.last_leaf = ""
        self._model = model
        self._scope = scope
        self._bindings: dict[int, _Binding] = {}
        self._sharing: dict[int, list[torch.Tensor]] = {}
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memories: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # a memory's number is its own only while it lives
        self._specs: dict[int, tuple[torch.Tensor, Spec]] = {}

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def bind(self, tensor: torch.Tensor, node: fx.Node, place: Place = None) -> None:
        """From now on `tensor` is the value of this node, or a part of it."""
        if place is None:
            node.meta["spec"] = self.spec_of(tensor)
        if id(tensor) not in self._bindings:
            self._sharing.setdefault(self.memory_of(tensor), []).append(tensor)
        self._bindings[id(tensor)] = _Binding(tensor, node, place)

    def spec_of(self, tensor: torch.Tensor) -> Spec:
        """The spec of a fake tensor; remembered, since to ask one takes as long as to make one."""
        known = self._specs.get(id(tensor))
        if known is None:
            known = (tensor, Spec.of(tensor))
            self._specs[id(tensor)] = known
        return known[1]

    def forget_specs(self) -> None:
        """Something was changed in place: it, and what shares its memory, may require a gradient now."""
        self._specs.clear()

    def note_spec(self, tensor: torch.Tensor, spec: Spec) -> None:
        """Say what the spec of a new tensor is."""
        self._specs[id(tensor)] = (tensor, spec)

    def memory_of(self, tensor: torch.Tensor) -> int:
        """A number that tensors have in common if they share memory."""
        memory = _torch.memory_of(tensor)
        return self._memories.get(memory, memory)

    def share(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Believe that a new tensor, and whatever comes to share its memory, shares it with another, although the fakes do not."""
        self._memories[_torch.memory_of(tensor)] = self.memory_of(other)
        self._kept.append(tensor)

    def is_bound(self, tensor: torch.Tensor) -> bool:
        """Whether a node has made it, or the model holds it."""
        return id(tensor) in self._bindings or id(tensor) in self._model.held

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value this tensor is; written now if it is a parameter, a constant or a part of a result."""
        binding = self._bindings.get(id(tensor)) or self._find(tensor)
        if binding.place is None:
            return binding.node
        if isinstance(binding.place, int):
            node = self.write("call_function", steps.part, (binding.node, binding.place))
        else:
            node = self.write("call_function", steps.part_of_object, (binding.node, *binding.place))
        node.meta["taskgraph"], node.meta["views"] = binding.node.meta["taskgraph"], (binding.node,)
        self.bind(tensor, node)
        return node

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, if it is fake; else a fake that stands for this constant made outside the forward."""
        if _torch.is_fake(tensor):
            return tensor
        known = self._constants.get(id(tensor))
        if known is None:
            node = self.write("get_attr", f"constant_{len(self._constants)}")
            node.meta["value"] = tensor
            known = self._constants[id(tensor)] = (tensor, self._model.spec_of(tensor).empty())
            self.bind(known[1], node)
        return known[1]

    def _find(self, tensor: torch.Tensor) -> _Binding:
        held = self._model.held.get(id(tensor))
        if held is None:
            raise RecordingError(
                f"a tensor of shape {tuple(tensor.shape)} used at {user_line()} was made inside a module that runs as a "
                f"whole, and was not returned by it ({self._keeper(tensor)}): only what a module returns can be handed on "
                "to another stage. Return the tensor from that module's forward"
            )
        node = self.write("get_attr", held.path)
        self.held[node] = held
        self.bind(tensor, node)
        return self._bindings[id(tensor)]

    def _keeper(self, tensor: torch.Tensor) -> str:
        for path, module in self._model.model.named_modules():
            for name, value in module.__dict__.items():
                if value is tensor:
                    return f"{path} keeps it as its attribute {name}"
        return f"the last to run was {self.last_leaf or 'none'}"

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def argument(self, value: Any) -> Any:
        """`value` as the argument of a node: nodes in the place of tensors, and of whatever has to be put together."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self.argument(each) for each in value])
        if kind is dict:
            return {key: self.argument(each) for key, each in value.items()}
        if kind is slice:
            return slice(*(self.argument(each) for each in (value.start, value.stop, value.step)))
        if is_plain(value):
            _refuse_captured(value)
            return value
        inner = None if self.objects.is_known(value) else children_of(value)
        # A container of the user's own without any tensor may be a state that modules fill: it is treated as an object.
        if inner is None or next(leaves_of(value), None) is None:
            return self.objects.argument(value, self.node_of)
        parts = [self.argument(each) for each in inner[0]]
        return self.write("call_function", steps.rebuild, (steps.Template(kind.__name__, inner[1]), parts))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def write(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A new node at the end of the graph; its arguments are such as `argument` makes."""
        name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
        node = self.graph.create_node(op, target, args, kwargs or {}, name.replace(".", "_"))
        node.meta.update(context=Context.now(), where=user_line(), taskgraph=self._scope(), views=())
        node.meta["number"] = len(self.graph.nodes)
        return node

    def result(self, node: fx.Node, value: Any, inputs: list[torch.Tensor], versions: list[int]) -> None:
        """Note what a call returned and did: `inputs` are the tensors it was given, with their versions before it."""
        touched = [t for t, before in zip(inputs, versions, strict=True) if _torch.version_of(t) != before]
        if touched:
            self.forget_specs()
        before = [(t, self.node_of(t)) for t in touched]
        places = self._places(value)
        if isinstance(value, torch.Tensor):
            node.meta["spec"] = self.spec_of(value)
        else:
            node.meta["specs"] = tuple(map(self.spec_of, tensors_of(value)))
        for tensor, place in places:
            if not self.is_bound(tensor):
                self.bind(tensor, node, place)
        memories = {self.memory_of(t) for t, _ in places}
        views = [self.node_of(t) for t in inputs if self.memory_of(t) in memories] if memories else []
        node.meta["views"] = tuple(each for each in dict.fromkeys(views) if each is not node)
        if before:
            self._note_effects(node, before, {id(t): place for t, place in places})

    def close(self) -> None:
        """Let go of all tensors: a writer and its objects know each other, and would keep them until Python looks for such rings."""
        self._bindings, self._sharing, self._constants, self._specs, self._kept = {}, {}, {}, {}, []
        del self.objects

    def drop_unused(self) -> None:
        """Take out the names of changed values that nobody has used: each value that shares memory got one, also the views that
        were only a step on the way, and to have them handed on would be in vain."""
        for node in reversed(list(self.graph.nodes)):
            if node.target is steps.changed and not node.users and "effect" not in node.meta:
                self.graph.erase_node(node)

    def _places(self, value: Any) -> list[tuple[torch.Tensor, Place]]:
        if isinstance(value, torch.Tensor):
            return [(value, None)]
        places: list[tuple[torch.Tensor, Place]] = [(t, index) for index, t in enumerate(tensors_of(value))]
        for number, thing in enumerate(objects_of(value)):
            if not self.objects.is_known(thing):
                places += [(t, (number, index)) for index, t in enumerate(tensors_inside(thing))]
        return places

    def _note_effects(
        self, node: fx.Node, before: list[tuple[torch.Tensor, fx.Node]], returned: dict[int, Place]
    ) -> None:
        seen: set[int] = set()
        olds = [target for _, target in before]
        for tensor, target in before:
            memory = self.memory_of(tensor)
            if memory in seen:
                continue
            seen.add(memory)
            first = node.meta.setdefault("effect", target)
            for alias in list(self._sharing[memory]):
                if id(alias) in returned:
                    self.bind(alias, node, returned[id(alias)])
                    continue
                old = self.node_of(alias)
                olds.append(old)
                after = self.write("call_function", steps.changed, (old, node))
                after.meta["taskgraph"], after.meta["views"] = node.meta["taskgraph"], (old,)
                after.meta["target"] = target
                if alias is tensor and target is not first:
                    after.meta["effect"] = target
                self.bind(alias, after)
        node.meta["changes"] = tuple(dict.fromkeys(olds))


def _refuse_captured(value: Any) -> None:
    """A function that goes into the graph as it is must not carry a fake tensor in it."""
    if isinstance(value, functools.partial):
        captured = tensors_of([*value.args, *value.keywords.values()])
    elif isinstance(value, types.FunctionType) and value.__closure__:
        captured = [cell.cell_contents for cell in value.__closure__ if _is_tensor_cell(cell)]
    else:
        return
    if any(_torch.is_fake(t) for t in captured):
        raise RecordingError(
            f"the function {getattr(value, '__qualname__', value)} that is handed on at {user_line()} has captured a tensor "
            "of this forward, and would see the same one in every micro batch: pass the tensor as an argument of its own"
        )


def _is_tensor_cell(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, torch.Tensor)
    except ValueError:  # an empty cell
        return False
