"""`backward()` from a lazy value: in a schedule if the loss separates over the batch, else on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from epl.errors import LazyValueError, NotBuiltError
from epl.plan.split.layout import ParameterLayout, layout_of
from epl.train.lazy.alone import differentiate_alone
from epl.train.lazy.backward import Pass
from epl.train.lazy.everywhere import CREATE_GRAPH, SECOND_TIME, anchor_of, stands_behind
from epl.train.lazy.foreign import ForeignParameter
from epl.train.lazy.lane import LaneParameter
from epl.train.lazy.lanes import LossAtLanes, bring_home
from epl.train.lazy.live import is_small, live_nodes
from epl.train.lazy.meeting import ASKS, HOLDS_OUTPUTS, WAITS_FOR_LANES, asks, carriers_of, meet_with_flags
from epl.train.lazy.node import Node, output_of, reached_by_gradient, topological
from epl.train.lazy.outer import graph_nodes
from epl.train.lazy.program import Recorded, Structure, depends_on, structure_of, write_down
from epl.train.lazy.read import bring_everywhere, settle_live, uncomputed_at_lanes
from epl.train.lazy.scheduled import LossOverSchedule
from epl.train.lazy.terms import Terms
from epl.train.lazy.whole import (
    compute,
    give_inputs,
    later_with_gradients,
    needs_everyone,
    remember_terms,
)
from epl.train.separate.state import CONST, Rows

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Call, Carrier


class Choice(NamedTuple):
    """How a loss is run; alike on every rank."""

    first: list[Node]
    """Computed on the whole batch before the rest: what is fed into a model, and outputs that need no gradient of this loss."""
    forward_only: list[Call]
    """Those of their calls that no later backward can want gradients of either."""
    scheduled: tuple[Recorded, Structure] | None
    why: str
    """Why not in a schedule."""

    @property
    def checksum(self) -> int:
        """Of the code that is scheduled."""
        return self.scheduled[1].checksum if self.scheduled is not None else 0


def differentiate(
    root: Node,
    gradient: torch.Tensor | None,
    *,
    retain: bool = False,
    create: bool = False,
    wanted: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor | None]:
    """Carry out a backward from `root`. `wanted`: return these gradients (autograd.grad) instead of adding into `.grad`."""
    if not root.requires_grad:
        raise LazyValueError("element 0 of tensors does not require grad and does not have a grad_fn")
    if gradient is None and root.spec.shape.numel() != 1:
        raise LazyValueError("grad can be implicitly created only for scalar outputs")
    if root.graph == "everywhere" or (root.done and not root.spent and root.graph is None):
        return _by_autograd(root, gradient, retain, create, wanted)
    if root.carrier is None:
        return differentiate_alone(root, gradient, retain, wanted)
    if any(node.spent for node in reached_by_gradient([root])):
        raise LazyValueError(SECOND_TIME)
    if create:
        raise NotBuiltError(CREATE_GRAPH)
    if needs_everyone([root]):
        bring_everywhere([root], "a hook on a value, or models on different ranks,")
        return _by_autograd(root, gradient, retain, create, wanted)
    return _explicitly(root, gradient, retain, wanted)


def _explicitly(
    root: Node, gradient: torch.Tensor | None, retain: bool, wanted: Sequence[torch.Tensor] | None
) -> list[torch.Tensor | None]:
    """The pass over all ranks, step by step: see `backward`."""
    choice = choose(root, retain)
    carriers = carriers_of(topological([root], lambda n: n.done and n.graph is None))
    home = carriers[0]
    p = Pass(carriers, wanted=None if wanted is None else _outside(wanted, carriers), retain=retain)
    p.look_behind([root])
    kind = "loss.backward()" if wanted is None else "autograd.grad()"
    words = (
        choice.checksum,
        choice.scheduled is None,
        [n.number for n in choice.first],
        len(choice.forward_only),
        p.shapes(),
    )
    known = _known_at_lanes(choice)
    at_work = choice.scheduled[0].calls[0].carrier if choice.scheduled is not None else home
    flags = ASKS * (asks(home, [root]) or p.sees_terms([root])) | _held_at_lanes(at_work, choice, known)
    found = meet_with_flags(home, kind, [root], *words, flags=flags)
    p.asked = bool(found & ASKS)
    if choice.first:
        why = "a model's output goes into a model, or is used detached first"
        compute(choice.first, why, asked=p.asked, forward_only=choice.forward_only)
    if choice.scheduled is not None:
        lanes = LossAtLanes(at_work.at_end, known, bool(found & HOLDS_OUTPUTS)) if known else None
        _in_schedule(p, gradient, *choice.scheduled, lanes)
    else:
        if not root.done or p.asked:  # home may have to ask, even if this rank has nothing left to compute
            compute([root], choice.why, asked=p.asked)
        p.sees_terms([root])
        p.begin()
        seed = torch.ones_like(root.value) if gradient is None and root.value is not None else gradient
        p.walk([(root, seed)])
    targets, own = p.finish()
    settle_live(at_work, carriers if p.asked else (), at_lanes=bool(found & WAITS_FOR_LANES))
    return [] if wanted is None else _collect(wanted, carriers, targets, own)


def _in_schedule(
    p: Pass, gradient: torch.Tensor | None, recorded: Recorded, structure: Structure, lanes: LossAtLanes | None
) -> None:
    """The schedule runs with the loss at home, or at the lanes; what it was made from beside the calls is differentiated afterwards."""
    here = p.home.is_home if lanes is None else lanes.here
    if lanes is None:
        bring_home(given for given in recorded.givens if isinstance(given, Node))
    for node in recorded.nodes:
        node.check_versions()
    for call in recorded.calls:
        give_inputs(call, keep=True)
        call.check()
    terms = None
    if p.asked:
        constants = [g for g in recorded.givens if isinstance(g, Node) and g.carrier is None and not g.done]
        terms = Terms(p.carriers, constants if here else [])
        remember_terms(constants, terms)
    loss = LossOverSchedule(recorded, structure, gradient, live_nodes(), terms, p.home.is_home, lanes)
    p.sees_terms([loss.root])
    p.begin()
    loss.calls[0].carrier.train(loss)
    if p.home.is_home:
        p.pull(
            [
                (value, leaf.grad)
                for given, value, leaf in loss.outer
                if leaf.grad is not None and not _is_computed(given)
            ]
        )
    reached = reached_by_gradient([loss.root])
    leaves = {id(given): leaf for given, _, leaf in loss.outer}
    roots: list[tuple[Node, torch.Tensor | None]] = []
    for given in recorded.givens:
        if isinstance(given, Node) and given.graph == "home" and given in reached:
            leaf = leaves.get(id(given))
            roots.append((given, None if leaf is None else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad))
    for call in loss.calls:
        roots += p.go_on(call)
    loss.settle()
    if roots:
        p.walk(roots)


def _is_computed(given: object) -> bool:
    return isinstance(given, Node) and given.done


# ---- the choice ------------------------------------------------------------------------------------------------------


def choose(root: Node, retain: bool) -> Choice:
    """How a loss is run, from recorded code, shapes and row counts: never from values."""
    if root.done:
        return Choice([], [], None, "")
    order = [n for n in topological([root]) if not n.done]
    reached = reached_by_gradient([root])
    calls = depends_on(order)
    unreached = any(not any(n in reached for n in call.nodes) for call in calls)
    later = later_with_gradients(live_nodes(), root) if unreached else set()
    inputs = [x for call in calls for x in call.inputs if isinstance(x, Node) and not x.done]
    early = depends_on([n for n in topological(inputs) if not n.done])
    first = list(inputs)
    forward_only = []
    for call in calls:
        if any(n in reached for n in call.nodes):
            continue
        if call not in early:
            early.append(call)
            first += [n for n in call.nodes if n in order]
        if not any(n in later for n in call.nodes):  # else its graph must outlive this backward
            forward_only.append(call)
    active = [call for call in calls if call not in early]
    why = _obstacle(active, retain)
    if why:
        return Choice(first, forward_only, None, why)
    given = {n for call in early for n in call.nodes}.union(inputs)
    recorded = write_down(root, lambda n: n in given)
    structure = structure_of(recorded)
    why = structure.verdict.why
    if not why and structure.verdict.pieces[-1].state is CONST:
        why = "the loss does not depend on the batch"
    if why:
        return Choice(first, forward_only, None, f"{why} ({root.place})")
    return Choice(first, forward_only, (recorded, structure), "")


def _known_at_lanes(choice: Choice) -> list[Node]:
    """If the lanes of a split last stage can compute the loss together, which values of it home has whole afterwards; else none.

    They can unless something in it is at home alone.
    """
    if choice.scheduled is None:
        return []
    recorded, structure = choice.scheduled
    carrier = recorded.calls[0].carrier
    alone = (
        g for g in recorded.givens if isinstance(g, Node) and not g.everywhere and (g.done or g.carrier is not None)
    )
    if not carrier.ends_split or any(not (g.at_lanes and g.carrier is carrier) for g in alone):
        return []
    totals = zip(recorded.nodes, structure.verdict.pieces, strict=True)
    root = recorded.nodes[-1]
    return [
        node
        for node, piece in totals
        if node is root or (not isinstance(piece.state, Rows) and is_small(node) and node.func is not output_of)
    ]


def _held_at_lanes(carrier: Carrier, choice: Choice, known: Sequence[Node]) -> int:
    """What this rank's loop holds of values that the lanes have, or will have: flags for the others to know."""
    calls = choice.scheduled[0].calls if choice.scheduled is not None and known else []
    outputs = {node for call in calls for node in call.nodes}
    if uncomputed_at_lanes(carrier, outputs, known):
        return HOLDS_OUTPUTS | WAITS_FOR_LANES
    return HOLDS_OUTPUTS * (not outputs.isdisjoint(live_nodes()))


