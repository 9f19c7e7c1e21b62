"""A module cut in place: its parameters stay the same objects, its code runs unchanged, on split values."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from epl import _torch
from epl.errors import SplitError, UsageError
from epl.graph.deferred import is_deferred, settle_block
from epl.graph.record.leaf import on_stand_ins
from epl.parallel.split import rules
from epl.parallel.split.boundary import Boundary
from epl.parallel.split.cutparameter import Expressions, become_cut, become_plain
from epl.parallel.split.escape import forget_stream, install_escapes, remember_stream
from epl.parallel.split.expressions import OneLoss
from epl.parallel.split.parameters import Seat, SplitParameters, seats_of, whole_meta
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.together import enter_together
from epl.parallel.split.user_rules import forward_of
from epl.parallel.split.value import SplitTensor, settle
from epl.plan.split.cut import Cut
from epl.plan.split.layout import ParameterLayout
from epl.plan.split.splitplan import SplitPlan

assert rules, "importing them registers them"

_sequences: weakref.WeakKeyDictionary[SplitRanks, dict[Any, Cut]] = weakref.WeakKeyDictionary()
"""How lengths of sequences are cut: parts on the same ranks must agree, by identity."""


class SplitPart:
    """One module, split over ranks. Every parameter that the plan cuts is now this rank's block, as a plain tensor.

    `layouts` says how they lie. The module is called as before, alike on all ranks: partial sums are added up before they leave
    it, cut values (logits) leave it cut. So is any module in it that holds parameters. A copy of the module is a split module, too.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: SplitPlan,
        ranks: SplitRanks,
        *,
        boundary: Boundary | None = None,
        expressions: Expressions | None = None,
        wraps_itself: bool = True,
        sequence_parallel: bool = False,
        exact_dropout: bool = False,
    ) -> None:
        self.module, self.plan, self.ranks, self.boundary = module, plan, ranks, boundary
        self.layouts = plan.layouts()
        """Of the parameters that are cut, by their first names in the module."""
        self._exact_dropout = exact_dropout
        self._sequence_parallel = sequence_parallel
        self._wraps_itself = wraps_itself
        """Whether the module's own forward is one split forward; else those of the modules in it are, each for itself."""
        self._passing = 0
        self._seats, parameters = seats_of(module)
        self._check(plan, ranks, parameters)
        self._whole = {name: whole_meta(parameters[name], layout) for name, layout in self.layouts.items()}
        for name, layout in self.layouts.items():
            _cut_in_place(parameters[name], layout, ranks.rank)
            become_cut(parameters[name], layout, expressions or OneLoss(ranks))
        self._forwards: list[_Forward] = []
        self._original = self
        self._attach()
        self._release = weakref.finalize(self, _released(ranks))

    @staticmethod
    def _check(plan: SplitPlan, ranks: SplitRanks, parameters: dict[str, nn.Parameter]) -> None:
        if plan.ways != ranks.ways:
            raise SplitError(f"a plan for {plan.ways} ranks cannot be carried out on {ranks.ways}")
        for name, shape in plan.shapes.items():
            if name not in parameters or tuple(parameters[name].shape) != shape:
                found = tuple(parameters[name].shape) if name in parameters else "nothing"
                raise SplitError(f"the plan is for a parameter {name} of shape {shape}; the module has {found} there")

    def _attach(self) -> None:
        owners: set[nn.Module] = set()
        for module, key, name in self._seats:
            if name in self.layouts:
                held = module.__dict__["_parameters"]
                if not isinstance(held, SplitParameters):
                    held = module.__dict__["_parameters"] = SplitParameters(held, self.ranks)
                held.cut(key, self.layouts[name])
                owners.add(module)
        parameters = seats_of(self.module)[1]
        for path, module in self.module.named_modules():
            if module is self.module:
                wanted = self._wraps_itself
            else:
                wanted = forward_of(module) is not None or any(part in owners for part in module.modules())
            if wanted:
                joined = [parameters[name] for name in self.plan.joined.get(path, ())]
                self._forwards.append(_Forward(self, module, joined))

    # ---- running

    @_torch.without_dynamo  # torch.compile(model): a graph break here, and what is inside runs as it is written (escape.py)
    def run(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of the module or of one in it."""
        if self._passing:
            return forward.unsplit(*args, **kwargs)
        if _torch.fake_mode_is_on() or on_stand_ins():  # recorded: other ranks may have this recording already
            with self._shown_whole(fake=True):
                return forward.unsplit(*args, **kwargs)
        with self.entered():
            if self.boundary is None:
                return _settled(forward(*args, **kwargs))
            args, kwargs = self.boundary.enter((args, kwargs), self.ranks)
            return _settled(self.boundary.leave(forward(*args, **kwargs), self.ranks))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, parameters show as split values, also to code that belongs to no module, and what is whole is drawn alike."""
        before = region.depth, region.entered, region.sequence, region.exact_dropout, region.ranks
        region.depth, region.entered, region.ranks = 1, {}, self.ranks
        region.sequence = _sequences.setdefault(self.ranks, {}) if self._sequence_parallel else None
        region.exact_dropout = self._exact_dropout
        try:
            with self.ranks.common.running():
                yield
        finally:
            region.depth, region.entered, region.sequence, region.exact_dropout, region.ranks = before

    # ---- looking at it from outside

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of something that lies like the parameter `name`: itself, its gradient. All ranks call it together."""
        layout = self.layouts.get(name)
        if layout is None:
            return tensor.detach()
        cut, dim = layout.cut, layout.dim
        return cut.join(self.ranks.all_gather(tensor.detach().contiguous(), cut.lengths, dim), dim)

    @contextlib.contextmanager
    def _shown_whole(self, fake: bool) -> Iterator[None]:
        """Inside, the module has parameters of the whole shapes, without memory (`fake`: fakes, or one number
        expanded where code needs numbers), and is called as if it were not split."""
        before: dict[nn.Module, dict[str, Any]] = {}
        made = {name: _fake(whole, self._held(name)) if fake else whole for name, whole in self._whole.items()}
        try:
            for module, key, name in self._seats:
                held = module.__dict__["_parameters"]
                if name in made and (module in before or isinstance(held, SplitParameters)):
                    if module not in before:
                        before[module] = held
                        module.__dict__["_parameters"] = dict(held)
                    module.__dict__["_parameters"][key] = made[name]
            self._passing += 1
            yield
        finally:
            self._passing -= 1
            for module, held in before.items():
                module.__dict__["_parameters"] = held

    def _held(self, name: str) -> nn.Parameter:
        seat = next(seat for seat in self._seats if seat.name == name)
        held: nn.Parameter = dict.__getitem__(seat.module.__dict__["_parameters"], seat.key)
        return held

    def undo(self, gather: bool = True) -> None:
        """The module is as it was, with whole parameters: all ranks call it together. Without `gather` the blocks stay."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []
        for module, _, name in self._seats:
            if name in self.layouts and isinstance(module.__dict__["_parameters"], SplitParameters):
                module.__dict__["_parameters"] = dict(module.__dict__["_parameters"])
        if gather:
            for name in self.layouts:
                parameter = self._held(name)
                gradient = parameter.grad
                become_plain(parameter)
                _torch.give_memory(parameter, self.gather(name, parameter))
                if gradient is not None:
                    parameter.grad = self.gather(name, gradient)
        self._release()

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitPart:
        new = object.__new__(SplitPart)
        memo[id(self)] = new
        new.__dict__.update(self.__dict__)
        new._passing, new._forwards, new._seats = 0, [], []
        new._release = weakref.finalize(new, _released(self.ranks))
        new._original = self
        new.module = memo.get(id(self.module), self.module)
        return new

    def _join(self, original: nn.Module, module: nn.Module) -> None:
        """A copy grows with the modules that are copied: maybe only some of the part's are."""
        self._seats += [Seat(module, key, name) for owner, key, name in self._original._seats if owner is original]


@contextlib.contextmanager
def as_whole(part: SplitPart) -> Iterator[None]:
    """Inside, the part's module has parameters of the whole shapes on the meta device, in every listing: for recording it."""
    with part._shown_whole(fake=False):
        yield


class _Forward:
    """Stands where a module's forward was: innermost, so that the user's hooks see what is outside of the split."""

    is_split_forward = True

    def __init__(self, part: SplitPart, module: nn.Module, joined: list[nn.Parameter]) -> None:
        self._part, self._module, self._joined = part, module, joined
        self._own = module.__dict__.get("forward")
        self.unsplit = module.forward
        self.plain = forward_of(module) or self.unsplit
        functools.update_wrapper(self, self.unsplit)
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if region.depth:
            if self._joined and region.ranks is self._part.ranks:
                enter_together(args, kwargs, self._joined, region.ranks)
            return self.plain(*args, **kwargs)
        return self._part.run(self, args, kwargs)

    def remove(self) -> None:
        """The module has its own forward again."""
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]
            if self._own is not None:
                self._module.__dict__["forward"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = object.__new__(_Forward)
        module = memo.get(id(self._module))
        if module is None:  # somebody copies the function alone
            return self
        memo[id(self)] = new
        new._part, new._module = copy.deepcopy(self._part, memo), module
        new._own, new._joined = copy.deepcopy(self._own, memo), copy.deepcopy(self._joined, memo)
        new.unsplit = types.MethodType(type(module).forward, module) if new._own is None else new._own
        new.plain = forward_of(module) or new.unsplit
        functools.update_wrapper(new, new.unsplit)
        new._part._forwards.append(new)
        new._part._join(self._module, module)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return (_same, (self._own,)) if self._own is not None else (getattr, (self._module, "forward"))


def _released(ranks: SplitRanks) -> Callable[[], None]:
    """Install what keeps a part right; what undoes it."""
    undo = install_escapes()
    remember_stream(ranks)
    _living[ranks] = _living.get(ranks, 0) + 1

    def release() -> None:
        undo()
        _living[ranks] -= 1
        if not _living[ranks]:
            del _living[ranks]
            forget_stream(ranks)

    return release


_living: dict[SplitRanks, int] = {}
"""How many parts there are on each."""


def _same(forward: Any) -> Any:
    return forward


def _cut_in_place(parameter: nn.Parameter, layout: ParameterLayout, rank: int) -> None:
    """`parameter`, the same object, is now this rank's block. What accumulated its gradient knew the whole shape: it is new, too."""
    if is_deferred(parameter):
        settle_block(parameter, layout, rank)
        return
    gradient = parameter.grad
    if parameter.requires_grad:
        with torch.inference_mode(False):
            torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_refuse_gradient)
    _torch.give_memory(parameter, layout.take(parameter.detach(), rank))
    parameter.grad = None if gradient is None else layout.take(gradient, rank)


