"""How the arguments and results of split parts carry the batch: found by comparing the recorded forward at two sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from epl.errors import PlanError
from epl.graph.record import RecordedCall
from epl.graph.record.call import describe
from epl.graph.spec import Spec
from epl.parallel.split.rows import PLAIN, Batched, PartCall

RowMap = dict[nn.Module, list[PartCall]]
"""By part, its calls in the order in which the forward makes them."""


class GlueCall(NamedTuple):
    """A call of a torch function between modules."""

    func: Any
    call: PartCall


def row_map(recorded: RecordedCall, taskgraphs: Collection[str]) -> RowMap:
    """How the batch goes into the parts of these TaskGraphs and comes out of them."""
    found: RowMap = {}
    for place, node in enumerate(recorded.whole.nodes):
        if node.op == "call_module" and node.meta.get("taskgraph") in taskgraphs:
            found.setdefault(recorded.whole.modules[str(node.target)], []).append(_part_call(recorded, node, place))
    return found


def glue_calls(recorded: RecordedCall, parameters: Collection[int]) -> list[GlueCall]:
    """How the batch goes through the code between modules that computes with these parameters (by id), or with what follows from them."""
    found: list[GlueCall] = []
    of_parameters: set[fx.Node] = set()
    for place, node in enumerate(recorded.whole.nodes):
        if node.op == "get_attr":
            held = recorded.whole.held.get(node)
            if held is not None and id(held.owner._parameters.get(held.name)) in parameters:
                of_parameters.add(node)
        elif node.op == "call_function" and not of_parameters.isdisjoint(node.all_input_nodes):
            of_parameters.add(node)
            with contextlib.suppress(PlanError):  # no dim of it is the batch: own rows are gathered for it
                call = _part_call(recorded, node, place)
                if not any(how.coupled for how in (*call.inputs, *call.outputs)):  # made of own rows, and of no others
                    found.append(GlueCall(node.target, call))
    return found


def _part_call(recorded: RecordedCall, node: fx.Node, place: int) -> PartCall:
    another = recorded.another_size()
    rows, other = (recorded.rows, None) if another is None else (another[0], another[1].nodes[place])
    sides = []
    for specs in (_inputs, _outputs):
        here = list(specs(node))
        there = here if other is None else list(specs(other))
        depends = recorded.depends_on_batch(node) if specs is _outputs else None
        sides.append(
            tuple(
                _batched(a, b, recorded.rows, rows, node, _depends(recorded, n, depends))
                for (n, a), (_, b) in zip(here, there, strict=True)
            )
        )
    return PartCall(sides[0], sides[1], tuple(spec.shape for _, spec in _inputs(node)))


def _depends(recorded: RecordedCall, node: fx.Node | None, known: bool | None) -> bool:
    return known if known is not None else node is not None and recorded.depends_on_batch(node)


def _inputs(node: fx.Node) -> Iterator[tuple[fx.Node | None, Spec]]:
    """The specs of the tensors among a call's arguments, in the order of `graph.record.tree`, with the nodes that make them."""
    for argument in _nodes((node.args, node.kwargs)):
        spec = argument.meta.get("spec")
        if spec is not None:
            yield argument, spec
        else:  # a container that is put together from other values
            yield from _inputs(argument)


def _outputs(node: fx.Node) -> Iterator[tuple[None, Spec]]:
    specs = node.meta.get("specs") or ((node.meta["spec"],) if "spec" in node.meta else ())
    yield from ((None, spec) for spec in specs)


def _nodes(tree: Any) -> Iterator[fx.Node]:
    if isinstance(tree, fx.Node):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _nodes(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _nodes(each)
    elif isinstance(tree, slice):
        yield from _nodes((tree.start, tree.stop, tree.step))


def _batched(here: Spec, there: Spec, rows: int, other: int, node: fx.Node, depends: bool) -> Batched:
    shape, compared = here.shape, there.shape
    if other == rows:  # nothing to compare with: the forward runs at this size only
        if depends and shape and shape[0] == rows:
            return Batched(0)
        return PLAIN
    changed = [d for d in range(len(shape)) if shape[d] != compared[d]] if len(shape) == len(compared) else []
    if shape == compared:
        return Batched(None, coupled=depends)
    if len(changed) == 1:
        dim = changed[0]
        inner, rest = divmod(shape[dim], rows)
        if not rest and inner and compared[dim] == inner * other:
            return Batched(dim, inner)
    raise PlanError(
        f"{describe(node)}, or an argument of it, has the shape {tuple(shape)} for {rows} rows and {tuple(compared)} for {other}: no dim of it "
        "is the batch. Ranks have rows of their own under replicate, and a split part on the same devices needs to know which they "
        "are: keep the batch as a dim of its own in what goes into the part and comes out of it"
    )


def fitting(calls: Sequence[PartCall], number: int, shapes: Sequence[torch.Size]) -> PartCall | None:
    """Which of a part's recorded calls this is: the `number`-th, or, while a checkpoint runs again, one with such arguments."""
    same = [call for call in calls if fits(call, shapes)]
    if number < len(calls) and fits(calls[number], shapes):
        return calls[number]
    return same[0] if len({(call.inputs, call.outputs) for call in same}) == 1 else None


def fits(call: PartCall, shapes: Sequence[torch.Size]) -> bool:
    """Whether these are shapes of its arguments, for any number of rows."""
    if len(shapes) != len(call.shapes):
        return False
    for how, recorded, found in zip(call.inputs, call.shapes, shapes, strict=True):
        if len(recorded) != len(found):
            return False
        if any(a != b for d, (a, b) in enumerate(zip(recorded, found, strict=True)) if d != how.dim):
            return False
    return True
