"""One run of the user's forward on fake tensors: in go the specs of its inputs, out comes a recording."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from epl.errors import RecordingError
from epl.graph.context import Context
from epl.graph.record import hooks, steps
from epl.graph.record.chance import DrawingLine, PythonStreams, torch_streams_kept
from epl.graph.record.draws import Draws
from epl.graph.record.fakes import FakeModel
from epl.graph.record.foresight import Foresight
from epl.graph.record.inputs import Inputs
from epl.graph.record.leaf import Leaves
from epl.graph.record.objects import dump
from epl.graph.record.recorder import STAGES, Apart, HooksInside, NotALeaf, Recorder
from epl.graph.record.recording import Attribute, ObjectOf, Outputs, Recording
from epl.graph.record.shapes import Form
from epl.graph.record.standin import StaysOnStages
from epl.graph.record.tree import skeleton
from epl.graph.record.writer import Writer
from epl.graph.spec import Spec
from epl.graph.state import Registry
from epl.graph.taskgraph import Annotation
from epl.report.log import Patience


class Scopes:
    """The names of the TaskGraphs whose scopes a forward opens: one without a name is known by its turn."""

    def __init__(self, registry: Registry) -> None:
        self.opened = False
        """Whether some forward opens scopes."""
        self._registry = registry
        self._by_turn: list[str] = []
        self._turn = 0
        self._name: str | None = None

    @contextlib.contextmanager
    def watched(self, inside: Callable[[], nn.Module | None]) -> Iterator[None]:
        """Inside, scopes are noted; one that a leaf opens raises NotALeaf."""
        before, self._registry.on_forward_scope = self._registry.on_forward_scope, self._opened
        self._inside, self._turn, self._name = inside, 0, None
        try:
            yield
        finally:
            self._registry.on_forward_scope = before

    def current(self) -> str | None:
        """The TaskGraph of the scope that is open in the forward now."""
        if self._name is not None and self._registry.scope is None:
            self._name = None
        return self._name

    def _opened(self, annotation: Annotation) -> None:
        leaf = self._inside()
        if leaf is not None:
            raise NotALeaf(leaf)
        self.opened = True
        unnamed = annotation.name is None
        if unnamed and self._turn < len(self._by_turn):
            self._name = self._by_turn[self._turn]
        else:
            taskgraph = self._registry.open(annotation)
            self._registry.mark(taskgraph)
            self._name = taskgraph.name
            if unnamed:
                self._by_turn.append(self._name)
        self._turn += unnamed


@dataclass(frozen=True)
class Surroundings:
    """What all recordings of one model share."""

    model: FakeModel
    leaves: Leaves
    foresight: Foresight
    scopes: Scopes
    fake_mode: contextlib.AbstractContextManager[Any]
    taskgraph_of: Callable[[nn.Module], str | None]
    apart: Apart = STAGES


def record(
    surroundings: Surroundings,
    inputs: Inputs,
    shapes: Sequence[torch.Size],
    draws: Draws,
    *,
    paths: dict[nn.Module, str | None],
    glue: Collection[nn.Module],
) -> Recording:
    """The model's forward on inputs of these shapes. `paths`: the leaves with their names. `glue`: the other modules."""
    try:
        return _record(surroundings, inputs, shapes, draws, paths, glue)
    except _DrawsUnseen as found:
        where, used = DrawingLine(), found.used
        with contextlib.suppress(Exception, HooksInside):
            _record(surroundings, inputs, shapes, draws.afresh(), paths, glue, where)
    raise RecordingError(
        f"the forward draws from {used} between its modules, and recorded the draw would be the same for ever, at "
        f"{where.line or 'an unknown line'}. {surroundings.apart.ways_out}"
    )


class _DrawsUnseen(Exception):
    """The forward has drawn from a generator that is not torch's."""

    def __init__(self, used: str) -> None:
        super().__init__(used)
        self.used = used


