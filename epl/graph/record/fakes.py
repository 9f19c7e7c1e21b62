"""The model without numbers: while it is recorded, its parameters, buffers and other tensors are fakes of the same specs.

Nothing real is read (parameters of other stages have no bytes, and a model on the meta device has none at all), and
nothing that a forward does to its modules is left behind: every module's `__dict__` is put back as it was.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from epl.graph.spec import Spec

_CONTAINERS = frozenset({dict, list, set, OrderedDict, defaultdict, deque})
_TENSOR_DICTS = ("_parameters", "_buffers")


@dataclass(frozen=True)
class Held:
    """Where a module holds a tensor."""

    owner: nn.Module
    name: str
    path: str
    """From the model, as in `encoder.position`."""


class FakeModel:
    """A model whose tensors are replaced by fakes inside `entered()`. The fakes are kept for the next recording."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.held: dict[int, Held] = {}
        """By the id of the fake."""
        self._device = device
        self._fakes: dict[int, tuple[weakref.ref[torch.Tensor], Spec, torch.Tensor]] = {}
        self._entered: dict[nn.Module, dict[str, Any]] = {}
        self._real: dict[int, torch.Tensor] = {}

    def spec_of(self, tensor: torch.Tensor) -> Spec:
        """The spec with which a tensor is recorded: as it is, but never on the meta device."""
        spec = Spec.of(tensor)
        return spec._replace(device=self._device) if spec.device.type == "meta" else spec

    @contextlib.contextmanager
    def entered(self, glue: Collection[nn.Module]) -> Iterator[None]:
        """Inside (and under a fake mode), modules hold fakes; afterwards everything is as it was before.

        What the forward sets on the modules `glue` is told by `changes()`, until then.
        """
        saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        contents: list[tuple[Any, Any]] = []
        self.held, self._real = {}, {}
        try:
            for path, module in self.model.named_modules():
                state = module.__dict__
                saved.append((state, dict(state)))
                contents += [(value, value.copy()) for value in state.values() if type(value) in _CONTAINERS]
                self._replace_tensors(path, module)
            self._entered = {module: _attributes(module) for module in glue}
            yield
        finally:
            self._entered, self._real = {}, {}
            for state, before in saved:
                state.clear()
                state.update(before)
            for container, before in contents:
                _put_back(container, before)

    def changes(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """What the forward has set anew so far: (module, attribute, value)."""
        for module, before in self._entered.items():
            for name, value in _attributes(module).items():
                if name not in before or before[name] is not value:
                    yield module, name, value

    @contextlib.contextmanager
    def filled(self, module: nn.Module, stand_in: Callable[[Spec], torch.Tensor]) -> Iterator[None]:
        """Inside, this module has numbers: stand-ins for its parameters, copies of its other tensors."""
        saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        made: dict[int, torch.Tensor] = {}

        def number(fake: torch.Tensor) -> torch.Tensor:
            if id(fake) not in made:
                real = self._real.get(id(fake))
                if isinstance(fake, nn.Parameter):
                    made[id(fake)] = nn.Parameter(
                        stand_in(Spec.of(fake)._replace(requires_grad=False)), fake.requires_grad
                    )
                elif real is None or real.device.type == "meta":
                    made[id(fake)] = stand_in(Spec.of(fake))
                else:
                    made[id(fake)] = real.detach().clone().requires_grad_(fake.requires_grad)
            return made[id(fake)]

        try:
            for each in module.modules():
                state = each.__dict__
                saved.append((state, dict(state)))
                for kind in _TENSOR_DICTS:
                    state[kind] = {name: None if fake is None else number(fake) for name, fake in state[kind].items()}
                for name, value in list(state.items()):
                    if isinstance(value, torch.Tensor):
                        state[name] = number(value)
            yield
        finally:
            for state, before in saved:
                state.clear()
                state.update(before)

    def _replace_tensors(self, path: str, module: nn.Module) -> None:
        prefix = f"{path}." if path else ""
        state = module.__dict__
        for kind in _TENSOR_DICTS:
            # A new dict: what the forward registers or assigns goes into it, and is gone with it.
            state[kind] = {
                name: None if real is None else self._fake(module, name, prefix, real)
                for name, real in state[kind].items()
            }
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor):
                state[name] = self._fake(module, name, prefix, value)

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
        self._real[id(known[2])] = real
        return known[2]


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in module.__dict__.items() if name not in _TENSOR_DICTS}
    return {**own, **module.__dict__["_parameters"], **module.__dict__["_buffers"]}


def _put_back(container: Any, before: Any) -> None:
    same = len(container) == len(before) and all(map(_is, container, before))
    if same and (not isinstance(container, dict) or all(map(_is, container.values(), before.values()))):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before)


def _is(one: object, other: object) -> bool:
    return one is other
