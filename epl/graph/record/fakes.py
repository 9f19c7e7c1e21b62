"""The model without numbers: while it is recorded, its parameters, buffers and other tensors are fakes of the same specs.

Nothing real is read (parameters of other stages have no bytes, and a model on the meta device has none at all), and
nothing that a forward does to its modules is left behind: every module's `__dict__` is put back as it was.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from epl.graph.spec import Spec, contiguous_strides
from epl.plan.split.layout import layout_of

_CONTAINERS = frozenset({dict, list, set, OrderedDict, defaultdict, deque})
_TENSOR_DICTS = ("_parameters", "_buffers")
_OWN = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CHANGED = frozenset({"_modules", *_HOOKS})
"""Of the containers that every module has, those that a forward might change: some install hooks when they first run."""


@dataclass(frozen=True)
class Held:
    """Where a module holds a tensor."""

    owner: nn.Module
    name: str
    path: str
    """From the model, as in `encoder.position`."""


class _Entry(NamedTuple):
    """A module, and what it holds while it is recorded."""

    module: nn.Module
    parameters: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor | None]
    others: dict[str, torch.Tensor]
    containers: tuple[str, ...]
    """The attributes whose contents a forward might change."""


class FakeModel:
    """A model whose tensors are replaced by fakes inside `entered()`. The fakes are kept for the next recording."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.held: dict[int, Held] = {}
        """By the id of the fake."""
        self._device = device
        self._fakes: dict[int, tuple[weakref.ref[torch.Tensor], Spec, torch.Tensor]] = {}
        self._entries: list[_Entry] | None = None
        self._modules: list[nn.Module] | None = None
        self._before: dict[nn.Module, dict[str, Any]] = {}
        self._at_start: dict[nn.Module, dict[str, Any]] = {}
        self._contents: list[tuple[Any, Any]] = []

    def spec_of(self, tensor: torch.Tensor) -> Spec:
        """The spec with which a tensor is recorded: as on one device, so a block of a split parameter as the whole of it."""
        spec = Spec.of(tensor)
        layout = layout_of(tensor) if isinstance(tensor, nn.Parameter) else None
        if layout is not None:
            spec = spec._replace(shape=layout.shape, stride=contiguous_strides(layout.shape))
        return spec._replace(device=self._device) if spec.device.type == "meta" else spec

    def look_again(self) -> None:
        """Something about the model's modules or tensors has changed."""
        self._entries = self._modules = None

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model, itself among them."""
        if self._modules is None:
            self._modules = list(self.model.modules())
        return self._modules

    @contextlib.contextmanager
    def entered(self, glue: Collection[nn.Module]) -> Iterator[None]:
        """Inside (and under a fake mode), modules hold fakes; afterwards everything is as it was before.

        What the forward sets on the modules `glue` is told by `changes()`, until then.
        """
        if self._entries is None:
            self.held = {}
            self._entries = [self._entry(path, module) for path, module in self.model.named_modules()]
        contents: list[tuple[Any, Any]] = []
        self._contents = contents
        try:
            for module, parameters, buffers, others, containers in self._entries:
                state = module.__dict__
                self._before[module] = state.copy()
                for name in containers:
                    value = state.get(name)
                    if type(value) in _CONTAINERS:
                        contents.append((value, value.copy() if value else None))
                # Copies: what the forward registers or assigns goes into them, and is gone with them.
                state["_parameters"], state["_buffers"] = parameters.copy(), buffers.copy()
                state.update(others)
            self._at_start = {module: _attributes(module) for module in glue}
            yield
        finally:
            for module, before in self._before.items():
                state = module.__dict__
                state.clear()
                state.update(before)
            for container, content in contents:
                _put_back(container, content)
            self._before, self._at_start, self._contents = {}, {}, []

    def new_hooks(self) -> Iterator[tuple[Any, Any, Any]]:
        """The hooks that the forward has put on modules so far: (where, those before, those now)."""
        places = {id(state[name]) for state in (module.__dict__ for module in self.modules) for name in _HOOKS}
        for container, content in self._contents:
            if id(container) in places and len(container) > len(content or ()):
                yield container, content or {}, container.copy()

    def changes(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """What the forward has set anew so far: (module, attribute, value)."""
        for module, before in self._at_start.items():
            for name, value in _attributes(module).items():
                if name not in before or before[name] is not value:
                    yield module, name, value

    @contextlib.contextmanager
    def filled(self, module: nn.Module, stand_in: Callable[[Spec], torch.Tensor]) -> Iterator[None]:
        """Inside, this module has numbers: stand-ins for its parameters, copies of its other tensors."""
        made: dict[int, torch.Tensor] = {}

        def number(fake: torch.Tensor) -> torch.Tensor:
            if id(fake) not in made:
                made[id(fake)] = self._numbers(fake, stand_in)
            return made[id(fake)]

        saved = [(each.__dict__, each.__dict__.copy()) for each in module.modules()]
        try:
            for state, _ in saved:
                for kind in _TENSOR_DICTS:
                    state[kind] = {name: None if fake is None else number(fake) for name, fake in state[kind].items()}
                state.update({name: number(value) for name, value in state.items() if isinstance(value, torch.Tensor)})
            yield
        finally:
            for state, before in saved:
                state.clear()
                state.update(before)

    def _numbers(self, fake: torch.Tensor, stand_in: Callable[[Spec], torch.Tensor]) -> torch.Tensor:
        if isinstance(fake, nn.Parameter):
            return nn.Parameter(stand_in(Spec.of(fake)._replace(requires_grad=False)), fake.requires_grad)
        held = self.held.get(id(fake))
        before = {} if held is None else self._before[held.owner]
        real = None if held is None else before["_buffers"].get(held.name, before.get(held.name))
        if real is None or real.device.type == "meta":
            return stand_in(Spec.of(fake))
        return cast(torch.Tensor, real.detach().clone().requires_grad_(fake.requires_grad))

    def _entry(self, path: str, module: nn.Module) -> _Entry:
        prefix = f"{path}." if path else ""
        state = module.__dict__
        parameters, buffers = (
            {
                name: None if real is None else self._fake(module, name, prefix, real)
                for name, real in state[kind].items()
            }
            for kind in _TENSOR_DICTS
        )
        others = {
            name: self._fake(module, name, prefix, real)
            for name, real in state.items()
            if isinstance(real, torch.Tensor)
        }
        containers = tuple(
            name
            for name, value in state.items()
            if type(value) in _CONTAINERS and (name not in _OWN or name in _CHANGED) and name not in _TENSOR_DICTS
        )
        return _Entry(module, parameters, buffers, others, containers)

    def _fake(self, owner: nn.Module, name: str, prefix: str, real: torch.Tensor) -> torch.Tensor:
        spec = self.spec_of(real)
        known = self._fakes.get(id(real))
        if known is None or known[0]() is not real or known[1] != spec or known[2].requires_grad != spec.requires_grad:
            fake: torch.Tensor = spec._replace(requires_grad=False).empty()
            if isinstance(real, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=spec.requires_grad)
            elif spec.requires_grad:
                fake.requires_grad_()
            known = self._fakes[id(real)] = (weakref.ref(real), spec, fake)
        self.held.setdefault(id(known[2]), Held(owner, name, prefix + name))
        return known[2]


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in module.__dict__.items() if name not in _TENSOR_DICTS}
    return {**own, **module.__dict__["_parameters"], **module.__dict__["_buffers"]}


def _put_back(container: Any, content: Any) -> None:
    if content is None:
        container.clear()
        return
    same = len(container) == len(content) and all(map(operator.is_, container, content))
    if same and (not isinstance(container, dict) or all(map(operator.is_, container.values(), content.values()))):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
