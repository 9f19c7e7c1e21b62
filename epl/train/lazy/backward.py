"""One backward pass of the loop over lazy values, as an explicit sequence that is the same on every rank.

        root ──home's autograd──▶ outputs of call 2 ──backward_all──▶ inputs of call 2 ──home's autograd──▶ outputs of call 1 ──▶ …
                     │                                                       │
                     ▼                                                       ▼
          outer tensors in the loop's code                         outer tensors given to a model
          (gradients made at home, then shared)                    (every rank has them, from the carrier)

Nothing here is driven by the order in which an autograd engine happens to visit its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from epl.train.lazy.foreign import ForeignParameter, refuse
from epl.train.lazy.meeting import carriers_of
from epl.train.lazy.node import Node, output_of, reached_by_gradient, topological
from epl.train.lazy.outer import leaves_behind, outer_tensors, pack, packed_specs, unpack, without_hooks
from epl.train.lazy.program import depends_on
from epl.train.lazy.terms import Terms, differentiate_at_owners
from epl.train.lazy.whole import sources, terms_of

if TYPE_CHECKING:
    from epl.train.lazy.protocol import Call, Carrier


class Pass:
    """Where the gradients of one pass arrive."""

    def __init__(self, carriers: Sequence[Carrier], *, wanted: Sequence[torch.Tensor] | None, retain: bool) -> None:
        """`carriers`: of all models in the loss. `wanted`: real tensors outside them whose gradients are only asked for
        (autograd.grad); None: into `.grad`."""
        self.carriers, self.retain = carriers, retain
        self.asked = False
        """Whether home needs other ranks' parameters."""
        self._reached: list[Carrier] = []
        self.home = carriers[0]
        self.aside = wanted is not None
        self.targets: list[torch.Tensor] = list(wanted or ())
        """Outer tensors whose gradients are made at home and shared with every rank."""
        self._own: dict[int, nn.Parameter] = {}
        self._terms: list[Terms] = []
        self._sinks: dict[int, torch.Tensor] = {}
        self._found: dict[int, torch.Tensor] = {}
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """Before the first call is differentiated."""
        for carrier in self._at_work():
            carrier.begin_backward(self.aside, terms=self.asked)

    def _at_work(self) -> Sequence[Carrier]:
        """Those whose parameters get gradients, as all ranks see it: a teacher's do not, unless it may be in a term."""
        return self.carriers if self.asked else self._reached

    def look_behind(self, nodes: Sequence[Node]) -> None:
        """Note the outer tensors that the loop's code under these nodes uses, in an order that all ranks share."""
        reached = reached_by_gradient(nodes)
        order = [n for n in topological(nodes, lambda n: n not in reached) if n in reached]
        self._reached = carriers_of(n for n in order if n.func is output_of)
        leaves = leaves_behind(outer_tensors(order))
        cut = {id(p) for c in self.carriers for p in c.parameters.values()} if leaves else set()
        for leaf in leaves:
            if isinstance(leaf, ForeignParameter):
                doing = "differentiating an expression that was computed before the first call of the model gave its stages to ranks"
                refuse(leaf, f"{doing} (write it after that call)")
            if id(leaf) in cut:
                assert isinstance(leaf, nn.Parameter)
                self._own[id(leaf)] = leaf
            elif not self.aside and not any(leaf is t for t in self.targets):
                self.targets.append(leaf)
        self._sinks.update({id(t): t for t in [*self.targets, *self._own.values()]})

    def sees_terms(self, nodes: Sequence[Node]) -> bool:
        """Note the values of other ranks' parameters under these nodes; whether there are any, on this rank."""
        found = (t for n in reached_by_gradient(nodes) if (t := terms_of(n)) is not None)
        self._terms = [terms for terms in dict.fromkeys(found) if terms.leaves]
        self._sinks.update({id(leaf): leaf for terms in self._terms for leaf in terms.leaves.values()})
        return bool(self._terms)

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the targets: ranks that found other ones must not exchange gradients."""
        return [tuple(t.shape) for t in self.targets]

    def pull(self, roots: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """At home: autograd, from these values with their gradients down to everything that gradients are collected at."""
        roots = [(value, seed) for value, seed in roots if value.requires_grad]
        sinks = [t for t in self._sinks.values() if t.requires_grad]
        if not roots or not sinks:
            return
        values, seeds = zip(*roots, strict=True)
        with torch.inference_mode(False), without_hooks(sinks):
            # The graph is freed with its values: parts of it may be passed again, from the inputs of an earlier call.
            found = torch.autograd.grad(values, sinks, seeds, retain_graph=True, allow_unused=True)
        for sink, gradient in zip(sinks, found, strict=True):
            if gradient is not None:
                self._add(sink, gradient)

    def _add(self, sink: torch.Tensor, gradient: torch.Tensor) -> None:
        before = self._found.get(id(sink))
        self._found[id(sink)] = gradient if before is None else before + gradient

    def walk(self, roots: Sequence[tuple[Node, torch.Tensor | None]]) -> None:
        """From computed nodes with their gradients (given at home) through all calls they are made from, latest first."""
        reached = reached_by_gradient(node for node, _ in roots)
        calls = depends_on(reached)
        if self.home.is_home:
            self._sinks.update({id(n.leaf): n.leaf for n in reached if n.leaf is not None})
            self.pull([(node.value, seed) for node, seed in roots])
        for call in reversed(calls):
            flags = tuple(node in reached for node in call.nodes)
            gradients = [self._taken(n) if flag else None for n, flag in zip(call.nodes, flags, strict=True)]
            call.carrier.backward_all(call, gradients if self.home.is_home else None, flags, self.retain)
            lazy = self.go_on(call)
            if self.home.is_home:
                self.pull([(node.value, gradient) for node, gradient in lazy])
        if not self.retain:
            for call in calls:
                call.state = "done"
            for node in reached:
                if node.done:  # not a term over other ranks' parameters: the loop may still read it, or use it again
                    node.spend()

    def _taken(self, node: Node) -> torch.Tensor | None:
        if node.leaf is None:
            return None
        gradient = self._found.pop(id(node.leaf), None)
        return torch.zeros_like(node.leaf) if gradient is None else gradient

    def go_on(self, call: Call) -> list[tuple[Node, torch.Tensor | None]]:
        """The gradients of a call's inputs have come: those of lazy ones, to be followed further."""
        lazy = sources(call)
        found: list[tuple[Node, torch.Tensor | None]] = []
        for i, gradient in enumerate(call.input_gradients):
            if gradient is None:
                continue
            if i in lazy:
                found.append((lazy[i], gradient))
            else:
                tensor = call.inputs[i]
                assert isinstance(tensor, torch.Tensor)
                self._inputs.append((tensor, gradient))
        return found

    def finish(self) -> tuple[list[torch.Tensor | None], dict[nn.Parameter, torch.Tensor]]:
        """Hand everything over. What is only asked for is returned: gradients of `wanted`, and of this rank's parameters."""
        if self.aside and self.home.is_home:
            self.pull(self._inputs)
        extra = {p: self._found[i] for i, p in self._own.items() if i in self._found}
        if self.asked:
            self._send_terms_back(extra)
        targets = self._share_targets()
        own: dict[nn.Parameter, torch.Tensor] = {}
        for carrier in self._at_work():
            mine = {id(p) for p in carrier.parameters.values()} if extra else set()
            own |= carrier.end_backward({p: extra.pop(p) for p in list(extra) if id(p) in mine})
        if self.aside:
            own |= extra
        else:
            pairs = [(t, g) for t, g in zip(self.targets, targets, strict=True) if g is not None]
            pairs += [*self._inputs, *extra.items()]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs], retain_graph=self.retain)
        return targets, own

    def _send_terms_back(self, extra: dict[nn.Parameter, torch.Tensor]) -> None:
        pairs = [
            (request, self._found[id(leaf)])
            for terms in self._terms
            for request, leaf in terms.fetched()
            if id(leaf) in self._found
        ]
        found = differentiate_at_owners(self.carriers, pairs if self.home.is_home else [])
        for parameter, gradient in found.items():
            extra[parameter] = extra[parameter] + gradient if parameter in extra else gradient

    def _share_targets(self) -> list[torch.Tensor | None]:
        if not self.targets:
            return []
        packed = None
        if self.home.is_home:
            packed = pack([self._found.get(id(t)) for t in self.targets], self.targets)
        return unpack(self.home.share(packed, packed_specs(self.targets)))
