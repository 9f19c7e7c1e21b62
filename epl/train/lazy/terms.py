"""Expressions over parameters of other ranks (an L2 term over `model.parameters()`): computed where the parameters are.

    home                                    owners
    requests: program + constants      →    run it on the real parameters
    leaves with the values             ←    values
    … the loss, its backward …
    the same requests, with gradients  →    run it again, differentiate: gradients of their own parameters

Nothing is kept at the owners between the two: a parameter that was changed in between makes the model's own backward raise.
"""

from __future__ import annotations

import functools
import pickle
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from epl.errors import LazyValueError
from epl.graph.context import Context
from epl.graph.spec import leaves_of, swap
from epl.parallel.split.value import whole
from epl.train.lazy.foreign import ForeignParameter, refuse
from epl.train.lazy.journal import journal
from epl.train.lazy.lane import LaneParameter
from epl.train.lazy.node import Node, blame, foreign, topological
from epl.train.separate import Given, Ref

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Carrier


class Named(NamedTuple):
    """In the arguments of a request: a parameter, by the number of its carrier in the journal and its name."""

    carrier: int
    name: str


class Step(NamedTuple):
    """One operation of a request."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context


class Request(NamedTuple):
    """What one rank asks another to compute; the program is pickled: a loop asks for the same again and again."""

    owner: int
    program: bytes
    givens: list[torch.Tensor]


class Terms:
    """The values of expressions over other ranks' parameters."""

    def __init__(self, carriers: Sequence[Carrier], wanted: Sequence[Node]) -> None:
        """Every rank makes one; `wanted` are the expressions whose values this rank needs (may be none), `carriers` those whose
        parameters may be given gradients."""
        self._requests: dict[Node, Request] = {}
        self.leaves: dict[Node, torch.Tensor] = {}
        """What owners computed, as leaves."""
        self.values: dict[Node, torch.Tensor] = {}
        """What was wanted, with the graph that leads to the leaves."""
        home = carriers[0]
        trained = {id(p) for c in carriers for p in c.parameters.values()}
        self._ask(wanted, _names(home) if wanted else {}, trained if any(n.requires_grad for n in wanted) else None)
        replies = _ask_owners(home, list(self._requests.values()))
        for node, value in zip(self._requests, replies, strict=True):
            self.leaves[node] = value.detach().requires_grad_(node.requires_grad)
        for node in wanted:
            self.values[node] = self._evaluate(node)

    def fetched(self) -> list[tuple[Request, torch.Tensor]]:
        """What owners were asked, and the leaf that holds the answer."""
        return [(request, self.leaves[node]) for node, request in self._requests.items()]

    def _ask(self, wanted: Sequence[Node], names: Mapping[int, Named], trained: Collection[int] | None) -> None:
        """For the largest parts of the expressions that one owner can compute alone."""
        owners = _owners(wanted)
        for parameter in dict.fromkeys(n.args[0] for n in owners if n.func is foreign):
            if id(parameter) not in (names if trained is None else trained):
                refuse(parameter, "using it in a loss that does not call its model")
        stack = list(reversed(wanted))
        while stack:
            node = stack.pop()
            if node in self._requests or node.done:
                continue
            owner = owners[node]
            request = _request(node, owner, names) if owner is not None else None
            if request is not None:
                self._requests[node] = request
            else:
                stack.extend(reversed(node.parents))

    def _evaluate(self, root: Node) -> torch.Tensor:
        for node in topological([root], lambda n: n.done or n in self.leaves):
            if node in self.values or node in self.leaves or node.done:
                continue
            assert node.func is not None
            node.check_versions()
            with node.context.restored(), blame(node):
                args, kwargs = swap((node.args, node.kwargs), Node, self._value)
                self.values[node] = node.func(*args, **kwargs)
        found: torch.Tensor = self._value(root)
        return found

    def _value(self, node: Node) -> Any:
        if node in self.leaves:
            return self.leaves[node]
        return node.value if node.done else self.values[node]


