"""Stands in for the forward of a model that is cut: records it, has it placed once, and returns lazy values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import fx, nn

from epl import _torch
from epl.data.structure import digest, sample_digest
from epl.errors import NotBuiltError, PlanError, RecordingError, UsageError
from epl.graph.record import RecordedCall, Recordings
from epl.graph.record.call import describe
from epl.parallel.growth import growth
from epl.plan.stages import StageCut
from epl.report.log import notice
from epl.train.cut.call import Around, Inside, ModelCall
from epl.train.cut.carrier import StageCarrier
from epl.train.cut.layout import CallLayout
from epl.train.cut.settings import Place, Settings
from epl.train.cut.state import WholeState
from epl.train.lazy import ForeignParameter, LazyTensor, node_of, outputs_of, run_forward
from epl.train.lazy.journal import forget_journal, journal

_LAYOUTS = 256  # signatures that are kept
_CHECKED_CALLS = 3  # whose inputs are compared whole between the ranks of a replica; of later ones, a sample


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


class RowsOfRanks(Protocol):
    """Where the ranks of a replica compute together on rows of their own: what they have agreed on for the call under way."""

    @property
    def micro_batches(self) -> int:
        """Into how many micro batches every rank cuts its rows."""

    def around(self) -> Around:
        """What surrounds them when they are computed."""


class CutModel:
    """One model whose calls give lazy values. `close` gives the model its own forward back."""

    def __init__(
        self,
        model: nn.Module,
        recordings: Recordings,
        num_micro_batch: int,
        placer: Placer,
        own_rows: RowsOfRanks | None = None,
        split_names: frozenset[str] = frozenset(),
    ) -> None:
        """`split_names`: of the parameters that are cut over ranks."""
        self.model, self._recordings, self._placer = model, recordings, placer
        self._num_micro_batch, self._own_rows, self._split_names = num_micro_batch, own_rows, split_names
        self.carrier: StageCarrier | None = None
        self._layouts: dict[RecordedCall, CallLayout] = {}
        self._calls = 0
        growth.watch()
        self._inside_as_of: tuple[object, ...] = ()
        self._theirs: set[Place] = set()
        self._inside = self._look_inside()
        self.instance_forward = model.__dict__.get("forward")
        self._own_forward = model.forward
        self._as_it_is = False
        model.forward = _Forward(self)

    def close(self) -> None:
        """The model runs as it is again."""
        growth.unwatch()
        if self.carrier is not None:
            forget_journal(self.carrier)
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
        self._check_parameters()
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
            self._look_inside(),
            recorded.given,
            self._calls,
            *(() if self._own_rows is None else (self._own_rows.around(),)),
        )
        carrier.rows = call.rows
        if len(carrier.ranks) > 1:
            journal(carrier).mix(layout.signature)  # or sizes of messages would not fit, of which Gloo dies
            compared = digest if self._calls <= _CHECKED_CALLS else sample_digest
            journal(carrier).mix(compared([t for t in tensors if not (isinstance(t, LazyTensor) or t.requires_grad)]))
        call.nodes = outputs_of(call, [recorded.spec(node) for node in recorded.frontier])
        if not call.context.grad:
            run_forward(call)  # now: batch norm may learn, and hooks may look on
        return recorded.finish(tensors, [LazyTensor(node) for node in call.nodes])

    def _look_inside(self) -> Inside:
        """What is in the model; looked up anew when something was added, or is looked into."""
        key = (growth.count, self._recordings.glue, self.carrier is None)
        if self._inside_as_of != key:
            modules = list(self.model.modules())
            self._inside_as_of = key
            self.refuse_new_parameters()
            self._inside = Inside(
                modules,
                [p for p in self.model.parameters() if not isinstance(p, ForeignParameter)],
                [(m._parameters, name, p) for m in modules for name, p in m._parameters.items()],
                Settings((m for m in modules if m not in self._recordings.glue), self._theirs),
            )
        return self._inside

    def _refuse_split_parameters_in(self, tail: Iterable[fx.Node]) -> None:
        """What comes after the last module runs with the loss, where a parameter is the rank's own block, or another rank's."""
        for node in tail:
            if node.op == "get_attr" and str(node.target) in self._split_names:
                raise PlanError(
                    f"the parameter {node.target} is under split and used after the last module of the forward"
                    f"{(' at ' + node.meta['where']) if node.meta.get('where') else ''}, where a model in micro batches or stages counts the code "
                    "with the loss: put it into a module of its own, built under the same scope, that uses it in its forward"
                )

    def refuse_new_parameters(self) -> None:
        """Of a placed model in stages: who is to compute with a parameter that turns up later was not agreed on."""
        if self.carrier is None or len(self.carrier.ranks) == 1:
            return
        known = set(map(id, self.carrier.parameters.values()))
        new = [name for name, p in self.model.named_parameters() if id(p) not in known]
        if new:
            raise UsageError(
                f"{len(new)} parameters of the model are new since its first call ({', '.join(new[:3])}): a module was added or replaced. The "
                "model is in stages, and its parameters were dealt out then. Change it before the first call, or call epl.init(), build the "
                "model anew, load epl.full_state_dict and parallelize it again."
            )

    def _check_parameters(self) -> None:
        """Raise if other tensors are in the place of parameters for the time of this call."""
        swapped = any(held is not p for at, name, p in self._inside.slots if (held := at.get(name)) is not None)
        if swapped and (self._inside_as_of[0] == growth.count or _torch.inside_functional_call()):
            raise NotBuiltError(
                "the model was called with other tensors in the place of its parameters (torch.func.functional_call): it runs later, and "
                "on the ranks that have the parameters. Load them with load_state_dict, or call a copy.deepcopy(model) made before "
                "the first call."
            )

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
        count = self._num_micro_batch if self._own_rows is None else self._own_rows.micro_batches
        return self._recordings.of(args, kwargs, count, draw_seed=self._calls, widths=self._placer.widths)

    def _place(self, recorded: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Once: by this call, or by one that leaves nothing out, if it is drawn by lot what runs (layer drop)."""
        if recorded.given and self.model.training:
            with contextlib.suppress(RecordingError), _evaluating(self.model):
                everything = self._record(args, kwargs)
                recorded = max(recorded, everything, key=_count_leaves)
        with torch.inference_mode(False):  # what is made now lives on: an evaluation may come first
            self.carrier = self._placer.place(recorded)

    def _layout(self, recorded: RecordedCall) -> CallLayout:
        layout = self._layouts.pop(recorded, None)
        if layout is None:
            assert self.carrier is not None
            place = self.carrier.place
            self._refuse_split_parameters_in(recorded.tail)
            layout = CallLayout(
                recorded,
                self._placer.cut(recorded),
                place.stages,
                place.home_stage,
                lambda edge: place.lanes.is_direct(edge, ()),
            )
            if len(recorded.sizes) > 1 or max(self._placer.widths) > 1:
                for node in layout.averaged():
                    notice(
                        f"{describe(node)} follows from the batch of {recorded.rows} rows and has no batch dim: it is computed for each micro "
                        "batch, and averaged by rows. That is right for a mean over rows; a sum, a maximum or a variance is best returned row "
                        "by row, and put together in the loss."
                    )
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
