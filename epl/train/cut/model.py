"""Stands in for the forward of a model that is cut: records it, has it placed once, and returns lazy values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn

from epl.data.structure import digest
from epl.errors import RecordingError, UsageError
from epl.graph.record import RecordedCall, Recordings
from epl.parallel.growth import growth
from epl.plan.stages import StageCut
from epl.train.cut.call import ModelCall
from epl.train.cut.carrier import StageCarrier
from epl.train.cut.layout import CallLayout
from epl.train.cut.state import WholeState
from epl.train.lazy import ForeignParameter, LazyTensor, node_of, outputs_of, run_forward
from epl.train.lazy.node import journal

_LAYOUTS = 256  # signatures that are kept
_CHECKED_CALLS = 3  # whose inputs must be the same bits on every rank of a replica, or all ranks raise when they meet


class Placer(Protocol):
    """Decides where the parts of a model run, once its first call is recorded, and carries that out on this rank."""

    widths: tuple[int, ...]
    """Over how many ranks each stage divides a micro batch."""

    def place(self, recorded: RecordedCall) -> StageCarrier:
        """What runs calls from now on, placed by the first recorded one; all ranks call it together."""

    def cut(self, recorded: RecordedCall) -> StageCut:
        """The cut of a recording of the placed model."""

    def whole_state(self) -> WholeState | None:
        """How the whole state is gathered and loaded; None where every rank has all of it."""


class CutModel:
    """One model whose calls give lazy values. `close` gives the model its own forward back."""

    def __init__(self, model: nn.Module, recordings: Recordings, num_micro_batch: int, placer: Placer) -> None:
        self.model, self._recordings, self._placer = model, recordings, placer
        self._num_micro_batch = num_micro_batch
        self.carrier: StageCarrier | None = None
        self._layouts: dict[RecordedCall, CallLayout] = {}
        self._calls = 0
        self._known_inside: tuple[list[nn.Module], list[nn.Parameter]] = ([], [])
        self._inside_as_of = -1
        growth.watch()
        self.instance_forward = model.__dict__.get("forward")
        self._own_forward = model.forward
        self._as_it_is = False
        model.forward = _Forward(self)

    def close(self) -> None:
        """The model runs as it is again."""
        growth.unwatch()
        del self.model.forward
        if self.instance_forward is not None:
            self.model.forward = self.instance_forward

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What calling the model does."""
        return self._own_forward(*args, **kwargs) if self._as_it_is else self._call(args, kwargs)

    @contextlib.contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Inside, the model runs its own forward."""
        before, self._as_it_is = self._as_it_is, True
        try:
            yield
        finally:
            self._as_it_is = before

    def whole_state(self) -> WholeState | None:
        """How the whole state is gathered and loaded, once the model is in parts."""
        return self._placer.whole_state() if self.carrier is not None else None

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `model(x)` does instead of its forward."""
        self._calls += 1
        with self.as_it_is():  # the layout, too, may want the forward at one more size
            recorded = self._record(args, kwargs)
            if self.carrier is None:
                self._place(recorded, args, kwargs)
            layout = self._layout(recorded)
        carrier = self.carrier
        assert carrier is not None
        tensors = recorded.input_tensors(args, kwargs)
        if any(t.is_meta for t in tensors):
            raise UsageError(
                "the model is given a tensor on the meta device; a model that was built there leaves it with its first call, so "
                "do not move inputs to model.device before that"
            )
        call = ModelCall(
            carrier,
            layout,
            [node_of(t) if isinstance(t, LazyTensor) else t for t in tensors],
            *self._inside(),
            recorded.given,
        )
        carrier.rows = call.rows
        if self._calls <= _CHECKED_CALLS and len(carrier.ranks) > 1:
            journal(carrier).mix(digest([t for t in tensors if not (isinstance(t, LazyTensor) or t.requires_grad)]))
        call.nodes = outputs_of(call, [recorded.spec(node) for node in recorded.frontier])
        if not call.context.grad:
            run_forward(call)  # now: batch norm may learn, and hooks may look on
        return recorded.finish(tensors, [LazyTensor(node) for node in call.nodes])

    def _inside(self) -> tuple[list[nn.Module], list[nn.Parameter]]:
        """The modules of the model, and those of its parameters that are here; looked up anew when some were added."""
        if self._inside_as_of != growth.count:
            parameters = [p for p in self.model.parameters() if not isinstance(p, ForeignParameter)]
            self._known_inside = (list(self.model.modules()), parameters)
            self._inside_as_of = growth.count
        return self._known_inside

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
        return self._recordings.of(
            args, kwargs, self._num_micro_batch, draw_seed=self._calls, widths=self._placer.widths
        )

    def _place(self, recorded: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Once: by this call, or by one that leaves nothing out, if it is drawn by lot what runs (layer drop)."""
        if recorded.given and self.model.training:
            with contextlib.suppress(RecordingError), _evaluating(self.model):
                everything = self._record(args, kwargs)
                recorded = max(recorded, everything, key=_count_leaves)
        self.carrier = self._placer.place(recorded)
        self._inside_as_of = -1  # some parameters are elsewhere now

    def _layout(self, recorded: RecordedCall) -> CallLayout:
        layout = self._layouts.pop(recorded, None)
        if layout is None:
            assert self.carrier is not None
            place = self.carrier.place
            layout = CallLayout(recorded, self._placer.cut(recorded), place.stages, place.home_stage)
        self._layouts[recorded] = layout
        while len(self._layouts) > _LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout


def _count_leaves(recorded: RecordedCall) -> int:
    return sum(node.op == "call_module" for node in recorded.whole.nodes)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module of the model is in evaluation mode."""
    flags = [(module, module.training) for module in model.modules()]
    for module, _ in flags:
        module.training = False
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


class _Forward:
    """Stands where the model's forward was. A copy of the model, or one that is saved and loaded, is a plain model again."""

    def __init__(self, cut: CutModel) -> None:
        self._cut = cut
        functools.update_wrapper(self, cut.model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._cut.forward(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        own = self._cut.instance_forward
        return (_same, (own,)) if own is not None else (getattr, (self._cut.model, "forward"))


def _same(forward: Any) -> Any:
    return forward
