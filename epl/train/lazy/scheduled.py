"""The loss while a schedule runs: each micro batch's share of it, at home, and what is kept of the values.

Where the last stage is split, its lanes compute it together, each on its part of the outputs (`lanes.py`): logits are never gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from epl.graph.context import Context
from epl.graph.spec import swap
from epl.parallel.split.value import SplitTensor, whole
from epl.train.lazy.lanes import LossAtLanes, bring_home
from epl.train.lazy.live import is_small
from epl.train.lazy.node import Node, output_of, reached_by_gradient
from epl.train.lazy.program import Recorded, Structure
from epl.train.lazy.terms import Terms
from epl.train.separate.program import VALUES, Given, Output, Ref
from epl.train.separate.state import CONST, Cut, Once, Over, Per, Rows, State, state_of

_MARKS = (Cut, Once, Per, *VALUES, torch.Tensor)


class LossOverSchedule:
    """One backward of a loss that separates; see `epl.train.lazy.protocol.ScheduledLoss`."""

    def __init__(
        self,
        recorded: Recorded,
        structure: Structure,
        gradient: torch.Tensor | None,
        live: Iterable[Node],
        terms: Terms | None,
        is_home: bool,
        lanes: LossAtLanes | None,
    ) -> None:
        """`lanes`: of a split last stage, if they compute it together."""
        self._recorded, self._structure = recorded, structure
        self._pieces = structure.verdict.pieces
        self.calls = sorted(recorded.calls, key=lambda call: call.nodes[0].serial)
        self._gradient = gradient
        self.root = recorded.nodes[-1]
        reached = reached_by_gradient([self.root])
        self.reached = frozenset(n for n in reached if n.func is output_of and n.args[0] in recorded.calls)
        self._index = {node: i for i, node in enumerate(recorded.nodes)}
        self._slots = recorded.program.slots
        self._kept: dict[Node, list[torch.Tensor | None]] = {}
        self._for_the_check: set[Node] = set()
        self.together, self._lanes, self._is_home = lanes is not None, lanes, is_home
        if lanes is not None:
            if lanes.here:
                outputs = [node for call in self.calls for node in call.nodes] if lanes.keep_outputs else []
                self._kept = {node: [None] * self._slots for node in [*lanes.known, *outputs]}
        elif is_home:
            keep = self._wanted_later(live)
            if not structure.checked[0]:
                self._for_the_check = {node for call in self.calls for node in call.nodes} - keep
            # In one order: what is cut is gathered as it is kept, and ranks wait for each other in that.
            kept = sorted(keep | self._for_the_check, key=lambda node: node.serial)
            self._kept = {node: [None] * self._slots for node in kept}
        self._bind(terms)

    # ---- before the schedule ---------------------------------------------------------------------------------------

    def _wanted_later(self, live: Iterable[Node]) -> set[Node]:
        """Values the loop can still ask for after backward: totals of the loss's own parts, and outputs some live value needs."""
        keep, stack, seen = {self.root}, list(live), set()
        while stack:
            node = stack.pop()
            if node in seen or node.done:
                continue
            seen.add(node)
            i = self._index.get(node)
            if i is not None and not isinstance(self._pieces[i].state, Rows):
                keep.add(node)
            elif node.func is output_of:
                if node.args[0] in self.calls:
                    keep.add(node)
            else:
                stack.extend(node.parents)
        return keep

    def _bind(self, terms: Terms | None) -> None:
        """Given tensors with gradients are cut off here, and differentiated once, after the schedule."""
        self.outer: list[tuple[torch.Tensor | Node, torch.Tensor, torch.Tensor]] = []
        """(what was given, its value, the leaf that stood for it), where gradients go on."""
        self._givens: list[Any] = []
        for given in self._recorded.givens:
            value: Any = given
            if isinstance(given, Node):
                value = terms.values[given] if terms is not None and given in terms.values else given.value
            if isinstance(value, torch.Tensor) and value.requires_grad:
                leaf = value.detach().requires_grad_()
                self.outer.append((given, value, leaf))
                value = leaf
            self._givens.append(value)
        self._overs: list[Any] | None = None

    def _divisors(self, givens: list[Any]) -> list[Any]:
        with torch.no_grad():
            return [
                piece.over.func(*(givens[x.index] if isinstance(x, Given) else x for x in piece.over.args))
                if isinstance(piece.over, Over)
                else piece.over
                for piece in self._pieces
            ]

    # ---- while it runs: at home ------------------------------------------------------------------------------------

    def share(self, m: int, outputs: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """Micro batch m's part of the loss."""
        if self._overs is None:
            self._overs = self._divisors(self._givens)
        with torch.inference_mode(False):
            values = self._run(m, outputs, self._givens, self._overs)
            for node, parts in self._kept.items():
                i = self._index.get(node)
                value = values[i] if i is not None else _weighted(outputs[node], _output(node), m)
                # Ranks with rows of their own check a structure each when it is new to them: none may wait for others then.
                if node in self._for_the_check and isinstance(value, SplitTensor) and not value.is_common:
                    continue
                parts[m] = (value if self._stays_cut(node, value) else whole(value)).detach()
        part: torch.Tensor = whole(values[-1])
        return part

    def _stays_cut(self, node: Node, value: torch.Tensor) -> bool:
        """Whether a kept value is left as a split part has left it: logits that the loop may never look at again."""
        is_cut = isinstance(value, SplitTensor) and value.is_common
        return is_cut and node.func is output_of and node is not self.root and not is_small(node)

    def _run(self, m: int, outputs: Mapping[Node, torch.Tensor], givens: list[Any], overs: list[Any]) -> list[Any]:
        """Every entry's value for micro batch m."""
        values: list[Any] = []
        resolve = _Resolver(values, givens, m)
        entries = self._recorded.program.entries
        for node, entry, piece, over in zip(self._recorded.nodes, entries, self._pieces, overs, strict=True):
            if isinstance(entry.func, Output):
                values.append(_weighted(outputs[node], entry.func, m))
                continue
            assert piece.func is not None
            value = _call(node, node.context, piece.func, *swap((piece.args, piece.kwargs), _MARKS, resolve))
            values.append(value if over is None else value / over)
        return values

    def seed(self, m: int) -> torch.Tensor | None:
        """The gradient that backward starts with at micro batch m's part."""
        state = self._pieces[-1].state
        if self._gradient is not None and isinstance(state, Rows):
            return state.take(self._gradient, m)
        return self._gradient

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The schedule has run: kept values are joined, the calls are done, and nothing of the graph is left."""
        if self._lanes is not None:
            self._settle_at_lanes(self._lanes)
            return
        unknown = {node for node, parts in self._kept.items() if any(part is None for part in parts)}
        if self._kept and not self._structure.checked[0] and not unknown:
            self._check()
        self._structure.checked[0] = True
        for node in [*self._recorded.nodes, *(n for call in self.calls for n in call.nodes)]:
            if node.done:
                continue
            if node in self._kept and node not in unknown:
                node.settle(self._joined(node))
            elif node.func is output_of or node is self.root:
                node.settle(None)
            else:
                continue  # computed when it is wanted, from the outputs that were kept
            node.spent = node.requires_grad
        for call in self.calls:
            call.state = "done"

    def _settle_at_lanes(self, lanes: LossAtLanes) -> None:
        """What is small is at home, as ever; each lane has its part of the outputs. The first value of a new structure is not checked: it
        would be computed of parts too, on lanes that may have checked it before."""
        outputs = [node for call in self.calls for node in call.nodes]
        for node in [*lanes.known, *outputs]:
            if node.done:
                continue
            is_output = node.func is output_of
            here = node in self._kept and (is_output or self._is_home)
            node.settle(self._joined(node) if here else None)
            node.at_lanes, node.spent = is_output and lanes.keep_outputs, node.requires_grad
        bring_home(node for node in outputs if is_small(node))
        for call in self.calls:
            call.state = "done"

    def _joined(self, node: Node) -> torch.Tensor:
        parts = [part for part in self._kept[node] if part is not None]
        assert len(parts) == self._slots
        state = self._state(node)
        if isinstance(state, Rows):
            return state.join(parts)
        return parts[0] if state is CONST else torch.stack(parts).sum(0).to(parts[0].dtype)

    def _state(self, node: Node) -> State:
        if node in self._index:
            return self._pieces[self._index[node]].state
        return state_of(_output(node).kind, _output(node).sizes)

    # ---- once for each structure -----------------------------------------------------------------------------------

    def _check(self) -> None:
        """The first time a loss of this structure is scheduled, its value is also computed on the joined outputs: a wrong rule
        cannot pass unseen. Costs the loss code once more, no forward."""
        joined = {node: self._joined(node) for call in self.calls for node in call.nodes}
        whole, parts = self._whole(joined, self._givens)[-1], self._joined(self.root)
        slack = {torch.float64: 1e-9, torch.float32: 1e-4}.get(whole.dtype, 5e-2)
        if torch.allclose(whole, parts, rtol=slack, atol=slack, equal_nan=True) or self._agrees_in_double(joined):
            return
        raise AssertionError(
            f"the loss of the micro batches, {parts}, differs from the whole batch's, {whole} ({self.root.name}, {self.root.place}): "
            "a separability rule of epl is wrong. Please report it."
        )

    def _whole(self, joined: Mapping[Node, torch.Tensor], givens: list[Any]) -> list[Any]:
        values: list[Any] = []
        resolve = _Resolver(values, givens, 0)
        for node, entry in zip(self._recorded.nodes, self._recorded.program.entries, strict=True):
            if isinstance(entry.func, Output):
                values.append(joined[node])
            else:
                context = node.context._replace(grad=False)
                values.append(_call(node, context, entry.func, *swap((entry.args, entry.kwargs), _MARKS, resolve)))
        return values

    def _agrees_in_double(self, joined: Mapping[Node, torch.Tensor]) -> bool:
        """A second opinion: large terms that nearly cancel differ by rounding alone, which is no wrong rule."""
        givens = [_double(x) for x in self._givens]
        whole = self._whole({node: _double(value) for node, value in joined.items()}, givens)
        overs, total = self._divisors(givens), []
        with torch.no_grad():
            for m in range(self._slots):
                outputs = {node: _double(self._kept[node][m]) for call in self.calls for node in call.nodes}
                total.append(self._run(m, _unweighted(outputs, m), givens, overs)[-1])
        state = self._pieces[-1].state
        parts = state.join(total) if isinstance(state, Rows) else torch.stack(total).sum(0)
        # Code that casts down by itself rounds as it pleases; then only a gross difference counts.
        floats = [v for v in whole if isinstance(v, torch.Tensor) and v.is_floating_point()]
        rounded = [v.double().abs().sum().item() for v in floats if v.dtype is not torch.float64]
        slack = 1e-4 * max(rounded, default=0.0)
        return torch.allclose(whole[-1].double(), parts.double(), rtol=1e-7, atol=1e-9 + slack, equal_nan=True)


def _call(node: Node, context: Context, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        if context == Context.now():
            return func(*args, **kwargs)
        with context.restored():
            return func(*args, **kwargs)
    except Exception as error:
        error.add_note(f"in {node.name}, recorded at {node.place}")
        raise


class _Resolver:
    """What an argument of a piece stands for at micro batch m. Not a closure: one that calls itself is a cycle, and would keep the
    values of every micro batch until the garbage collector comes."""

    def __init__(self, values: list[Any], givens: list[Any], m: int) -> None:
        self._values, self._givens, self._m = values, givens, m

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Ref):
            return self._values[x.index]
        if isinstance(x, Given):
            return self._givens[x.index]
        if isinstance(x, Cut):
            return x.rows.take(self(x.value), self._m)
        if isinstance(x, Per):
            return x.values[self._m]
        if isinstance(x, Once):
            value = self(x.value)
            if self._m == 0:
                return value
            return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
        return x


def _output(node: Node) -> Output:
    call, i = node.args
    return Output(0, call.kinds[i], call.sizes)


def _weighted(value: torch.Tensor, output: Output, m: int) -> torch.Tensor:
    """A value without a batch dim counts by the rows of its micro batch."""
    return value * (output.sizes[m] / sum(output.sizes)) if output.kind == "coupled" else value


def _unweighted(outputs: Mapping[Node, torch.Tensor], m: int) -> dict[Node, torch.Tensor]:
    """Undo `_weighted`."""
    found = {}
    for node, value in outputs.items():
        output = _output(node)
        found[node] = value / (output.sizes[m] / sum(output.sizes)) if output.kind == "coupled" else value
    return found


def _double(x: Any) -> Any:
    return x.detach().double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