_told: weakref.WeakKeyDictionary[Node, torch.Tensor] = weakref.WeakKeyDictionary()


def tell(carriers: Sequence[Carrier], wanted: Sequence[Node]) -> None:
    """Let this rank know the values of expressions for good. Every rank does so with its own view of the same ones, or one would wait
    for others that know them already."""
    terms = Terms(carriers, wanted)
    for node in wanted:
        _told[node] = terms.values[node].detach()


def recall(root: Node) -> torch.Tensor | None:
    """The value of an expression, from what this rank was told when it asked before; None if that is not enough."""
    values: dict[Node, Any] = {}
    for node in topological([root], lambda n: n.done or n in _told):
        if node.done or node in _told:
            values[node] = node.value if node.done else _told[node]
            continue
        if node.func is foreign:
            return None
        assert node.func is not None
        node.check_versions()
        with node.context.restored(), torch.no_grad(), blame(node):
            args, kwargs = swap((node.args, node.kwargs), Node, values.__getitem__)
            values[node] = node.func(*args, **kwargs)
    found: torch.Tensor = values[root]
    return found


def is_told(node: Node) -> bool:
    """Whether this rank was told the value of an expression."""
    return node in _told


def differentiate_at_owners(
    carriers: Sequence[Carrier], pairs: Sequence[tuple[Request, torch.Tensor]]
) -> dict[nn.Parameter, torch.Tensor]:
    """The gradients of this rank's own parameters, from those of values that other ranks had asked for."""
    asked, rank = _everyones(carriers[0], [(request, gradient.detach()) for request, gradient in pairs])
    known = journal(carriers[0]).carriers
    own = [pair for theirs in asked for pair in theirs if _is_asked(pair[0], rank, known)]
    return _differentiate(own, known)


def differentiate_at_lanes(carrier: Carrier, terms: Terms) -> dict[nn.Parameter, torch.Tensor]:
    """The gradients of this rank's parameters of a split stage, where all lanes have asked for the same, and know those of the answers."""
    known = journal(carrier).carriers
    own = [
        (request, leaf.grad)
        for request, leaf in terms.fetched()
        if leaf.grad is not None and isinstance(_first_parameter(request, known), LaneParameter)
    ]
    return _differentiate(own, known)


def _differentiate(
    pairs: Sequence[tuple[Request, torch.Tensor]], known: Sequence[weakref.ref[Carrier]]
) -> dict[nn.Parameter, torch.Tensor]:
    found: dict[nn.Parameter, torch.Tensor] = {}
    for request, seed in pairs:
        value, parameters = _run(request, known)
        wanted = [p for p in parameters if p.requires_grad]
        if not value.requires_grad:
            continue
        for parameter, gradient in zip(
            wanted, torch.autograd.grad(value, wanted, seed, allow_unused=True), strict=True
        ):
            if gradient is not None:
                found[parameter] = found[parameter] + gradient if parameter in found else gradient
    return found


def _ask_owners(home: Carrier, requests: list[Request]) -> list[torch.Tensor]:
    """What the owners say to each request, after this rank has answered those to it."""
    asked, rank = _everyones(home, requests)
    if not any(asked):
        return []
    known = journal(home).carriers
    answers = {
        (asker, number, request.owner): _run(request, known)[0].detach()
        for asker, theirs in zip(home.ranks, asked, strict=True)
        for number, request in enumerate(theirs)
        if _is_asked(request, rank, known)
    }
    said: list[Any] = home.exchange({key[:2]: value for key, value in answers.items() if key[2] == rank})
    found = {key: value for some in said for key, value in some.items()}
    return [found[rank, number] for number in range(len(requests))]


def _is_asked(request: Request, rank: int, carriers: Sequence[weakref.ref[Carrier]]) -> bool:
    """Whether this rank computes it: the owner, and with it all lanes of a stage that is split."""
    if request.owner == rank:
        return True
    parameter = _first_parameter(request, carriers)
    return isinstance(parameter, LaneParameter) and request.owner in parameter.epl_lanes