def _obstacle(calls: Sequence[Call], retain: bool) -> str:
    """What keeps these calls from a common schedule, whatever the loss."""
    if retain:
        return "backward was called with retain_graph"
    if not calls:
        return "every output it needs is computed already"
    if len({id(call.carrier) for call in calls}) > 1:
        return "the loss is made from several models"
    if len({len(call.sizes) for call in calls}) > 1:
        return "model calls in one loss are cut into different numbers of micro batches"
    return calls[0].carrier.refuses(calls)


# ---- gradients that are only asked for -------------------------------------------------------------------------------


def _outside(wanted: Sequence[torch.Tensor], carriers: Sequence[Carrier]) -> list[torch.Tensor]:
    """Those that are not parameters of a model."""
    cut = {id(p) for carrier in carriers for p in carrier.parameters.values()}
    return [t for t in wanted if id(t) not in cut]


def _collect(
    wanted: Sequence[torch.Tensor],
    carriers: Sequence[Carrier],
    targets: Sequence[torch.Tensor | None],
    own: Mapping[nn.Parameter, torch.Tensor],
) -> list[torch.Tensor | None]:
    """The wanted gradients, on every rank."""
    outside = _outside(wanted, carriers)
    made = {id(t): g for t, g in zip(outside, targets, strict=True)}
    made |= {id(p): g for p, g in own.items()}
    found = [made.get(id(t)) for t in wanted]
    # Hooks of a leaf run for autograd.grad too.
    found = [
        torch.autograd.grad(t, t, g)[0] if g is not None and t.requires_grad else g
        for t, g in zip(wanted, found, strict=True)
    ]
    if len(outside) == len(wanted):
        return found
    mine = {
        i: g
        for i, (t, g) in enumerate(zip(wanted, found, strict=True))
        if g is not None and isinstance(t, nn.Parameter)
    }
    return _filled(found, wanted, carriers[0], mine)


