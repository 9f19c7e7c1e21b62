"""Stand-ins for the carrier: a plain module called micro batch by micro batch, by one rank or by several that are threads.

With several, home runs the bodies on a hidden copy of the model; every other rank's model has only its share of the parameters,
the rest are foreign. Ranks take turns: one runs until it must wait for the others, with a random state of its own, so that a
loop that seeds and draws sees what it would see in a process of its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from epl import _torch
from epl.errors import RanksDisagreeError
from epl.graph.context import Context
from epl.graph.spec import Spec
from epl.plan.batch import cut_evenly
from epl.train.lazy import ForeignParameter, LazyTensor, Node, become_foreign, outputs_of, run_forward
from epl.train.lazy.protocol import Call, Kind, ScheduledLoss, State


class Replica:
    """Ranks that are threads, of which one runs at a time."""

    def __init__(self, ranks: int = 1) -> None:
        self.size = ranks
        self._turn = threading.Condition()
        self._running = False
        self._given: dict[int, object] = {}
        self._said: list[object] = []
        self._round = 0
        self._failure: BaseException | None = None

    def run(self, loop: Callable[[int], Any]) -> list[Any]:
        """`loop(rank)` on every rank; the first failure is raised, those of the others are its consequences."""
        results: list[Any] = [None] * self.size
        state = torch.get_rng_state()

        def body(rank: int) -> None:
            self._wait(lambda: not self._running, state)
            try:
                results[rank] = loop(rank)
            except BaseException as error:
                with self._turn:
                    self._failure = self._failure or error
            finally:
                with self._turn:
                    self._running = False
                    self._turn.notify_all()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_rng_state(state)
        if self._failure is not None:
            raise self._failure
        return results

    def exchange(self, rank: int, value: object) -> list[object]:
        """What every rank gave."""
        if self.size == 1:
            return [value]
        with self._turn:
            if rank in self._given:
                raise AssertionError(f"rank {rank} is ahead of the others")
            self._given[rank] = value
            mine = self._round
            if len(self._given) == self.size:
                self._said, self._given = [self._given[r] for r in range(self.size)], {}
                self._round += 1
            self._running = False
            self._turn.notify_all()
        self._wait(lambda: self._round > mine and not self._running, torch.get_rng_state())
        return list(self._said)

    def _wait(self, ready: Callable[[], bool], state: torch.Tensor) -> None:
        with self._turn:
            if not self._turn.wait_for(lambda: ready() or self._failure is not None, timeout=20):
                raise RanksDisagreeError("a rank waits for the others, which do something else")
            if self._failure is not None:
                raise RanksDisagreeError("another rank has raised")
            self._running = True
        torch.set_rng_state(state)


class DoubleCall:
    """One call of a `Double`."""

    def __init__(
        self,
        carrier: DoubleCarrier,
        inputs: list[Any],
        tree: Any,
        rows: int,
        micro_batches: int,
        kinds: tuple[Kind, ...],
    ) -> None:
        self.carrier, self.inputs, self.tree, self.rows, self.kinds = carrier, inputs, tree, rows, kinds
        spans = cut_evenly(0, rows, min(micro_batches, rows))
        self.starts = [start for start, _ in spans]
        self.sizes = tuple(stop - start for start, stop in spans)
        self.context = Context.now()
        self.nodes: list[Node] = []
        self.state: State = "new"
        self.input_gradients: list[torch.Tensor | None] = []
        self.leaves: list[Any] = []
        self.parts: list[list[torch.Tensor]] = []
        watched = [*carrier.own(), *(t for t in inputs if isinstance(t, torch.Tensor) and not t.is_inference())]
        self._versions = [(t, t._version) for t in watched]

    def check(self) -> None:
        if any(t._version != version for t, version in self._versions):
            raise RuntimeError("a parameter or input of the model was changed in place between model(x) and its use")

    def body(self, m: int) -> list[torch.Tensor]:
        """Frontier values of micro batch m; inputs are cut off as leaves."""
        if not self.leaves:
            grad = self.context.grad
            self.leaves = [
                t.detach().requires_grad_(grad and t.requires_grad) if _is_tensor(t) else t for t in self.inputs
            ]
        start, stop = self.starts[m], self.starts[m] + self.sizes[m]
        mine = [t[start:stop] if _is_tensor(t) and _has_rows(t, self.rows) else t for t in self.leaves]
        args, kwargs = pytree.tree_unflatten(mine, self.tree)
        with self.context.restored():
            return tensors_in(self.carrier.engine(*args, **kwargs))

    def join(self, parts: list[torch.Tensor], kind: Kind) -> torch.Tensor:
        if isinstance(kind, int):
            return torch.cat(parts, kind)
        if kind == "constant":
            return parts[0]
        return sum(
            (x * (n / self.rows) for x, n in zip(parts[1:], self.sizes[1:], strict=True)),
            parts[0] * (self.sizes[0] / self.rows),
        )

    def collect_inputs(self) -> None:
        """The gradients that arrived at the inputs, on every rank."""
        found: list[torch.Tensor | None] = []
        for leaf in self.leaves:
            found.append(leaf.grad if _is_tensor(leaf) else None)
            if _is_tensor(leaf):
                leaf.grad = None
        self.input_gradients = self.carrier.from_home(found)


class DoubleCarrier:
    """Runs the whole model at home."""

    def __init__(self, replica: Replica, rank: int, model: nn.Module, engine: nn.Module, home: int) -> None:
        self.replica, self.rank, self.model, self.engine = replica, rank, model, engine
        self.ranks, self.home = tuple(range(replica.size)), home
        self.is_home = self.at_end = rank == self.home
        self.ends_split = False
        self.parameters = dict(model.named_parameters())
        self.events: list[str] = []
        self.pushed: list[tuple[int, ...]] = []
        self._aside = False
        self._saved: list[Any] = []

    def own(self) -> list[nn.Parameter]:
        return [p for p in self.parameters.values() if not isinstance(p, ForeignParameter)]

    def from_home(self, value: Any) -> Any:
        return self.replica.exchange(self.rank, value)[self.home]

    def refuses(self, calls: Sequence[Call]) -> str:
        return ""

    def agree(self, kind: str, bits: int, flags: int = 0) -> int:
        said: list[Any] = self.replica.exchange(self.rank, (kind, bits, flags))
        if len({(k, b) for k, b, _ in said}) > 1:
            raise RanksDisagreeError(f"ranks are at different places: {said}")
        self.events.append(kind)
        return functools.reduce(operator.or_, (theirs for _, _, theirs in said))

    def _synchronise(self) -> None:
        """Home's hidden copy gets every rank's parameters."""
        if self.replica.size == 1:
            return
        said = self.replica.exchange(
            self.rank, {n: p for n, p in self.parameters.items() if not isinstance(p, ForeignParameter)}
        )
        if self.is_home:
            real = dict(self.engine.named_parameters())
            with torch.no_grad():
                for theirs in said:
                    assert isinstance(theirs, dict)
                    for name, parameter in theirs.items():
                        real[name].data = parameter.detach().clone()
                        real[name].requires_grad_(parameter.requires_grad)

    def forward_all(self, call: Any, keep: bool, at_lanes: bool = False) -> list[torch.Tensor] | None:
        self.events.append("whole batch" if keep else "forward")
        self._synchronise()
        if not self.is_home:
            return None
        with torch.set_grad_enabled(keep and call.context.grad):
            if not keep:
                call.context = call.context._replace(grad=False)
            parts = [call.body(m) for m in range(len(call.sizes))]
        call.parts = parts if keep else []
        values = [[o.detach() for o in outs] for outs in parts]
        return [call.join([v[i] for v in values], kind) for i, kind in enumerate(call.kinds)]

    def begin_backward(self, aside: bool, terms: bool = False) -> None:
        self._aside = aside
        if self.is_home:
            self._saved = [(p, p.grad, _torch.take_hooks(p)) for p in self.engine.parameters()]
            for p in self.engine.parameters():
                p.grad = None

    def train(self, loss: ScheduledLoss) -> None:
        self.events.append("scheduled")
        self._synchronise()
        if self.is_home:
            for m in range(len(loss.calls[0].sizes)):
                outputs = {}
                for call in loss.calls:
                    assert isinstance(call, DoubleCall)
                    outputs.update(zip(call.nodes, call.body(m), strict=True))
                part, seed = loss.share(m, outputs), loss.seed(m)
                if part.requires_grad:
                    torch.autograd.backward([part], [seed])
        for call in loss.calls:
            assert isinstance(call, DoubleCall)
            call.collect_inputs()

    def backward_all(self, call: Any, gradients: Any, reached: tuple[bool, ...], retain: bool) -> None:
        assert call.state == "forward"
        if self.is_home:
            assert [g is not None for g in gradients] == list(reached)
            for m, outs in enumerate(call.parts):
                roots, seeds = [], []
                for kind, out, gradient in zip(call.kinds, outs, gradients, strict=True):
                    if gradient is None or not out.requires_grad or (kind == "constant" and m > 0):
                        continue
                    if isinstance(kind, int):
                        gradient = gradient.narrow(kind, call.starts[m], call.sizes[m])
                    elif kind == "coupled":
                        gradient = gradient * (call.sizes[m] / call.rows)
                    roots.append(out)
                    seeds.append(gradient)
                if roots:
                    torch.autograd.backward(roots, seeds, retain_graph=retain)
            if not retain:
                call.parts = []
        call.collect_inputs()

    def end_backward(self, extra: Mapping[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        made = {}
        if self.is_home:
            names = {id(p): n for n, p in self.engine.named_parameters()}
            for p, gradient, hooks in self._saved:
                made[names[id(p)]] = p.grad
                p.grad = gradient
                _torch.give_hooks(p, hooks)
        made = self.from_home(made)
        found = {}
        for name, p in self.parameters.items():
            gradient = made[name]
            if p in extra:
                gradient = extra[p] if gradient is None else gradient + extra[p]
            if gradient is not None and not isinstance(p, ForeignParameter):
                found[p] = gradient
        assert not set(extra) - set(self.parameters.values())
        if self._aside:
            return found
        if found:
            torch.autograd.backward(list(found), [g.clone() for g in found.values()])
        return {}

    def forget(self, call: Any) -> None:
        self.events.append("forget")
        call.parts = []

    def share(self, values: list[torch.Tensor] | None, specs: list[Spec]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self.from_home(values)
        for value, spec in zip(found, specs, strict=True):
            assert value.shape == spec.shape
            assert value.dtype == spec.dtype
            self.events.append(f"share {list(value.shape)}")
        return list(found) if self.is_home else [v.detach().clone() for v in found]

    def push(self, values: list[tuple[int, torch.Tensor]] | None) -> list[tuple[int, torch.Tensor]]:
        found = self.from_home(values)
        self.pushed += [tuple(v.shape) for _, v in found]
        return [(n, v if self.is_home else v.detach().clone()) for n, v in found]

    def exchange(self, value: object) -> list[object]:
        self.events.append("exchange")
        return copy.deepcopy(self.replica.exchange(self.rank, value)) if self.replica.size > 1 else [value]


class Double:
    """Stands for a cut model: calling it gives lazy outputs of `model` in micro batches."""

    def __init__(
        self,
        model: nn.Module,
        micro_batches: int,
        replica: Replica | None = None,
        rank: int = 0,
        home: int | None = None,
    ) -> None:
        replica = replica or Replica()
        engine = model
        if replica.size > 1:
            engine = replica.exchange(rank, copy.deepcopy(model) if rank == 0 else None)[0]
            names = [n for n, _ in model.named_parameters()]
            for i, (name, parameter) in enumerate(model.named_parameters()):
                owner = i * replica.size // len(names)
                if owner != rank:
                    become_foreign(parameter, owner, name)
        self.model, self.micro_batches = model, micro_batches
        self.carrier = DoubleCarrier(replica, rank, model, engine, replica.size - 1 if home is None else home)
        self._kinds: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, tree = pytree.tree_flatten((args, kwargs))
        specs = [_spec(t) for t in flat]
        rows = next(s.shape[0] for s in specs if s is not None)
        small, large, out_tree = self._recorded(specs, flat, tree, rows)
        kinds = tuple(_kind(a, b, rows) for a, b in zip(small, large, strict=True))
        inputs = [t.epl_node if isinstance(t, LazyTensor) else t for t in flat]
        call = DoubleCall(self.carrier, inputs, tree, rows, self.micro_batches, kinds)
        call.nodes = outputs_of(call, small)
        if not call.context.grad:
            run_forward(call)
        lazy = iter([LazyTensor(node) for node in call.nodes])
        return pytree.tree_map_only(Spec, lambda _: next(lazy), out_tree, is_leaf=lambda x: isinstance(x, Spec))

    def _recorded(self, specs: list[Any], flat: list[Any], tree: Any, rows: int) -> Any:
        parameters = list(self.model.parameters())
        flags = tuple(m.training for m in self.model.modules()), tuple(p.requires_grad for p in parameters)
        key = (tuple(specs), tree, rows, Context.now(), flags)
        if key not in self._kinds:
            autocast, grad = torch.is_autocast_enabled("cpu"), Context.now().grad
            device = "cpu" if autocast else "meta"  # faster; but autocast does not know it
            with torch.inference_mode(False):
                model = copy.deepcopy(self.carrier.engine).to(device).train(self.model.training)
            for real, parameter in zip(model.parameters(), parameters, strict=True):
                real.data = real.data.to(parameter.dtype)
                real.requires_grad_(parameter.requires_grad)
            outs = []
            state = torch.get_rng_state()
            fake = _torch.fake_mode if autocast else contextlib.nullcontext
            for n in (rows, rows + 1):
                with fake(), torch.inference_mode(False), torch.set_grad_enabled(grad):  # leaving it turns grad mode on
                    inputs = [
                        _fake(s, rows, n, device) if s is not None else t for s, t in zip(specs, flat, strict=True)
                    ]
                    a, k = pytree.tree_unflatten(inputs, tree)
                    outs.append(pytree.tree_map_only(torch.Tensor, _on_cpu, model(*a, **k)))
            torch.set_rng_state(state)
            found = [
                [s for s in pytree.tree_leaves(o, is_leaf=lambda x: isinstance(x, Spec)) if isinstance(s, Spec)]
                for o in outs
            ]
            self._kinds[key] = (*found, outs[0])
        return self._kinds[key]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _has_rows(t: torch.Tensor, rows: int) -> bool:
    return t.dim() > 0 and t.shape[0] == rows


def _spec(t: Any) -> Spec | None:
    if isinstance(t, LazyTensor):
        spec: Spec = t.epl_node.spec
        return spec
    return Spec.of(t) if isinstance(t, torch.Tensor) else None


def _fake(spec: Spec, rows: int, n: int, device: str) -> torch.Tensor:
    shape = [n, *spec.shape[1:]] if spec.shape and spec.shape[0] == rows else spec.shape
    return torch.empty(shape, dtype=spec.dtype, requires_grad=spec.requires_grad, device=device)


def _on_cpu(t: torch.Tensor) -> Spec:
    return Spec.of(t)._replace(device=torch.device("cpu"))


def _kind(a: Spec, b: Spec, rows: int) -> Kind:
    changed = [d for d in range(len(a.shape)) if a.shape[d] != b.shape[d]]
    if len(changed) == 1:
        return changed[0]
    return "coupled" if a.requires_grad else "constant"
