"""Expressions over parameters without a model call under them: a penalty that is read, or differentiated, by itself.

Every rank sees another part of such an expression as numbers. All of them meet, tell each other the values of their parts, and go on
each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from epl.graph.spec import leaves_of
from epl.train.lazy.foreign import ForeignParameter, foreign_parameters, refuse
from epl.train.lazy.lane import LaneParameter
from epl.train.lazy.meeting import asks, meet
from epl.train.lazy.node import Node, foreign, reached_by_gradient, topological
from epl.train.lazy.outer import leaves_behind, outer_tensors
from epl.train.lazy.terms import Terms, differentiate_at_lanes, recall, tell

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Carrier


def ask(nodes: Sequence[Node], doing: str) -> dict[Node, torch.Tensor | None]:
    """The values of expressions over other ranks' parameters; they stay written down, for a backward that may come."""
    carriers = _carriers_behind(nodes, doing)
    asks(carriers[0], nodes)
    # Ranks see such an expression each in its own way, so all that they can compare is how many are read.
    meet(carriers[0], f"reading a term over parameters ({doing})", [], len(nodes))
    tell(carriers, nodes)
    return {n: recall(n) for n in nodes}


def differentiate_alone(
    root: Node, gradient: torch.Tensor | None, retain: bool, wanted: Sequence[torch.Tensor] | None
) -> list[torch.Tensor | None]:
    """An expression over parameters alone, in which this rank does not have all. Ranks tell each other the values of their parts, and
    each differentiates to its own; if one rank has all of them, it does so by itself."""
    parameters = foreign_parameters(root)
    doing = "differentiating a term over parameters alone (add it to a loss that calls the model)"
    if wanted is not None:
        refuse(parameters[0], doing)
    reached = reached_by_gradient([root])
    outer = leaves_behind(outer_tensors([n for n in topological([root]) if n in reached]))
    known = [p.epl_parts.carrier for p in parameters if hasattr(p, "epl_parts")]
    mine = {id(p) for carrier in known if carrier is not None for p in carrier.parameters.values()}
    if _has_one_owner(parameters) and not any(id(leaf) in mine for leaf in outer):
        if outer or any(isinstance(p, LaneParameter) for p in parameters):
            refuse(parameters[0], doing)
        return []
    carriers = _carriers_behind([root], doing)
    asks(carriers[0], [root])
    meet(carriers[0], "backward from a term over parameters", [], gradient is None, retain)
    terms = Terms(carriers, [root])
    torch.autograd.backward([terms.values[root]], [gradient], retain_graph=retain)
    own = differentiate_at_lanes(carriers[0], terms)
    if own:
        torch.autograd.backward(list(own), list(own.values()))
    return []


def _carriers_behind(nodes: Sequence[Node], doing: str) -> list[Carrier]:
    """Of the models whose parameters are in these expressions, if no model call is under them: their ranks meet to tell each other.

    LazyValueError if a rank is sure not to come: one that has all the parameters computes without asking anybody.
    """
    parameters = [n.args[0] for n in topological(nodes) if not n.done and n.func is foreign]
    found = dict.fromkeys(p.epl_parts.carrier if hasattr(p, "epl_parts") else None for p in parameters)
    carriers = [c for c in found if c is not None]
    if len({c.ranks for c in carriers}) != 1 or None in found:
        refuse(parameters[0], doing)
    for node in nodes:
        inside = [n for n in topological([node]) if not n.done]
        behind = [n.args[0] for n in inside if n.func is foreign]
        # What this rank adds of its own is a real tensor beside other terms; beside a parameter itself it is data (a layer called).
        terms = (n for n in inside if n.func is not foreign and not any(p.func is foreign for p in n.parents))
        if _has_one_owner(behind) and not any(leaves_of((n.args, n.kwargs), torch.Tensor) for n in terms):
            refuse(
                parameters[0],
                f"{doing} of a term over parameters of rank {behind[0].epl_owner} alone, which has them all and waits for nobody "
                "(add it to a loss that calls the model, and read that)",
            )
    return carriers


def _has_one_owner(parameters: Sequence[ForeignParameter | LaneParameter]) -> bool:
    """Whether one rank has all of them, and so computes with them without asking anybody. The lanes of a split stage do not: they have
    written down the same as everybody."""
    return len({p.epl_owner for p in parameters}) == 1 and not any(p.epl_together for p in parameters)
