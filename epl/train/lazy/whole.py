"""Computing recorded operations on the whole batch: all forwards run, their outputs are joined, the loop's code runs on them.

At home only, as a rule; at all lanes of a split last stage, where operands are there (see `lanes`); in *everywhere* mode on every rank,
with gradients (see `everywhere`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from epl import _torch
from epl.errors import LazyValueError
from epl.graph.spec import swap
from epl.report import log
from epl.train.lazy.everywhere import anchor_of, needs_engine, stand_in
from epl.train.lazy.foreign import ForeignParameter, refuse, refuse_foreign
from epl.train.lazy.lanes import bring_home, is_for_lanes
from epl.train.lazy.live import live_nodes
from epl.train.lazy.meeting import carriers_of
from epl.train.lazy.node import Graph, Node, blame, output_of, reached_by_gradient, topological
from epl.train.lazy.outer import graph_nodes, outer_tensors
from epl.train.lazy.program import depends_on
from epl.train.lazy.protocol import Forgetful
from epl.train.lazy.terms import Terms, recall

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Call

_sources: weakref.WeakKeyDictionary[Any, dict[int, Node]] = weakref.WeakKeyDictionary()
_terms: weakref.WeakKeyDictionary[Node, Terms] = weakref.WeakKeyDictionary()


class _Kept(threading.local):
    """Calls with graphs; one set for each thread: in tests, ranks are threads of one process."""

    def __init__(self) -> None:
        self.calls: weakref.WeakSet[Any] = weakref.WeakSet()


_kept = _Kept()


def sources(call: Call) -> dict[int, Node]:
    """The lazy values that inputs of a call were, by place, if gradients go back into them at home."""
    return _sources.get(call, {})


def terms_of(node: Node) -> Terms | None:
    """Where the value of an expression over other ranks' parameters came from."""
    return _terms.get(node)


def remember_terms(nodes: Sequence[Node], terms: Terms) -> None:
    """For `terms_of`."""
    for node in nodes:
        _terms[node] = terms


def needs_everyone(nodes: Sequence[Node]) -> bool:
    """Whether every rank must compute these itself, with gradients: hooks on values, random numbers, models with different homes,
    real tensors that were computed from a model's values on every rank."""
    order = topological(nodes, _is_plain)
    if any(n.hooks or n.several_homes or n.has_effects or n.graph == "everywhere" for n in order):
        return True
    return any(needs_engine(g) for g in graph_nodes(outer_tensors(order)))


def _is_plain(node: Node) -> bool:
    return node.done and node.graph != "home"


def compute(
    nodes: Sequence[Node], why: str, *, asked: bool, everyone: bool = False, forward_only: Collection[Call] = ()
) -> None:
    """Compute what is not computed yet. All ranks have agreed on it.

    `asked`: home needs parameters of other ranks. `forward_only`: calls whose graphs nobody will want.
    """
    everyone = everyone or needs_everyone(nodes)
    order = [n for n in topological(nodes, _is_plain if everyone else lambda n: n.done) if not _is_plain(n)]
    if not everyone:
        order = [n for n in order if not n.done]
    recorded = [n for n in order if n.carrier is not None]
    constants = _constants(recorded)
    terms = None
    if asked:
        carriers = carriers_of([*order, *nodes])  # there may be nothing left to compute here, and others ask this rank
        here = everyone or carriers[0].is_home
        terms = Terms(carriers, constants if here else [])
        remember_terms(constants, terms)
    if everyone:
        share_values([p for n in recorded for p in n.parents if _is_plain(p) and not p.everywhere])
    with torch.inference_mode(False):  # the loop may read a value in any mode, and go on to train with others
        for node in recorded:
            if node.func is output_of:
                if not node.done or (everyone and node.graph == "home"):  # else it came with another output of its call
                    call = node.args[0]
                    _run_call(call, everyone, why, keep=call not in forward_only)
            else:
                _evaluate(node, everyone, terms)


def _constants(recorded: Sequence[Node]) -> list[Node]:
    """The expressions without a model call that these are made from."""
    found = (p for n in recorded for p in n.parents if p.carrier is None and not p.done)
    return list(dict.fromkeys(found))


def _evaluate(node: Node, everyone: bool, terms: Terms | None) -> None:
    assert node.carrier is not None
    at_lanes = not everyone and is_for_lanes(node)
    if not at_lanes:
        bring_home(node.parents)
    value = None
    if everyone or (node.carrier.at_end if at_lanes else node.carrier.is_home):
        if node.changed:
            raise LazyValueError(
                f"{node.name} ({node.place}) was changed in place through a view, and its gradient is now wanted on every rank. Change a "
                "clone instead."
            )
        node.check_versions()

        def look_up(parent: Node) -> Any:
            if parent.carrier is None and not parent.done:
                known = None
                if terms is not None:
                    known = terms.values.get(parent)
                elif not node.requires_grad:  # what was told has no graph
                    known = recall(parent)
                if known is None:
                    refuse_foreign(parent, node.name)
                return known
            return parent.value

        assert node.func is not None
        with node.context.restored(), blame(node):
            args, kwargs = swap((node.args, node.kwargs), Node, look_up)
            value = node.func(*args, **kwargs)
    finish_node(node, value, everyone)
    node.at_lanes = at_lanes