def _refuse_gradient(gradients: Any) -> NoReturn:
    """For what accumulated a parameter's gradient before it was cut: nobody would see what arrives there."""
    raise UsageError(
        f"a gradient of shape {tuple(gradients[0].shape)} arrives at a parameter that was whole when a term of the loss was computed from it, and "
        "is cut over ranks now: the first call of the model has done that. Compute terms over parameters (a penalty) after model(x), in the "
        "first step at least"
    )


def _fake(whole: nn.Parameter, held: torch.Tensor) -> torch.Tensor:
    device = held.device if not held.is_meta else torch.device("cpu")
    if on_stand_ins():
        return (
            torch.full((), 0.02, dtype=held.dtype, device=device).expand(whole.shape).requires_grad_(held.requires_grad)
        )
    return torch.empty(whole.shape, dtype=held.dtype, device=device, requires_grad=held.requires_grad)


def _settled(out: Any) -> Any:
    """What leaves a part: partial sums are added up, cut values stay cut."""
    if isinstance(out, torch.Tensor):
        return settle(out)
    if type(out) is tuple and all(value is None or isinstance(value, torch.Tensor) for value in out):
        return tuple(map(settle, out))
    return _torch.tree_map(lambda leaf: settle(leaf) if isinstance(leaf, SplitTensor) else leaf, out)
