"""The flat-bucket gradient reducer: data parallelism's one moving part.

What happens to one parameter in one backward pass (N ranks; f, this rank's factor, is 1 as a rule):

    gradient ──[1]── .grad, a view of a bucket ──[2]── bucket full: all-reduce, overlapped ──[3]── backward ends

    [1] Before it is added, it is multiplied by f. The gradients of all ranks then *average* to the wanted one, whatever
        that is: mean over replicas f = 1; sum f = N; a rank with more or fewer rows than the others f = N × its share.
    [2] Buckets leave in the same order on every rank, each as soon as it, and all before it, have their gradients.
    [3] Ranks tell each other which buckets they touched. What no rank touched stays, the rest is sent and waited for.

[Note: averaging is idempotent.] .grad may hold what earlier backward passes left, reduced already and so equal on all
ranks: the average of (equal part + f × own part) is (equal part + average of f × own part). So several backward passes
before a step, for mean and for sum, `no_sync` before them, reentrant checkpoints (a backward within a backward) and
buckets sent twice are right without any bookkeeping of what was reduced when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from epl import _torch
from epl.errors import UsageError
from epl.parallel.bucket import Bucket, Kind, Slot, make_buckets
from epl.parallel.buffers import BufferKeeper
from epl.parallel.growth import growth
from epl.parallel.hook import ModuleHook
from epl.parallel.sparse import reduce_sparse, sparse_parameters
from epl.parallel.words import GroupWords, Meet
from epl.report.log import warn

Named = tuple[str, nn.Parameter]
averaged: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""By id, what the user has averaged over all ranks: a gradient of his own may be one of these."""
_SPARSE, _BUFFERS, _OTHER_BUFFERS, _FIRST_BUCKET = 1, 2, 4, 3  # bits that ranks tell each other; buckets from bit 3 on


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReducePolicy:
    """How gradients travel (`communication.*`)."""

    method: Literal["mean", "sum"] = "mean"
    when: Literal["backward", "step"] = "backward"
    """"step": backward passes only accumulate; everything travels when `reduce()` is called."""
    max_splits: int = 5
    """At most this many messages."""
    fp16: bool = False
    fp16_scale: float = 128
    sparse_as_dense: bool = False