def finish_node(node: Node, value: Any, everyone: bool) -> None:
    """The node has its value, at home or everywhere; its flags follow from its parents' alone, alike on all ranks."""
    spent = node.requires_grad and any(p.spent for p in node.parents)
    graph: Graph | None = None
    if node.requires_grad and not spent:
        graph = "everywhere" if everyone else "home"
    if spent and isinstance(value, torch.Tensor):
        value = value.detach()
    for hook in node.hooks if everyone else []:
        if value.requires_grad:
            hook(value)
    if everyone:
        node.hooks.clear()
    node.settle(value, graph, everywhere=everyone)
    node.spent = spent


def _run_call(call: Call, everyone: bool, why: str, keep: bool) -> None:
    carrier, at_lanes = call.carrier, False
    values: list[torch.Tensor] | None
    if call.state == "new":
        keep = keep and call.context.grad and any(n.requires_grad for n in call.nodes)
        give_inputs(call, keep)
        if keep:
            tell(call, why)
        at_lanes = carrier.ends_split and not (keep or everyone)
        values = run_bodies(call, keep, at_lanes)
    elif call.state == "forward":  # it has run at home alone, and is wanted everywhere now
        if any(n.changed for n in call.nodes):
            raise LazyValueError(
                "an output of the model was changed in place, and its gradient is now wanted on every rank"
            )
        values = [n.value if n.leaf is None else n.leaf.detach() for n in call.nodes] if carrier.is_home else None
    else:
        raise LazyValueError("an output of the model is used again after its graph was freed by backward")
    if everyone:
        values = carrier.share(values, [n.spec for n in call.nodes])
        if call.state == "forward":
            values = stand_in(call, values)
        for node, value in zip(call.nodes, values, strict=True):
            finish_node(node, value, everyone)
    else:
        settle_outputs(call, values, at_lanes)


def run_bodies(call: Call, keep: bool, at_lanes: bool = False) -> list[torch.Tensor] | None:
    """All forwards of a call whose inputs are real."""
    call.check()
    values = call.carrier.forward_all(call, keep, at_lanes)
    call.state = "forward" if keep else "done"
    if keep:
        _kept.calls.add(call)
    return values


def forget_calls() -> None:
    """Drop the graphs of calls that no value of the loop leads to any more: it has read outputs and wants no backward."""
    if not _kept.calls:
        return
    reachable = set(depends_on(topological(live_nodes(), lambda n: n.done and n.graph is None)))
    for call in list(_kept.calls):
        if call.state == "forward" and (call in reachable or anchor_of(call) is not None):
            continue
        _kept.calls.discard(call)
        if call.state == "forward":
            call.state = "done"
            for node in call.nodes:
                node.spend()
            if isinstance(call.carrier, Forgetful):
                call.carrier.forget(call)


def settle_outputs(call: Call, values: list[torch.Tensor] | None, at_lanes: bool = False) -> None:
    """A call has run: its outputs are at home, or at the lanes; with graphs kept, as leaves in which gradients of the loop's code arrive."""
    for i, node in enumerate(call.nodes):
        value = None if values is None else values[i]
        graph: Graph | None = "home" if call.state == "forward" and node.requires_grad else None
        if value is not None and graph is not None:
            with torch.enable_grad():  # the loop may read a value without it
                node.leaf = value.detach().requires_grad_()
                value = _torch.same_memory(node.leaf)
        node.settle(value, graph)
        node.at_lanes = at_lanes
        node.spent = node.requires_grad and graph is None


def give_inputs(call: Call, keep: bool) -> None:
    """Lazy inputs become real ones, the same on every rank."""
    for i, x in enumerate(call.inputs):
        if isinstance(x, ForeignParameter):
            refuse(x, "giving it to a model")
        if not isinstance(x, Node):
            continue
        if x.carrier is None and not x.done:
            refuse_foreign(x, "giving it to a model")
        assert x.done
        if x.graph == "everywhere":
            call.inputs[i] = x.value
            continue
        if not x.everywhere:
            assert x.carrier is not None
            share_values([x])
        wanted = keep and x.graph == "home"
        call.inputs[i] = x.value.detach().requires_grad_(wanted)
        if wanted:
            _sources.setdefault(call, {})[i] = x


def share_values(nodes: Sequence[Node]) -> None:
    """Every rank gets the values of computed nodes that only home has."""
    nodes = list(dict.fromkeys(nodes))
    for carrier in carriers_of(nodes):
        some = [n for n in nodes if n.carrier is carrier]
        bring_home(some)
        values = [n.value for n in some] if carrier.is_home else None
        for node, value in zip(some, carrier.share(values, [n.spec for n in some]), strict=True):
            if not carrier.is_home:
                node.value = value
            node.everywhere = True


def later_with_gradients(live: Sequence[Node], root: Node) -> set[Node]:
    """What a later backward of the loop can still want gradients of."""
    return reached_by_gradient(n for n in live if n is not root and not n.done)


def tell(call: Call, why: str) -> None:
    """One notice of what a whole batch costs."""
    if len(call.sizes) > 1:
        log.notice(
            f"the model runs on the whole batch: {why}. All {len(call.sizes)} micro batches' forwards run before the first backward, and "
            "the activations of all of them are kept at once; in a schedule they would be freed micro batch by micro batch."
        )