def _first_parameter(request: Request, carriers: Sequence[weakref.ref[Carrier]]) -> nn.Parameter | None:
    named = next(step for step in _program(request.program) if isinstance(step, Named))
    carrier = carriers[named.carrier]()
    return None if carrier is None else carrier.parameters[named.name]


def _names(home: Carrier) -> dict[int, Named]:
    """Every parameter of the models that these ranks compute together, as all of them name it."""
    known = ((n, carrier()) for n, carrier in enumerate(journal(home).carriers))
    return {id(p): Named(n, name) for n, c in known if c is not None for name, p in c.parameters.items()}


def _everyones(carrier: Carrier, value: object) -> tuple[list[Any], int]:
    """What every rank gave, and which rank this is: the one that gave this token."""
    token = uuid.uuid4().hex
    said: list[Any] = carrier.exchange((token, value))
    rank = next(r for r, (other, _) in zip(carrier.ranks, said, strict=True) if other == token)
    return [given for _, given in said], rank


def _request(root: Node, owner: int, names: Mapping[int, Named]) -> Request | None:
    """The expression as something that can be sent; None if it cannot be."""
    steps: list[Step | Named] = []
    index: dict[Node, Ref] = {}
    givens: list[torch.Tensor] = []

    def name(x: Node | torch.Tensor) -> Ref | Given:
        if isinstance(x, Node) and not x.done:
            return index[x]
        givens.append((x.value if isinstance(x, Node) else x).detach())
        return Given(len(givens) - 1)

    for node in topological([root]):
        if node.done:
            continue
        index[node] = Ref(len(steps))
        if node.func is foreign:
            steps.append(names[id(node.args[0])])
        else:
            assert node.func is not None
            node.check_versions()
            args, kwargs = swap((node.args, node.kwargs), (Node, torch.Tensor), name)
            steps.append(Step(node.func, args, kwargs, node.context))
    try:
        return Request(owner, pickle.dumps(steps), givens)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None  # a function of the user's own: what it is given is fetched instead


def _owners(roots: Sequence[Node]) -> dict[Node, int | None]:
    """For everything that these are made from and that is not computed: the one rank that has all its parameters, if no gradient of this
    rank's own tensors flows through it."""
    found: dict[Node, int | None] = {}
    for node in topological(roots):
        if node.done:
            continue
        if node.func is foreign:
            found[node] = node.args[0].epl_owner
            continue
        owners = {found[parent] for parent in node.parents if not parent.done}
        tensors = leaves_of((node.args, node.kwargs), torch.Tensor)
        alone = len(owners) == 1 and not any(t.requires_grad for t in tensors)
        found[node] = owners.pop() if alone else None
    return found


@functools.lru_cache(maxsize=256)
def _program(pickled: bytes) -> list[Step | Named]:
    found: list[Step | Named] = pickle.loads(pickled)
    return found


def _run(request: Request, carriers: Sequence[weakref.ref[Carrier]]) -> tuple[torch.Tensor, list[nn.Parameter]]:
    """The value of a request, on this rank's own parameters, and which they are."""
    values: list[Any] = []
    parameters: list[nn.Parameter] = []

    def value(x: Ref | Given) -> Any:
        return values[x.index] if isinstance(x, Ref) else request.givens[x.index]

    for step in _program(request.program):
        if isinstance(step, Named):
            carrier = carriers[step.carrier]()
            parameter = None if carrier is None else carrier.parameters[step.name]
            if parameter is None or isinstance(parameter, ForeignParameter):
                raise LazyValueError(
                    f"the parameter {step.name!r} was looked for on rank {request.owner} and is not there"
                )
            parameters.append(parameter)
            values.append(parameter.here() if isinstance(parameter, LaneParameter) else parameter)
            continue
        with step.context.restored():
            args, kwargs = swap((step.args, step.kwargs), (Ref, Given), value)
            values.append(step.func(*args, **kwargs))
    return whole(values[-1]), list(dict.fromkeys(parameters))
