"""How the arguments and results of split parts carry the batch: found by comparing the recorded forward at two sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from epl.errors import PlanError
from epl.graph.record import RecordedCall, steps
from epl.graph.record.call import describe
from epl.graph.record.tree import skeleton
from epl.graph.spec import Spec
from epl.parallel.split.rows import PLAIN, Batched, PartCall
from epl.train.split.leftout import LeftOut
from epl.train.split.roworder import RowOrder


class RecordedPart(NamedTuple):
    """A call of a split part, as it was recorded."""

    call: PartCall
    node: fx.Node
    carries: Mapping[fx.Node, Batched]
    """How each tensor among its arguments carries the batch."""


RowMap = dict[nn.Module, list[RecordedPart]]
"""By part, its calls in the order in which the forward makes them."""


class GlueCall(NamedTuple):
    """A call of a torch function between modules."""

    func: Any
    call: PartCall


def row_map(recorded: RecordedCall, taskgraphs: Collection[str]) -> RowMap:
    """How the batch goes into the parts of these TaskGraphs and comes out of them."""
    found: RowMap = {}
    order = RowOrder(recorded)
    for place, node in enumerate(recorded.whole.nodes):
        if node.op == "call_module" and node.meta.get("taskgraph") in taskgraphs:
            call = _part_call(recorded, order, node, place)
            carries = dict(zip((argument for argument, _ in _inputs(node)), call.inputs, strict=True))
            part = RecordedPart(call, node, carries)
            found.setdefault(recorded.whole.modules[str(node.target)], []).append(part)
    return found


def glue_calls(recorded: RecordedCall, parameters: Collection[int]) -> list[GlueCall]:
    """How the batch goes through the code between modules that computes with these parameters (by id), or with what follows from them."""
    found: list[GlueCall] = []
    of_parameters: set[fx.Node] = set()
    order = RowOrder(recorded)
    for place, node in enumerate(recorded.whole.nodes):
        if node.op == "get_attr":
            held = recorded.whole.held.get(node)
            if held is not None and id(held.owner._parameters.get(held.name)) in parameters:
                of_parameters.add(node)
        elif node.op == "call_function" and not of_parameters.isdisjoint(node.all_input_nodes):
            of_parameters.add(node)
            try:
                call = _part_call(recorded, order, node, place)
            except PlanError:  # no dim of it is the batch: own rows are gathered for it
                continue
            if any(how.coupled for how in (*call.inputs, *call.outputs)):  # not made of own rows and of no others
                continue
            if not _says_rows_by_number(node, call):
                found.append(GlueCall(node.target, call))
    return found


_BY_NUMBER = frozenset(
    [
        "index_select",
        "index_add",
        "index_add_",
        "index_copy",
        "index_copy_",
        "index_fill",
        "index_fill_",
        "narrow",
        "select",
        "gather",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "take_along_dim",
        "select_scatter",
        "slice_scatter",
        "roll",
    ]
)
"""Functions that say by number what they take or change of the dim that is given to them."""
_FLAT = frozenset(["take", "put", "put_", "masked_select"])
_INDEXED = frozenset({"__getitem__", "__setitem__", "index_put", "index_put_"})


def _says_rows_by_number(node: fx.Node, call: PartCall) -> bool:
    """Whether an operation says by number which rows of its first argument it means: own rows have numbers of their own."""
    rows = call.inputs[0].dim if call.inputs else None
    name = getattr(node.target, "__name__", "")
    if rows is None:
        return False
    if name in _FLAT:
        return True
    if name in _BY_NUMBER:
        dims = len(call.shapes[0])
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if name == "roll":
            dim = node.kwargs.get("dims", node.args[2] if len(node.args) > 2 else None)
        elif name == "take_along_dim":
            dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
        return not isinstance(dim, int) or dim % dims == rows
    if name not in _INDEXED:
        return False
    index = node.args[1] if len(node.args) > 1 else node.kwargs.get("indices")
    return _index_of(index, rows, len(call.shapes[0])) != slice(None)


def _index_of(index: Any, dim: int, dims: int) -> Any:
    """What an index says of one dim of a tensor."""
    parts = list(index) if isinstance(index, (tuple, list)) and not _is_numbers(index) else [index]
    taken = sum(_dims_of(part) for part in parts if part is not Ellipsis)
    at = 0
    for part in parts:
        width = dims - taken if part is Ellipsis else _dims_of(part)
        if at <= dim < at + width:
            if part is Ellipsis:
                return slice(None)
            return slice(None) if _is_mask(part) else part
        at += width
    return slice(None)


def _dims_of(part: Any) -> int:
    """Over how many dims of the tensor a part of an index goes."""
    if part is None or isinstance(part, bool):
        return 0
    return len(part.meta["spec"].shape) if _is_mask(part) else 1


def _is_mask(part: Any) -> bool:
    return isinstance(part, fx.Node) and "spec" in part.meta and part.meta["spec"].dtype is torch.bool


def _is_numbers(index: Any) -> bool:
    return isinstance(index, list) and all(isinstance(each, (int, list)) for each in index)


def _part_call(recorded: RecordedCall, order: RowOrder, node: fx.Node, place: int) -> PartCall:
    another = recorded.another_size()
    rows, other = (recorded.rows, None) if another is None else (another[0], another[1].nodes[place])
    sides = []
    for specs in (_inputs, _outputs):
        here = list(specs(node))
        there = here if other is None else list(specs(other))
        depends = recorded.depends_on_batch(node) if specs is _outputs else None
        sides.append(
            tuple(
                _batched(
                    a, b, recorded.rows, rows, node, _depends(recorded, n, depends), partial(order.sections, n or node)
                )
                for (n, a), (_, b) in zip(here, there, strict=True)
            )
        )
    return PartCall(sides[0], sides[1], tuple(spec.shape for _, spec in _inputs(node)))


def _depends(recorded: RecordedCall, node: fx.Node | None, known: bool | None) -> bool:
    return known if known is not None else node is not None and recorded.depends_on_batch(node)


def _inputs(node: fx.Node) -> Iterator[tuple[fx.Node, Spec]]:
    """The specs of the tensors among a call's arguments, in the order of `graph.record.tree`, with the nodes that make them."""
    yield from _inputs_of((node.args, node.kwargs))


