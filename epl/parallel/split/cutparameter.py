"""A parameter of which this rank has a block, as code outside of split parts meets it: a penalty in the loop, mostly.

    computed with, in grad mode      the whole parameter: `p.norm()` is the norm of all of it, on all ranks of the split alike
    anything else                    this rank's block: `p.shape`, `p.grad`, `p.detach()`, `p.data`, without grad mode, in an optimizer

A block in a loss would be the worst of errors: a norm of blocks has other gradients than a norm of the whole, and trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from epl import _torch
from epl.errors import StateError
from epl.graph.spec import leaves_of
from epl.parallel.split.filling import drawn, draws, looks, refuse_initialiser
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.value import SplitTensor, changes
from epl.plan.split.layout import ParameterLayout, layout_of, set_layout

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class Expressions(Protocol):
    """Who computes with cut parameters outside of split parts."""

    def compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func` of these arguments, some of which are cut parameters, in grad mode."""

    def gather(self, parameter: CutParameter, why: str) -> torch.Tensor:
        """The whole of a parameter; gradients flow back to the blocks."""


class CutParameter(nn.Parameter):
    """What a rank holds of a parameter that is divided over the ranks of a split: its block, a plain tensor to everything but a loss."""

    epl_expressions: Expressions
    epl_split: SplitRanks | None
    """The ranks that have the other blocks."""

    @classmethod
    @_torch.without_dynamo
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            parameter, hook = _hook_arguments(*args, **(kwargs or {}))
            with _torch.no_tensor_subclass():
                return func(parameter, WholeGradient.of(parameter, hook))
        if region.depth or not cls.computes(func):
            if len(types) > 1 and any(issubclass(kind, SplitTensor) for kind in types):
                return NotImplemented  # its rules are asked, wherever it stands among the arguments
            name = getattr(func, "__name__", "")
            try:
                with _torch.no_tensor_subclass():
                    if draws(name) and not region.depth:
                        return drawn(func, args, kwargs or {}, CutParameter)
                    if looks(name) and not region.depth:
                        refuse_initialiser(name, leaves_of((args, kwargs), CutParameter)[0])
                    return func(*args, **kwargs) if kwargs else func(*args)
            except RuntimeError as error:
                _explain(error, args, kwargs)
                raise
        own = leaves_of((args, kwargs), CutParameter)
        return own[0].epl_expressions.compute(func, args, kwargs or {})

    @classmethod
    def computes(cls, func: Callable[..., Any]) -> bool:
        """Whether it computes something from the parameter, rather than from this rank's block.

        In a backward pass code has blocks in its hands: what a rule has saved, what a hook of the parameter is given.
        """
        return not cls.is_block() and not _looks_at_the_block(func) and _torch.backward_id() == -1

    @classmethod
    def is_block(cls) -> bool:
        """Whether all code sees the block now: without grad mode, as in optimizers, averages of weights, loading."""
        return not torch.is_grad_enabled()

    def gathered(self, why: str = "") -> torch.Tensor:
        """The whole parameter; all ranks of the split call it together."""
        return self.epl_expressions.gather(self, why)

    def expressions_of_copies(self) -> Expressions:
        """Who computes with a copy of it."""
        return self.epl_expressions

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
            layout = layout_of(self)
            memo[id(self)] = made if layout is None else become_cut(made, layout, self.expressions_of_copies())
        return memo[id(self)]

    def __copy__(self) -> Any:
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        layout = layout_of(self)
        shape = tuple(self.shape if layout is None else layout.shape)
        raise StateError(
            f"saving or sending a parameter of which this rank has the block {tuple(self.shape)} only, of {shape}: a file of blocks "
            "would look like a whole model. Save epl.full_state_dict(model), which every rank calls"
        )


def become_cut(parameter: nn.Parameter, layout: ParameterLayout, expressions: Expressions) -> CutParameter:
    """`parameter`, the same object, is from now on this rank's block of a parameter that lies like this."""
    parameter.__class__ = CutParameter
    assert isinstance(parameter, CutParameter)
    parameter.epl_expressions, parameter.epl_split = expressions, getattr(expressions, "ranks", None)
    set_layout(parameter, layout)
    with _torch.no_tensor_subclass():
        _torch.change_gradient_hooks(parameter, lambda hook: WholeGradient.of(parameter, hook))
    _torch.allow_foreach(CutParameter)
    return parameter


