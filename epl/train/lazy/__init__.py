"""Lazy values: what `model(x)` gives under a cut model, and how the loop's code on them is carried out.

record      a torch call on lazy values is written down as a Node; nothing runs
read        a number is wanted: it is computed at home, and given to every rank
alone       a penalty over parameters of several ranks, read or differentiated without a model call
step        backward: in a schedule, if the loss separates over the batch (`epl.train.separate`), else on the whole batch
protocol    what all this asks of whoever runs the model: Call and Carrier
"""

from __future__ import annotations

from epl.graph.spec import Spec
from epl.train.lazy import function, handlers
from epl.train.lazy.foreign import ForeignParameter, become_foreign, become_own, node_of
from epl.train.lazy.journal import journal
from epl.train.lazy.node import Node, output_of
from epl.train.lazy.protocol import Call
from epl.train.lazy.read import run_forward
from epl.train.lazy.tensor import LazyTensor
from epl.train.lazy.whole import forget_calls

handlers.install()
function.install()


def outputs_of(call: Call, specs: list[Spec]) -> list[Node]:
    """The nodes of a call's frontier values, in order."""
    forget_calls()
    journal(call.carrier).enter(call.carrier)
    return [Node(output_of, (call, i), {}, call.context, spec._replace(is_view=False)) for i, spec in enumerate(specs)]


__all__ = [
    "ForeignParameter",
    "LazyTensor",
    "Node",
    "become_foreign",
    "become_own",
    "node_of",
    "outputs_of",
    "run_forward",
]