def _inputs_of(tree: Any) -> Iterator[tuple[fx.Node, Spec]]:
    for argument in _nodes(tree):
        spec = argument.meta.get("spec")
        if spec is not None:
            yield argument, spec
        elif argument.target is steps.changed:  # an object: which module has filled it is no argument
            yield from _inputs_of(argument.args[0])
        else:  # a container that is put together from other values
            yield from _inputs_of((argument.args, argument.kwargs))


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


def _batched(
    here: Spec,
    there: Spec,
    rows: int,
    other: int,
    node: fx.Node,
    depends: bool,
    sections: Callable[[int], tuple[int, ...]],
) -> Batched:
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
            return Batched(dim, sections(inner))
    raise PlanError(
        f"{describe(node)}, or an argument of it, has the shape {tuple(shape)} for {rows} rows and {tuple(compared)} for {other}: no dim of it "
        "is the batch. Ranks have rows of their own under replicate, and a split part on the same devices needs to know which they "
        "are: keep the batch as a dim of its own in what goes into the part and comes out of it"
    )


def fitting(
    calls: Sequence[RecordedPart], number: int, given: Any, left_out: LeftOut | None
) -> tuple[PartCall, Any] | None:
    """Which of a part's recorded calls this is, and its arguments with what it has left out: the `number`-th, or, while a checkpoint
    runs again, one with such arguments."""

    def fit(recorded: RecordedPart) -> tuple[PartCall, Any, tuple[fx.Node, ...]] | None:
        tree, added = (given, ()) if left_out is None else left_out.put_in(recorded.node, recorded.carries, given)
        shapes = [leaf.shape for leaf in skeleton(tree)[0] if isinstance(leaf, torch.Tensor)]
        return (recorded.call, tree, added) if fits(recorded.call, shapes) else None

    if number < len(calls) and (found := fit(calls[number])) is not None:
        return found[:2]
    same = [found for found in map(fit, calls) if found is not None]
    return same[0][:2] if len({(call.inputs, call.outputs, added) for call, _, added in same}) == 1 else None


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