def become_plain(parameter: nn.Parameter) -> None:
    """Undo `become_cut`: what is there is all there is."""
    if isinstance(parameter, CutParameter):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter.epl_expressions, parameter.epl_split
        _torch.change_gradient_hooks(parameter, lambda hook: hook.hook if isinstance(hook, WholeGradient) else hook)
    set_layout(parameter, None)


def _explain(error: RuntimeError, args: Any, kwargs: Any) -> None:
    """Say so where a block met something of the whole parameter's shape."""
    with _torch.no_tensor_subclass():
        tensors = leaves_of((args, kwargs), torch.Tensor)
        layouts = [layout for t in tensors if isinstance(t, CutParameter) and (layout := layout_of(t)) is not None]
        met = {layout.shape for layout in layouts} & {t.shape for t in tensors if layout_of(t) is None}
    for shape in met:
        error.add_note(
            f"a parameter of {tuple(shape)} is cut over ranks, and to code without grad mode it is this rank's block; the other tensor is as large as "
            "the whole. A copy that was made before the first call of the model (for an average of weights, a teacher) is whole: make it "
            "after that call."
        )


class WholeGradient:
    """A gradient hook of the user's on a cut parameter: it is given the replica's whole gradient, and this rank takes its block of
    what comes back. Ranks of a split have the same hooks and run the same backward, so they gather in the same order."""

    def __init__(self, hook: Hook, layout: ParameterLayout, ranks: SplitRanks) -> None:
        self.hook, self._layout, self._ranks = hook, layout, ranks

    @staticmethod
    def of(parameter: torch.Tensor, hook: Hook) -> Hook:
        """What is to be registered instead of `hook`."""
        layout, ranks = layout_of(parameter), getattr(parameter, "epl_split", None)
        if layout is None or ranks is None or isinstance(hook, WholeGradient):
            return hook
        lengths = layout.cut.lengths
        return hook if max(lengths) == sum(lengths) else WholeGradient(hook, layout, ranks)  # one rank has all of it

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        layout, ranks = self._layout, self._ranks
        if gradient.shape == layout.shape:  # in a closure of an optimizer that steps with whole parameters
            return self.hook(gradient)
        block = gradient.to_dense() if gradient.is_sparse else gradient
        parts = ranks.all_gather(block.detach().contiguous(), layout.cut.lengths, layout.dim)
        found = self.hook(layout.cut.join(parts, layout.dim))
        return None if found is None else layout.take(found, ranks.rank)


def _hook_arguments(parameter: torch.Tensor, hook: Hook) -> tuple[torch.Tensor, Hook]:
    return parameter, hook


# ---- what is asked of a parameter, rather than computed from it ------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ASKED = _words("""
    __get__ __set__ __delete__ size dim ndimension numel nelement element_size stride storage_offset storage untyped_storage data_ptr
    is_contiguous is_floating_point is_complex is_signed is_inference is_conj is_neg is_nonzero is_pinned is_shared is_same_size get_device
    is_set_to type result_type can_cast __len__ __repr__ __format__ __hash__ __dir__ __array__ numpy tolist item
    grad detach requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook backward pin_memory share_memory_
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    new_empty new_zeros new_ones new_full new_tensor new new_empty_strided
    equal allclose isclose eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isnan isinf isfinite isposinf isneginf isreal
    any all argmax argmin argsort nonzero count_nonzero signbit __bool__ __contains__
    __deepcopy__ __copy__ __reduce_ex__ __reduce__ __setstate__ is_tensor __dlpack__ __dlpack_device__
""")
_VIEWS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
"""Attributes that are computed, with a gradient."""
_known: dict[Callable[..., Any], bool] = {}


def _looks_at_the_block(func: Callable[..., Any]) -> bool:
    """Whether no gradient flows through it: it looks at the parameter, makes something of its form, or changes it."""
    found = _known.get(func)
    if found is None:
        name = getattr(func, "__name__", "")
        found = (name in _ASKED or changes(name)) and func not in _VIEWS
        if len(_known) < 4096:  # functions are few; a user's own may be made anew each time
            _known[func] = found
    return found