def _record(
    surroundings: Surroundings,
    inputs: Inputs,
    shapes: Sequence[torch.Size],
    draws: Draws,
    paths: dict[nn.Module, str | None],
    glue: Collection[nn.Module],
    where: DrawingLine | None = None,
) -> Recording:
    """`where`: finds the line that draws."""
    model, context = surroundings.model, Context.now()
    writer = Writer(model, surroundings.scopes.current)
    recorder = Recorder(writer, surroundings.leaves, surroundings.foresight, draws, paths)
    recorder.taskgraph_of, recorder.apart = surroundings.taskgraph_of, surroundings.apart

    patience = Patience()
    recorder.tell = lambda count: patience.tell(
        lambda: f"writing down the model's forward: {count} of its modules are done"
    )
    hooked = [each for each in model.modules if each is not model.model and hooks.has_hooks(each)]
    streams = PythonStreams()
    torch.clear_autocast_cache()  # it would hand out casts of fakes that were made under another grad mode
    try:
        with (
            torch_streams_kept(),
            hooks.taken_back(hooked),
            torch.inference_mode(False),
            torch.set_grad_enabled(context.grad),
            surroundings.fake_mode,
            model.entered(glue),
            surroundings.scopes.watched(lambda: recorder.inside),
        ):
            specs = [
                spec._replace(shape=shape, stride=_strides(spec, shape))
                for spec, shape in zip(inputs.specs, shapes, strict=True)
            ]
            # What asks for a gradient has to be a leaf of autograd, as the user's tensor is.
            fakes = [spec.empty() if spec.requires_grad else surroundings.leaves.fresh(spec) for spec in specs]
            for number, fake in enumerate(fakes):
                node = writer.write("placeholder", f"input_{number}")
                node.meta["input"] = number
                writer.bind(fake, node)
            args, kwargs = inputs.fill(fakes)
            if where is not None:
                where.ignore = lambda: recorder.inside is not None
            with (
                _hooks_told(paths, surroundings.leaves),
                recorder.listening(),
                where.looked_for() if where is not None else contextlib.nullcontext(),
            ):
                # Not by __call__: the model's own hooks run where it is called, on what comes out in the end.
                result = model.model.forward(*args, **kwargs)
            used = streams.moved()
            if used is not None:
                raise _DrawsUnseen(used)
            return _finish(writer, recorder, result, model, paths, context)
    finally:
        writer.close()
        streams.restore()
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _hooks_told(paths: Collection[nn.Module], leaves: Leaves) -> Iterator[None]:
    """Inside, a failure says what hooks there are: now, for some models set them when they first run."""
    try:
        yield
    except Exception as error:
        found = hooks.around_hooks(paths)
        if found or (not leaves.minds_hooks and any(map(hooks.has_hooks, paths))):
            raise HooksInside(error, found) from error
        raise


def _strides(spec: Spec, shape: torch.Size) -> tuple[int, ...]:
    if shape == spec.shape:
        return spec.stride
    other = Form.of(spec).at(shape)
    return other.stride if other is not None else tuple(torch.empty(shape, device="meta").stride())


def _finish(
    writer: Writer,
    recorder: Recorder,
    result: Any,
    model: FakeModel,
    paths: dict[nn.Module, str | None],
    context: Context,
) -> Recording:
    attributes = []
    for module, name, value in model.changes():
        if name in module._buffers and isinstance(value, torch.Tensor):
            writer.write("call_function", steps.assign, (module, name, writer.node_of(value)))
        else:
            attributes.append(Attribute(module, name, _outputs(writer, value)))
    outputs = _outputs(writer, result)
    needed = {node: None for each in (outputs, *(a.value for a in attributes)) for node in each.nodes}
    writer.graph.output(tuple(needed))
    writer.drop_unused()
    nodes = list(writer.graph.nodes)
    return Recording(
        graph=writer.graph,
        placeholders=tuple(node for node in nodes if node.op == "placeholder"),
        outputs=outputs,
        attributes=tuple(attributes),
        hooks=tuple(model.new_hooks()),
        draws=tuple(node for node in nodes if steps.is_drawn(node)),
        modules={path: module for module, path in paths.items() if path is not None},
        held=writer.held,
        context=context,
    )


def _outputs(writer: Writer, value: Any) -> Outputs:
    leaves, fill = skeleton(value, writer.objects.is_known)
    return Outputs(tuple(_output(writer, leaf) for leaf in leaves), fill)


def _output(writer: Writer, leaf: Any) -> fx.Node | ObjectOf | StaysOnStages:
    if isinstance(leaf, torch.Tensor):
        return writer.node_of(writer.fake_of(leaf))
    if writer.objects.is_known(leaf):  # a module was given it, and may have filled it
        return StaysOnStages(type(leaf).__name__)
    data, tensors = dump(leaf)
    return ObjectOf(steps.Pristine(type(leaf).__name__, data), tuple(writer.node_of(t) for t in tensors))