class _Block(NamedTuple):
    """What a rank has of a gradient."""

    gradient: torch.Tensor
    layout: ParameterLayout | None
    lane: int
    """Which of the ranks that share a split parameter it is."""


def _filled(
    found: Sequence[torch.Tensor | None],
    wanted: Sequence[torch.Tensor],
    carrier: Carrier,
    mine: Mapping[int, torch.Tensor],
) -> list[torch.Tensor | None]:
    """With what the owners of other ranks' parameters have, put together from the blocks of those that are split."""
    blocks = {i: _Block(g, layout_of(wanted[i]), _lane_of(wanted[i])) for i, g in mine.items()}
    result = list(found)
    arrived: dict[int, dict[int, _Block]] = {}
    for theirs in carrier.exchange(blocks):
        assert isinstance(theirs, dict)
        for i, block in theirs.items():
            arrived.setdefault(i, {}).setdefault(block.lane, block)
    for i, by_lane in arrived.items():
        if result[i] is None:
            parts = [block for _, block in sorted(by_lane.items())]
            layout = parts[0].layout
            joined = [part.gradient for part in parts]
            result[i] = joined[0] if layout is None else layout.cut.join(joined, layout.dim)
    return result


def _lane_of(parameter: torch.Tensor) -> int:
    return parameter.epl_ranks.rank if isinstance(parameter, LaneParameter) else 0


# ---- real tensors on every rank --------------------------------------------------------------------------------------


def _by_autograd(
    root: Node,
    gradient: torch.Tensor | None,
    retain: bool,
    create: bool,
    wanted: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor | None]:
    """Every rank has the value with its graph: autograd does it, and stand-ins of model calls meet inside."""
    value: torch.Tensor = root.value
    found: list[torch.Tensor | None] = []
    with torch.inference_mode(False):
        if wanted is None:
            torch.autograd.backward([value], [gradient], retain_graph=retain, create_graph=create)
        else:
            calls = [node.call for node in graph_nodes([value]) if stands_behind(node)]
            carriers = list(dict.fromkeys(call.carrier for call in calls))
            cut = len(_outside(wanted, carriers)) < len(wanted)
            here = [t for t in wanted if not isinstance(t, ForeignParameter)]
            anchors = [a for call in calls if (a := anchor_of(call)) is not None] if cut else []
            made = torch.autograd.grad(
                value, [*here, *anchors], gradient, retain_graph=retain, create_graph=create, allow_unused=True
            )
            by_id = dict(zip(map(id, here), made, strict=False))
            found = [by_id.get(id(t)) for t in wanted]
            if cut:
                outside = {id(t) for t in _outside(wanted, carriers)}
                mine = {
                    i: g
                    for i, (t, g) in enumerate(zip(wanted, found, strict=True))
                    if g is not None and id(t) not in outside
                }
                found = _filled(found, wanted, carriers[0], mine)
    if root.carrier is not None:
        settle_live(root.carrier)
    return found