class GradientReducer:
    """Keeps `.grad` of a module's parameters equal on all ranks of `group`: the mean (or sum) of what each computed.

    Usable alone: make one after the model, then train as on one device.

        reducer = GradientReducer(model, group)

    The weights are not touched: `epl.parallel.copy_from_first(model.parameters(), group)` makes them equal first.
    `communicators` are further groups over the same ranks; messages take turns on them and so travel at the same time.
    `extra` are parameters outside the module (a loss's own weights). `factor` is f of the picture above. `on_new` is told
    of parameters that turn up later, before the first forward pass that uses them.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        policy: ReducePolicy | None = None,
        communicators: Sequence[dist.ProcessGroup] = (),
        extra: Iterable[Named] = (),
        factor: Callable[[], float] | None = None,
        meet: Meet | None = None,
        guard: Callable[[str], AbstractContextManager[None]] = lambda what: contextlib.nullcontext(),
        on_new: Callable[[list[Named]], None] = lambda parameters: None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise UsageError(f"GradientReducer takes an nn.Module first, found {type(module).__name__}")
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise UsageError("GradientReducer needs a process group: call epl.init() first, or pass one")
        self.module, self.group, self.size = module, group, dist.get_world_size(group)
        self.policy = policy or ReducePolicy()
        self._lanes = [group, *communicators]
        self._extra = list(extra)
        self._factor = factor or (lambda: float(self.size) if self.policy.method == "sum" else 1.0)
        self._meet, self._guard, self._on_new = meet or GroupWords(group), guard, on_new
        self._buffers = BufferKeeper(module, group)
        self._hooks: list[RemovableHandle] = []
        self._accumulators: list[object] = []  # torch holds them weakly; our hooks on them must not vanish
        self._known_sparse: set[int] = set()  # by id: parameters whose gradient comes sparse, as all ranks know
        self._surprises: set[int] = set()  # those of which only this rank knows yet
        self._dirty_sparse: set[int] = set()  # parameters that got a gradient since they were reduced as sparse ones
        self._order: list[str] | None = None  # in which gradients come; known after the first backward pass
        self._order_is_new = False
        self._memory: dict[Kind, torch.Tensor] = {}
        self._factor_now, self._factor_of = 1.0, -1  # in which backward pass
        self._syncing = True
        self._held = False  # gradients leave as they come, but backward does not wait for them
        self._ignored: frozenset[int] = frozenset()  # by id: parameters whose gradients are somebody else's for now
        self._session: _Session | None = None
        self._travelled: set[int] = set()  # by id: parameters whose gradients were reduced since they had none
        self._all: list[Named] = []
        self._all_as_of = -1
        self._signature: tuple[object, ...] = ()
        self._buckets: list[Bucket] = []
        self._sparse: list[Named] = []
        self._slots: dict[int, Slot] = {}
        self._module_hooks = [
            module.register_forward_pre_hook(ModuleHook(self._before_forward)),
            module.register_forward_hook(ModuleHook(self._after_forward)),
            register_optimizer_step_pre_hook(self._before_step),
        ]
        growth.watch()
        self.refresh()

    # ---- what a caller can do --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take all hooks off; gradients stay as they are."""
        if self._module_hooks:
            growth.unwatch()
        for handle in [*self._hooks, *self._module_hooks]:
            handle.remove()
        self._hooks, self._module_hooks, self._accumulators = [], [], []

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside sends everything."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @property
    def syncing(self) -> bool:
        """Whether backward passes reduce now: not under `no_sync`."""
        return self._syncing

    def parameters(self) -> list[Named]:
        """Every parameter this reducer looks after, each once."""
        if self._all_as_of != growth.count:
            found = {id(p): (name, p) for name, p in self._extra}
            self._all = list((found | {id(p): (name, p) for name, p in self.module.named_parameters()}).values())
            self._all_as_of = growth.count
        return self._all

    def add_parameters(self, parameters: Iterable[Named]) -> None:
        """Look after these as well from now on."""
        self._extra += list(parameters)
        self._all_as_of = -1
        self.refresh()

    def drop_parameters(self, parameters: Container[int]) -> None:
        """Look no longer after those of the extra parameters whose id is among these."""
        kept = [(name, p) for name, p in self._extra if id(p) not in parameters]
        if len(kept) < len(self._extra):
            self._extra, self._all_as_of = kept, -1
            self.refresh()

    def refresh(self) -> None:
        """Look at the parameters anew: some may have been frozen, unfrozen, added, moved or cast."""
        before, parameters = self._all, self.parameters()
        signature = tuple((id(p), p.requires_grad, p.dtype, p.device) for _, p in parameters)
        if signature != self._signature:
            first_time, self._signature = not self._signature, signature
            self._watch([p for _, p in parameters if p.requires_grad])
            self._lay_out()
            known = {id(p) for _, p in before}
            if new := [(name, p) for name, p in parameters if id(p) not in known and not first_time]:
                self._on_new(new)

    def ignore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the gradients of these, and only these, alone until further notice; their hooks must be off."""
        self._ignored = frozenset(map(id, parameters))

    def accumulate(self) -> None:
        """From now on backward passes only accumulate, until `send_next` or `finish` (a pipeline's micro batches)."""
        self.refresh()
        self._syncing = False

    def resume(self) -> None:
        """After a step that raised: backward passes reduce by themselves again."""
        self._syncing, self._held, self._ignored = True, False, frozenset()

    def send_next(self) -> None:
        """The next backward pass is the last of this step: let gradients leave as they come, without waiting for them."""
        self._syncing = self._held = True

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not left yet and wait for everything; afterwards backward passes reduce by themselves again."""
        self._syncing, self._held = True, False
        self._session = self._session or _Session()
        self._finish(1.0)

    @torch.no_grad()
    def reduce(self) -> None:
        """Send what has gathered since the last time, weighted by this rank's factor as of now (`when="step"`)."""
        self._session = self._session or _Session()
        self._finish(self._factor())

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if _torch.backward_id() != -1 or not torch.is_grad_enabled():
            return  # a checkpoint computes again inside a backward pass; or an evaluation, maybe on this rank only
        if not self._held:
            self._forget_session()  # one that is still open belongs to a backward pass that raised
            self.refresh()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        """Learn of the outermost backward pass: inside reentrant checkpoints parameters only see the inner ones."""
        if not torch.is_grad_enabled():
            return
        in_loop = _torch.backward_id() == -1 and not self._held
        if in_loop and any(slot.view.dtype is not slot.parameter.dtype for slot in self._slots.values()):
            self.refresh()  # the forward has cast them (routers of experts, to float32)
        if self.policy.when == "backward":
            for value in _torch.tree_leaves(output):
                # Of a lazy value there is no graph yet; whoever runs it tells us (`accumulate`, `finish`).
                if isinstance(value, torch.Tensor) and isinstance(value.grad_fn, Node):
                    value.grad_fn.register_prehook(self._on_output_gradient)

    def _on_output_gradient(self, gradients: object) -> None:
        if self._syncing:
            self._begin()

    def _before_accumulation(self, key: int, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if key in self._ignored:
            return None
        slot = self._slots.get(key)
        if slot is not None and slot.bucket.launched:
            self._receive(slot.bucket)  # a further gradient for a bucket under way: let it land first
        elif slot is not None and slot.fired:
            slot.fired = False
            slot.bucket.fired -= 1
            slot.view.mul_(self.size)
        if self.policy.when == "step":
            return None  # the user clips what is there, so it is weighted only when it travels
        if (backward := _torch.backward_id()) != self._factor_of:
            self._factor_of, self._factor_now = backward, self._factor()
        factor = self._factor_now
        return None if factor == 1.0 else tuple(gradient * factor for gradient in gradients)

    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            name = next((name for name, p in self.parameters() if p is parameter), "a parameter")
            raise UsageError(
                f"the gradient of {name} was gone before it was reduced over the {self.size} ranks that train it: it is expected in .grad "
                "until backward() has returned, and found None. A hook that was registered earlier takes it away (an optimizer that "
                "steps inside backward from a post-accumulate hook), with numbers of this rank alone. Step after backward()"
            )
        if gradient.requires_grad:
            raise UsageError(
                "backward(create_graph=True) under data parallelism: the reduced gradient has no graph. Use "
                "torch.autograd.grad(loss, inputs, create_graph=True) for the inner derivative."
            )
        if gradient.is_sparse and self.policy.sparse_as_dense:
            parameter.grad = gradient.to_dense()
        elif gradient.is_sparse:
            self._surprises.add(id(parameter))
        self._dirty_sparse.add(id(parameter))
        session = self._begin() if self._syncing and self.policy.when == "backward" else None
        slot = self._slots.get(id(parameter))  # after _begin, which may deal out the memory anew
        if slot is None:
            return  # a sparse one, sent when backward ends
        if session is None:
            slot.dirty = True
            if self.policy.when == "backward":  # else it stays where it is: another reducer may be at work on it
                slot.load(1.0)
            return
        slot.load(1.0 / self.size)
        slot.fired = True
        slot.bucket.fired += 1
        session.order.append(slot.name)
        while session.next < len(self._buckets) and self._buckets[session.next].full:
            self._launch(session.next, 1.0)
            session.next += 1

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Say so if the optimizer is given gradients that differ from rank to rank: replicas would drift apart unnoticed."""
        if self.policy.when == "step":
            return  # whatever is there is sent now
        own: list[str] = []
        names: dict[int, str] | None = None
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            gradient, key = parameter.grad, id(parameter)
            if gradient is None:
                self._travelled.discard(key)
            elif key not in self._travelled and averaged.get(id(gradient)) is not gradient:
                names = names or {id(p): name for name, p in self.parameters()}
                if key in names and parameter.requires_grad:
                    own.append(names[key])
        if own:
            warn(
                f"the optimizer is about to use gradients of {len(own)} parameters ({', '.join(own[:3])}) that no backward pass has "
                f"reduced over the {self.size} ranks that train them: made by torch.autograd.grad, set by hand, or left by no_sync. Every "
                "rank would go its own way. Use loss.backward(), or average them first: p.grad = epl.global_mean(gradient)"
            )

    # ---- one backward pass -----------------------------------------------------------------------------------------

    def _begin(self) -> _Session:
        if self._session is None and self._order_is_new:
            self._lay_out()  # now: as a rule .grad is None everywhere, and the new layout takes the old one's memory
        session = self._session = self._session or _Session()
        backward = _torch.backward_id()
        if backward not in session.running:
            session.running.append(backward)
            _torch.when_backward_ends(functools.partial(self._backward_ended, session, backward))
        return session

    @torch.no_grad()
    def _backward_ended(self, session: _Session, backward: int) -> None:
        if session is self._session:
            session.running.remove(backward)
            if not session.running and not self._held:
                self._finish(1.0)

    def _finish(self, factor: float) -> None:
        """[3] of the picture on top."""
        session = self._session
        assert session is not None
        with self._guard("backward"):
            all_buckets = range(len(self._buckets))
            touched = {index for index in all_buckets if self._buckets[index].touched}
            moved = self._buffers.moved()
            told = self._meet("backward", self._own_bits(touched, moved))
            wanted = touched if len(touched) == len(all_buckets) else _buckets_in(told(), all_buckets)
            for index in all_buckets:
                if index in wanted and not self._buckets[index].launched:
                    self._launch(index, factor)
            bits = told()
            for bucket in self._buckets:
                if bucket.launched:
                    self._receive(bucket)
            self._reduce_sparse([p for _, p in self._sparse], factor)
            if bits & _SPARSE:
                self._learn_sparse(factor)
            if bits & _BUFFERS:
                self._buffers.send(moved, as_last_time=not bits & _OTHER_BUFFERS)
            if self._order is None and self.policy.when == "backward":
                self._settle_order(session.order)
        self._travelled = {id(p) for _, p in self.parameters() if p.grad is not None}
        self._session = None

    def _reduce_sparse(self, parameters: list[nn.Parameter], factor: float) -> None:
        scales = [(factor if id(p) in self._dirty_sparse else 1.0) / self.size for p in parameters]
        reduce_sparse(parameters, self.group, scales)
        self._dirty_sparse -= {id(p) for p in parameters}

    def _own_bits(self, touched: set[int], moved: frozenset[int]) -> int:
        surprised = any(key in self._slots for key in self._surprises)
        buffers = bool(moved) * _BUFFERS | (not self._buffers.knows(moved)) * _OTHER_BUFFERS
        return surprised * _SPARSE | buffers | sum(1 << _FIRST_BUCKET + i for i in touched)

    def _launch(self, index: int, factor: float) -> None:
        """Send a bucket. What it holds has been divided by N, so the sum over ranks is the average."""
        bucket = self._buckets[index]
        for slot in bucket.slots:
            if not slot.fired:  # what is not dirty has travelled before (a second optimizer's step), weighted already
                slot.load((factor if slot.dirty else 1.0) / self.size)
        in_use = [slot.in_use for slot in bucket.slots]
        if all(in_use):
            bucket.flags.fill_(1)
        else:
            bucket.flags.copy_(torch.tensor(in_use))
        wire = bucket.flat
        if self.policy.fp16 and wire.dtype in (torch.float32, torch.float64, torch.bfloat16):
            wire = bucket.wire = (wire * self.policy.fp16_scale).half()
        elif wire.is_complex():
            wire = torch.view_as_real(wire)
        with self._guard("backward"):
            bucket.work = dist.all_reduce(wire, group=self._lanes[index % len(self._lanes)], async_op=True)
        bucket.launched = True

    @torch.no_grad()
    def _receive(self, bucket: Bucket) -> None:
        """Wait for a bucket's message and let every parameter have its gradient."""
        assert bucket.work is not None
        with self._guard("backward"):
            bucket.work.wait()
        if bucket.wire is not None:
            torch.div(bucket.wire, self.policy.fp16_scale, out=bucket.flat)
        bucket.work, bucket.wire, bucket.launched = None, None, False
        missing = [slot for slot in bucket.slots if slot.parameter.grad is None]
        if missing:  # only then are the flags read: on a GPU that waits for the device
            used = torch.view_as_real(bucket.flags)[:, 0] if bucket.flags.is_complex() else bucket.flags
            for slot, is_used in zip(bucket.slots, (used > 0).tolist(), strict=True):
                if is_used and slot.parameter.grad is None:
                    slot.parameter.grad = slot.view
        bucket.fired = 0
        for slot in bucket.slots:
            slot.fired = slot.dirty = False

    def _forget_session(self) -> None:
        if self._session is not None:
            for bucket in self._buckets:
                if bucket.launched:
                    self._receive(bucket)
                bucket.fired = 0
                for slot in bucket.slots:
                    slot.fired = slot.dirty = False
            self._session = None

    # ---- layout ----------------------------------------------------------------------------------------------------

    def _watch(self, parameters: list[nn.Parameter]) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks, self._accumulators = [], []
        for parameter in parameters:
            accumulator = _torch.gradient_accumulator(parameter)
            self._accumulators.append(accumulator)
            before = functools.partial(self._before_accumulation, id(parameter))
            self._hooks.append(accumulator.register_prehook(before))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._after_accumulation))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Cut the trained parameters into buckets, in the order their gradients come; move what .grad holds there."""
        trained = [(name, p) for name, p in self.parameters() if p.requires_grad]
        sparse = set() if self.policy.sparse_as_dense else self._known_sparse | sparse_parameters(self.module)
        self._sparse = [(name, p) for name, p in trained if id(p) in sparse]
        dense = [(name, p) for name, p in reversed(trained) if id(p) not in sparse]
        if self._order is not None:
            place = {name: position for position, name in enumerate(self._order)}
            dense.sort(key=lambda named: place.get(named[0], len(place)))
        self._order_is_new = False
        dirty = {key for key, slot in self._slots.items() if slot.dirty}
        for slot in self._slots.values():
            if slot.in_use:
                slot.parameter.grad = slot.view.clone()  # the memory is about to be dealt out anew
        self._buckets = make_buckets(dense, self.policy.max_splits, self._memory)
        self._slots = {id(slot.parameter): slot for bucket in self._buckets for slot in bucket.slots}
        for key, slot in self._slots.items():
            slot.dirty = key in dirty
            gradient = slot.parameter.grad
            if gradient is not None and not gradient.is_sparse and self.policy.when == "backward":
                slot.load(1.0)

    def _settle_order(self, seen: list[str]) -> None:
        """From the second step on buckets follow the order in which gradients came on the first rank."""
        number = {slot.name: n for n, slot in enumerate(self._slots.values())}
        first = [number[name] for name in seen if name in number]
        rest = [n for n in number.values() if n not in set(first)]
        device = next((b.flat.device for b in self._buckets), torch.device("cpu"))
        order = torch.tensor(first + rest, dtype=torch.int64, device=device)
        dist.broadcast(order, group=self.group, group_src=0)
        names = list(number)
        self._order = [names[n] for n in order.tolist()]
        self._order_is_new = True

    def _learn_sparse(self, factor: float) -> None:
        """Some rank met a sparse gradient where a dense one was expected: all treat that parameter as sparse now."""
        slots = list(self._slots.items())
        device = slots[0][1].parameter.device
        found = torch.tensor([key in self._surprises for key, _ in slots], dtype=torch.uint8, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        surprises = [slot.parameter for (_, slot), is_sparse in zip(slots, found.tolist(), strict=True) if is_sparse]
        self._reduce_sparse(surprises, factor)
        self._known_sparse |= {id(p) for p in surprises}
        self._surprises.clear()
        self._lay_out()


class _Session:
    """One backward pass (with those nested in it): which are running, what has come, which bucket leaves next."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.order: list[str] = []
        self.next = 0


def _buckets_in(bits: int, indices: range) -> set[int]:
    return {index for index in indices if bits >> (_FIRST_BUCKET + index) & 1}
