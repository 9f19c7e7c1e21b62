"""One `model(x)` of a cut model: its inputs, cut into micro batches, and how its body runs on the stages of this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from epl import _torch
from epl.errors import UsageError
from epl.graph.context import Context
from epl.plan.batch import cut_evenly, flat
from epl.report.log import warn
from epl.train.collected import collecting
from epl.train.cut.layout import CallLayout, Values
from epl.train.cut.settings import Settings
from epl.train.lazy.node import Node
from epl.train.lazy.protocol import Carrier, State

if TYPE_CHECKING:
    from epl.train.cut.carrier import StageCarrier


Around = Callable[[int, bool], AbstractContextManager[None]]
"""(micro batch, whether this is its backward) → what surrounds the computation."""


def _nothing_around(micro_batch: int, again: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class Inside(NamedTuple):
    """What is in a model."""

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    """Those that are on this rank."""
    slots: list[tuple[dict[str, Any], str, object]]
    """Where every parameter is kept: the holder, its name there, and the parameter."""
    settings: Settings
    """Of the modules whose forwards run when a call does."""


class ModelCall:
    """What `epl.train.lazy` needs to know of a call (see its protocol), and what the stages need to run it."""

    def __init__(
        self,
        carrier: StageCarrier,
        layout: CallLayout,
        inputs: list[torch.Tensor | Node],
        inside: Inside,
        draws: Sequence[torch.Tensor],
        number: int,
        around: Around = _nothing_around,
    ) -> None:
        """`number`: of the call, alike on all ranks."""
        self.carrier: Carrier = carrier
        self._number = number
        self._stages, self.layout, self.inputs = carrier, layout, inputs
        self.around = around
        self.rows, self.sizes, self.kinds = layout.recorded.rows, layout.recorded.sizes, layout.kinds
        self.context = Context.now()
        self.nodes: list[Node] = []
        self.state: State = "new"
        self.input_gradients: list[torch.Tensor | None] = []
        self._draws, self._modules, self.settings = draws, inside.modules, inside.settings
        self._training = [m.training for m in inside.modules]
        self._set_to = inside.settings.now()
        watched = [*inside.parameters, *(t for t in inputs if isinstance(t, torch.Tensor))]
        self._versions = [(t, _torch.version_of(t)) for t in watched if not t.is_inference()]
        self._cuts = cut_evenly(0, self.rows, len(self.sizes))
        self._leaves: list[torch.Tensor] | None = None
        self._collecting = collecting(self.rows, self)

    @property
    def slots(self) -> int:
        """The number of micro batches."""
        return len(self.sizes)

    def check(self) -> None:
        """Raise if a parameter of this rank, an input, or what a module is set to was changed since `model(x)`."""
        for tensor, version in self._versions:
            if _torch.version_of(tensor) != version:
                raise UsageError(
                    f"a {tuple(tensor.shape)} parameter or input of the model was changed in place between model(x) and the first "
                    "use of its output: call backward(), or read the output, before optimizer.step() or other changes"
                )
        if name := self.settings.changed_since(self._set_to):
            raise UsageError(
                f"{name} was set to something else between model(x) and the first use of its output, and the model runs only then: "
                "call backward(), or read the output, before the change"
            )

    # ---- forward ---------------------------------------------------------------------------------------------------

    def run(self, stage: int, micro_batch: int, incoming: Mapping[int, torch.Tensor]) -> Values:
        """Carry out what a stage does of one micro batch."""
        first, end = self._cuts[micro_batch]
        own = self._stages.place.lanes.rows(stage, end - first)
        self._stages.padded = own.padding
        start, stop = first + own.start, first + own.stop
        tensors = [
            tensor[start:stop] if is_cut else tensor
            for tensor, is_cut in zip(self._inputs(), self.layout.recorded.is_cut, strict=True)
        ]
        now = [m.training for m in self._modules]
        as_called = now == self._training
        if not as_called:
            self._set_training(self._training)
        # Without grad mode for good reason: an evaluation, or what nobody will differentiate.
        context = self.context._replace(grad=self.context.grad and torch.is_grad_enabled())
        try:
            collecting = self._collecting.micro_batch(stage, start, stop - start, padded=own.padding)
            drawing = self._stages.drawing(self._number, stage, start)
            with context.restored(), collecting, drawing, self.around(micro_batch, False), self._stages.inside(stage):
                return self.layout.run(stage, stop - start, tensors, incoming, self._draws)
        finally:
            if not as_called:
                self._set_training(now)

    def warn_of_values_left(self) -> None:
        """Values with a graph that the forwards of modules have left in attributes: the loop must not take them for this step's."""
        for module in self._modules:
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    warn(
                        f"{type(module).__name__}.{name} is a value that its forward leaves in an attribute. The model runs later than the call, in "
                        "micro batches, and only on the rank that has the module: a loss that reads the attribute gets an old value of one micro "
                        "batch, or none. Return it from forward, or give it to epl.add_to_collection."
                    )

    def _inputs(self) -> list[torch.Tensor]:
        """The inputs as leaves of their own, so that their gradients are this call's alone."""
        if self._leaves is None or not torch.is_grad_enabled():
            real = [t for t in self.inputs if isinstance(t, torch.Tensor)]
            assert len(real) == len(self.inputs), "lazy inputs are computed before the body runs"
            grad = torch.is_grad_enabled() and self.context.grad
            leaves = [t.detach().requires_grad_() if grad and t.requires_grad else t for t in real]
            if not grad:
                return leaves
            self._leaves = leaves
        return self._leaves

    def _set_training(self, flags: Sequence[bool]) -> None:
        for module, flag in zip(self._modules, flags, strict=True):
            module.training = flag

    def join(self, number: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A frontier value of the whole batch from those of the micro batches."""
        kind = self.kinds[number]
        if not isinstance(kind, str):
            return torch.cat(list(parts), flat(kind).dim) if len(parts) > 1 else parts[0]
        if kind == "constant" or len(parts) == 1:
            return parts[0]
        weighted = [part * (size / self.rows) for part, size in zip(parts, self.sizes, strict=True)]
        return torch.stack(weighted).sum(0)

    # ---- backward --------------------------------------------------------------------------------------------------

    def cut_gradients(self, micro_batch: int, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What one micro batch gets of the gradients of the whole batch's frontier values."""
        start, stop = self._cuts[micro_batch]
        found: list[torch.Tensor | None] = []
        for kind, gradient in zip(self.kinds, gradients, strict=True):
            if gradient is None or (kind == "constant" and micro_batch > 0):
                found.append(None)
            elif not isinstance(kind, str):
                dim, inner = flat(kind)
                found.append(gradient.narrow(dim, start * inner, (stop - start) * inner))
            else:
                found.append(gradient if kind == "constant" else gradient * ((stop - start) / self.rows))
        return found

    def take_input_gradients(self) -> list[torch.Tensor | None]:
        """What has come back to the inputs on this rank since the last time; zero where nothing has."""
        found: list[torch.Tensor | None] = []
        for leaf in self._leaves or self.inputs:
            assert isinstance(leaf, torch.Tensor)
            if leaf.requires_grad and self.context.grad:
                gradient, leaf.grad = leaf.grad, None
                found.append(torch.zeros_like(leaf) if gradient is None else gradient)
            else:
                found.append(None)
        return found
