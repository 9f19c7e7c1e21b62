"""A backward pass in two halves: the gradients of the inputs now, those of the weights later.

No help from the modules is needed: the autograd graph says which nodes lie between the outputs and the inputs, and which
branches lead off to weights only.

    output ── N2 ── N1 ── input          first half: the straight line, noting the gradient that arrives at N1 and N2
               │     │
               w2    w1                  second half: for each N the step to its own branch, then the branches, once

Running backward a second time instead would compute the straight line twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Junction:
    """A node on the way to the inputs from which a branch leads to weights."""

    node: Node
    branches: list[tuple[Node, int]]
    arrived: tuple[torch.Tensor | None, ...] = ()


@dataclass
class Halves:
    """What the second half needs."""

    junctions: list[_Junction] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    """Where no input needs a gradient there is no first half: everything is done in the second."""
    gradients: list[torch.Tensor] = field(default_factory=list)

    def backward_of_weights(self) -> None:
        """Add the gradients of the weights into `.grad`."""
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients)
        ends: list[GradientEdge] = []
        values: list[torch.Tensor] = []
        for junction in self.junctions:
            starts = [(GradientEdge(junction.node, n), g) for n, g in enumerate(junction.arrived) if g is not None]
            if not starts:
                continue
            found = torch.autograd.grad(
                [edge for edge, _ in starts],
                [GradientEdge(node, number) for node, number in junction.branches],
                [gradient for _, gradient in starts],
                retain_graph=True,
                allow_unused=True,
            )
            for (node, number), gradient in zip(junction.branches, found, strict=True):
                if gradient is not None:
                    ends.append(GradientEdge(node, number))
                    values.append(gradient)
        if ends:
            torch.autograd.backward(ends, values)
        self.junctions, self.roots, self.gradients = [], [], []


def backward_of_inputs(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Halves:
    """Put the gradients of `inputs` into their `.grad`; what is left to do for the weights."""
    if not roots:
        return Halves()
    if not inputs:
        return Halves(roots=list(roots), gradients=list(gradients))
    junctions, direct = _find_junctions(roots, inputs)
    handles = [j.node.register_prehook(_keeper(j)) for j in junctions]
    try:
        found = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for tensor, gradient in zip(inputs, found, strict=True):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
    # Roots from which no input can be reached (a penalty on the weights) wait for the second half as a whole.
    left = [(r, g) for n, (r, g) in enumerate(zip(roots, gradients, strict=True)) if n in direct]
    return Halves(junctions, [r for r, _ in left], [g for _, g in left])


def _keeper(junction: _Junction):  # type: ignore[no-untyped-def]  # the signature of a hook
    def keep(arrived: tuple[torch.Tensor | None, ...]) -> None:
        junction.arrived = arrived

    return keep


def _find_junctions(roots: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]) -> tuple[list[_Junction], set[int]]:
    """The nodes with branches to weights, and the roots (by position) that do not lead to any input."""
    goals = {get_gradient_edge(t).node for t in inputs}
    leads: dict[Node, bool] = {}  # whether an input can be reached from a node
    starts = [root.node for root in roots]
    for start in starts:
        _mark(start, goals, leads)
    junctions = []
    for node, leads_to_input in leads.items():
        if leads_to_input and node not in goals:
            branches = [(n, number) for n, number in node.next_functions if n is not None and not leads[n]]
            if branches:
                junctions.append(_Junction(node, list(dict.fromkeys(branches))))
    return junctions, {n for n, start in enumerate(starts) if not leads[start]}


def _mark(start: Node, goals: set[Node], leads: dict[Node, bool]) -> None:
    """Depth first without recursion: graphs are deeper than Python's stack."""
    stack = [(start, False)]
    while stack:
        node, seen = stack.pop()
        if seen:
            children = [n for n, _ in node.next_functions if n is not None]
            leads[node] = node in goals or any(leads[c] for c in children)
        elif node not in leads:
            leads[node] = node in goals  # also while its children are open: the graph has no cycles
            stack.append((node, True))
            stack += [(n, False) for n, _ in node.next_functions if n is not None and n not in leads]
