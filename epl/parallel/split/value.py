"""Split values: tensors of which this rank holds a block or an addend, and the ways in and out of them.

    cut       a block along one dim (`place`), the rest is on the other ranks           looks whole: `shape` is the global one
    partial   an addend: the value is the sum over ranks (`place` is PARTIAL)           `extra`, if any, is added after the sum
    whole     a plain tensor, the same on all ranks, and so is its gradient             costs nothing, knows nothing of this

What user code does with a split value goes through one rule per torch function (rules/). Without a rule every split argument
becomes whole first, with one notice. Below torch functions a split value raises: nobody ever sees a block as if it were the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from epl import _torch
from epl.errors import SplitError
from epl.graph.spec import leaves_of, swap
from epl.parallel.split.functions import Enter, EnterGathered, Gather, Recut, Reduce, ReduceScatter, Take
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.region import region
from epl.parallel.split.rules.registry import RULES, named_alike
from epl.plan.split.cut import Axis, Cut
from epl.plan.split.layout import layout_of
from epl.report.log import notice

PARTIAL = -1


class Cell:
    """The sum behind partial values: p and p + x share one, so that nobody reduces twice or reads an addend reduced in place."""

    __slots__ = ("fresh", "sum", "version")

    def __init__(self, fresh: bool) -> None:
        self.sum: torch.Tensor | None = None
        """Once somebody has asked."""
        self.fresh = fresh
        """Whether the addend may be overwritten: nobody else reads it, not even autograd."""
        self.version = 0
        """Of the sum when it was made: p + x, asked for later, must not see what was done in place to p."""

    def hold(self, total: torch.Tensor) -> None:
        """This is the sum."""
        self.sum, self.version = total, _version(total)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else _torch.version_of(tensor)


class SplitTensor(torch.Tensor):
    """A tensor of which this rank holds a block (`cut` along `place`) or an addend (`place` is PARTIAL). It looks whole."""

    local: torch.Tensor
    place: int
    cut: Cut
    """Of the dim `place`; undefined where that is PARTIAL."""
    ranks: SplitRanks
    cell: Cell
    """Of a partial value."""
    extra: torch.Tensor | None
    """Of a partial value: a whole tensor that is added after the sum."""
    global_shape: torch.Size
    is_common = True
    """Whether all ranks have blocks of one value, so that they always do the same with it."""

    @property
    def is_partial(self) -> bool:
        """Whether this is an addend, rather than a block."""
        return self.place == PARTIAL

    @property
    def total(self) -> torch.Tensor | None:
        """Of a partial value: the whole, if it is known already."""
        source = self.__dict__.get("source")
        if source is not None and _version(source[0].local) != source[1]:
            raise SplitError(
                f"a value of shape {tuple(self.global_shape)} was gathered as a view of {source[0]!r}, which has been changed in "
                "place since: take the view after the change, or make the change out of place"
            )
        found = self.__dict__.get("_total")
        if found is None and self.place == PARTIAL and self.cell.sum is not None:
            if self.extra is not None and (
                _version(self.cell.sum) != self.cell.version or _version(self.extra) != self.__dict__["extra_version"]
            ):
                raise SplitError(
                    f"a sum of shape {tuple(self.global_shape)} has a term that was changed in place before anybody asked for "
                    "the sum: make that change out of place (x = x + y instead of x += y)"
                )
            with torch.enable_grad():  # see `gathered`
                found = self.cell.sum if self.extra is None else self.cell.sum + self.extra
            self.__dict__["_total"] = found
        return found

    @property
    def from_end(self) -> int:
        """`place`, counted from the last dim: -1 is the last."""
        return self.place - len(self.global_shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and beside_parameters(types, func):
            return NotImplemented
        found = RULES.get(func)
        if found is not None:
            named = named_alike(found, func, kwargs) if kwargs else {}
            out = NotImplemented if named is None else found(func, *args, **named)
            if out is not NotImplemented:
                return out
        return gather_all(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise SplitError(
            f"{func} reached a value that is split over ranks below the torch functions, where no rule can see it. Call "
            "epl.whole(value) before, or use a torch function"
        )

    def seen(self) -> torch.Tensor:
        """A plain tensor with this one's dtype, device and graph."""
        total = self.total
        return self.local if total is None else total

    def gathered(self, why: str = "") -> torch.Tensor:
        """The plain value that this one looks like; all ranks of the split call it together."""
        ranks = self.ranks
        if self.is_partial:
            if self.cell.sum is None:
                ranks.note("all-reduce", nbytes(self.local), why or "partial sums become whole")
                # Whoever asks first may do so without grad mode (a statistic, a target), and others read the same sum after it.
                with torch.enable_grad():
                    self.cell.hold(Reduce.apply(self.local, ranks, self.cell.fresh))
            return cast("torch.Tensor", self.total)
        ranks.note("all-gather", self.numel() * self.element_size(), why or "a cut value becomes whole")
        found = cast("torch.Tensor", Gather.apply(self.local, ranks, self.place, self.cut))
        if found.requires_grad:
            _blocks[found] = self.local, (ranks, self.place, self.cut), _version(found)
        return found

    # Metadata, without a dispatch.
    shape = property(lambda self: self.global_shape)  # type: ignore[assignment]
    ndim = property(lambda self: len(self.global_shape))  # type: ignore[assignment]
    dtype = property(lambda self: self.seen().dtype)  # type: ignore[assignment]
    device = property(lambda self: self.seen().device)  # type: ignore[assignment]
    layout = property(lambda self: self.seen().layout)  # type: ignore[assignment]
    requires_grad = property(lambda self: self.seen().requires_grad)  # type: ignore[assignment]
    grad_fn = property(lambda self: self.seen().grad_fn)  # type: ignore[assignment]
    is_leaf = property(lambda self: self.seen().is_leaf)  # type: ignore[assignment]
    is_meta = property(lambda self: self.seen().is_meta)  # type: ignore[assignment]
    is_cuda = property(lambda self: self.seen().is_cuda)  # type: ignore[assignment]
    is_cpu = property(lambda self: self.seen().is_cpu)  # type: ignore[assignment]
    is_nested = property(lambda self: False)  # type: ignore[assignment]
    is_sparse = property(lambda self: False)  # type: ignore[assignment]
    is_quantized = property(lambda self: False)  # type: ignore[assignment]

    def dim(self) -> int:
        return len(self.global_shape)

    def size(self, dim: int | None = None) -> Any:
        return self.global_shape if dim is None else self.global_shape[dim]

    def numel(self) -> int:
        return self.global_shape.numel()

    nelement = numel

    def __len__(self) -> int:
        return self.global_shape[0]

    def is_floating_point(self) -> bool:
        return self.seen().is_floating_point()

    def is_complex(self) -> bool:
        return self.seen().is_complex()

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return self.seen().is_contiguous(*args, **kwargs)

    def element_size(self) -> int:
        return self.seen().element_size()

    def get_device(self) -> int:
        return self.seen().get_device()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # never communicates: one rank may print alone
        how = "partial sum" if self.place == PARTIAL else f"dim {self.place} cut as {self.cut}"
        return f"SplitTensor({tuple(self.global_shape)}, {how}, here {tuple(self.seen().shape)})"

    __str__ = __repr__
    __hash__ = torch.Tensor.__hash__

    def __format__(self, spec: str) -> str:
        return repr(self)


def beside_parameters(types: Any, func: Any) -> bool:
    """Whether it computes with a cut parameter, too, outside of split parts: that knows who does so there, and is asked next."""
    return not region.depth and any(hasattr(kind, "computes") and kind.computes(func) for kind in types)


# ---- making them -----------------------------------------------------------------------------------------------------


def shard(
    local: torch.Tensor,
    place: int,
    cut: Cut | None,
    ranks: SplitRanks,
    *,
    cell: Cell | None = None,
    extra: torch.Tensor | None = None,
    kind: type[SplitTensor] = SplitTensor,
) -> SplitTensor:
    """A value of which this rank holds the block `local`, cut along the dim `place`."""
    shape = local.shape
    if place != PARTIAL:
        assert cut is not None
        shape = torch.Size((*shape[:place], cut.size, *shape[place + 1 :]))
    made = _torch.wrapper_subclass(kind, shape, local)
    made.__dict__.update(local=local, place=place, cut=cut, ranks=ranks, cell=cell, extra=extra, global_shape=shape)
    return cast("SplitTensor", made)


def partial(
    local: torch.Tensor,
    ranks: SplitRanks,
    fresh: bool = False,
    extra: torch.Tensor | None = None,
    cell: Cell | None = None,
) -> SplitTensor:
    """A value that is the sum of what the ranks hold, plus `extra`. `fresh`: the addend was made for this and nobody else reads it."""
    if isinstance(extra, torch.nn.Parameter) and type(extra) is not torch.nn.Parameter:
        with (
            _torch.no_tensor_subclass()
        ):  # added later, maybe outside of the part, where it would be asked who computes with it
            extra = extra.view_as(extra)
    if extra is not None and extra.requires_grad and not torch.is_grad_enabled():
        extra = extra.detach()  # added later, maybe in grad mode
    made = shard(local, PARTIAL, None, ranks, cell=cell or Cell(fresh), extra=extra)
    if extra is not None:
        made.__dict__["extra_version"] = _version(extra)
    return made


def addend(value: SplitTensor) -> torch.Tensor:
    """The addend, for somebody who keeps a view of it: from now on it may not be overwritten."""
    value.cell.fresh = False
    return value.local


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---- whole values meet split ones ------------------------------------------------------------------------------------


def differentiable(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def enter(value: Any, ranks: SplitRanks) -> Any:
    """A whole value for use in cut work: its gradient will be summed over ranks. Once per value while a part runs."""
    if not isinstance(value, torch.Tensor) or not differentiable(value):
        return value
    if not region.depth:  # a split value used in the loop: nothing says for how long to remember
        return Enter.apply(value, ranks)
    key = id(value), _torch.version_of(value)
    found = region.entered.get(key)
    if found is None:
        found = region.entered[key] = (value, _entered(value, ranks))
    return found[1]


_blocks = WeakIdKeyDictionary()
"""By gathered values: this rank's block, with ranks, dim and cut, and the version that the value had."""


def _entered(value: torch.Tensor, ranks: SplitRanks) -> Any:
    block, how, version = _blocks.get(value, (None, (ranks,), 0))
    if block is None or how[0] is not ranks or version != _version(value):
        ranks.note("backward all-reduce", nbytes(value), "gradient of a whole value used by cut work")
        return Enter.apply(value, ranks)
    ranks.note("backward reduce-scatter", nbytes(value) // 2, "gradient of a gathered value used by cut work")
    return EnterGathered.apply(block, value.detach(), *how)


def take(value: torch.Tensor, dim: int, cut: Cut, ranks: SplitRanks) -> torch.Tensor:
    """This rank's block of a whole value; its gradient will be put together from all ranks."""
    if dim < 0:
        dim += value.ndim
    if differentiable(value):
        ranks.note("backward all-gather", nbytes(value), "gradient of a whole value cut by cut work")
        return cast("torch.Tensor", Take.apply(value, ranks, dim, cut))
    return cut.take(value, dim, ranks.rank)


def block_of(value: torch.Tensor, place: int, cut: Cut, ranks: SplitRanks, why: str) -> Any:
    """This rank's part of `value` beside one that is cut at `place` (from the end): its own block, the whole, or a cut of the whole."""
    here = value.shape[place] if value.ndim >= -place else 1
    if isinstance(value, SplitTensor) and not value.is_partial:
        if value.from_end == place and same(value.cut, cut, ranks):
            return value.local
        if value.from_end != place and value.ndim >= -place and here == cut.size and value.ranks is ranks:
            return recut(value, place, cut, why).local
    value = whole(value, why)
    if value.ndim < -place or (here == 1 and cut.size != 1):
        return enter(value, ranks)
    return take(value, place, cut, ranks)


def recut(value: SplitTensor, place: int, cut: Cut, why: str = "") -> SplitTensor:
    """The same value cut along another dim: everybody sends everybody a piece, nobody ever holds the whole."""
    ranks = value.ranks
    place %= value.ndim
    if value.is_partial or place == value.place:
        return shard(take(whole(value, why), place, cut, ranks).clone(), place, cut, ranks)
    ranks.note("all-to-all", nbytes(value.local), why or "cut along another dim")
    return shard(
        cast("torch.Tensor", Recut.apply(value.local, ranks, value.place, value.cut, place, cut)), place, cut, ranks
    )


# ---- split values become whole ---------------------------------------------------------------------------------------


def whole(value: Any, why: str = "") -> Any:
    """The plain value of anything; all ranks of the split call it together."""
    if isinstance(value, torch.nn.Parameter) and layout_of(value) is not None:
        return cast("Any", value).gathered(why)  # a CutParameter, in the loop's own code
    return value.gathered(why) if isinstance(value, SplitTensor) else value


def settle(value: Any) -> Any:
    """Partial sums become whole, or under sequence parallel cut over the sequence; cut values stay."""
    if not isinstance(value, SplitTensor) or not value.is_partial:
        return value
    if region.sequence is None or value.ndim != 3 or value.total is not None:
        return whole(value)
    ranks, length = value.ranks, value.shape[1]
    cut = region.sequence.setdefault((length, ranks.ways), Cut(Axis("sequence", length, ranks.ways)))
    ranks.note("reduce-scatter", nbytes(value.local) // 2, "partial sums, cut over the sequence")
    out = shard(cast("torch.Tensor", ReduceScatter.apply(value.local, ranks, 1, cut)), 1, cut, ranks)
    return out if value.extra is None else out + value.extra


def gather_all(func: Any, args: Any, kwargs: Any) -> Any:
    """No rule: every split argument becomes whole, with one notice per function. What is changed in place stays split."""
    name = getattr(func, "__name__", str(func))
    if name == "__set__" or leaves_of(kwargs.get("out"), SplitTensor):
        raise SplitError(
            f"{name or 'out='} would write into a value that is split over ranks: assign the result to a name instead"
        )
    split = leaves_of((args, kwargs), SplitTensor)
    if name == "flex_attention" and any(map(differentiable, split)):
        raise SplitError(  # torch warns of its gradients where it is not compiled, and here it cannot be
            "flex_attention of values that are split over ranks has no gradient: use scaled_dot_product_attention, which is computed by "
            "heads, or call epl.whole(value) on what it is given and leave its projections out of the split"
        )
    cut = [value for value in split if not value.is_partial]
    if cut and not cut[0].ranks.plan:
        notice(
            f"split: {name} has no rule for a value cut like {cut[0]!r}: it is gathered on every rank for that",
            f"split: {name} {cut[0].from_end} {cut[0].cut.axis.name}",
        )
    why = f"{name} needs it whole" if cut else f"{name} needs the sum"
    changed = args[0] if args and (changes(name) or kwargs.get("inplace")) else None
    if leaves_of(changed, SplitTensor):
        if name in _RESHAPING:
            raise SplitError(
                f"{name} would give a value that is split over ranks another shape in place: assign the result of "
                f"{name.rstrip('_')} to a name instead"
            )
        return _change_whole(func, name, changed, args[1:], kwargs, why)
    base = args[0] if args and name in VIEWS and cut and args[0] is cut[0] else None
    args, kwargs = swap((args, kwargs), SplitTensor, lambda value: whole(value, why))
    out = func(*args, **kwargs)
    if base is None or (name == "__getitem__" and leaves_of(args[1], (torch.Tensor, list))):
        return out
    rest = args[1:]
    if isinstance(out, torch.Tensor):
        return view_copy(base, out, lambda tensor: func(tensor, *rest, **kwargs))
    return tuple(view_copy(base, part, _nth(func, n, rest, kwargs)) for n, part in enumerate(out))


def _nth(func: Any, n: int, args: Any, kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: cast("torch.Tensor", func(tensor, *args, **kwargs)[n])


# ---- in place --------------------------------------------------------------------------------------------------------


def changes(name: str) -> bool:
    """Whether a function of this name changes its first argument in place."""
    return name in _AUGMENTED if name.endswith("__") else name.endswith("_")


_AUGMENTED = {
    "__setitem__",
    *(
        f"__i{name}__"
        for name in [
            "add",
            "sub",
            "mul",
            "div",
            "truediv",
            "floordiv",
            "mod",
            "pow",
            "and",
            "or",
            "xor",
            "lshift",
            "rshift",
            "matmul",
        ]
    ),
}


_RESHAPING = {
    "t_",
    "transpose_",
    "swapaxes_",
    "swapdims_",
    "squeeze_",
    "unsqueeze_",
    "as_strided_",
    "resize_",
    "resize_as_",
    "set_",
}


VIEWS = {
    "__getitem__",
    "select",
    "narrow",
    "view",
    "reshape",
    "view_as",
    "reshape_as",
    "flatten",
    "unflatten",
    "squeeze",
    "expand",
    "expand_as",
    "split",
    "chunk",
    "split_with_sizes",
    "tensor_split",
    "unbind",
    "diagonal",
    "as_strided",
    "swapaxes",
    "detach",
}
"""Functions whose result is a view on one device: what is done to it in place is done to the argument."""


def _change_whole(func: Any, name: str, target: Any, args: Any, kwargs: Any, why: str) -> Any:
    """A change in place without a rule: made on the whole, of which each rank takes its part back."""
    if not isinstance(target, SplitTensor):
        raise SplitError(
            f"{name} would change a list of values of which some are split over ranks: change them one by one"
        )
    args, kwargs = swap((args, kwargs), SplitTensor, lambda value: whole(value, why))
    if target.is_partial:
        return change_sum(func, target, args, kwargs)
    copied = whole(target, why).clone()
    out = func(copied, *args, **kwargs)
    target.local.copy_(take(copied, target.place, target.cut, target.ranks))
    return None if out is None else target


def change_sum(func: Any, target: SplitTensor, args: Any, kwargs: Any) -> Any:
    """A partial value changed in place by a function of it and of whole values."""
    written = _rebase(target)
    out = func(target.total, *args, **kwargs)
    if written is not None:  # a view of a cut value, gathered: the change is one of that value
        base, total = written
        base.local.copy_(take(total, base.place, base.cut, base.ranks))
        target.__dict__["source"] = base, _version(base.local)
    return None if out is None else target


Look = Callable[[torch.Tensor], torch.Tensor]


def view_of(base: SplitTensor, local: torch.Tensor, look: Look) -> SplitTensor:
    """A partial value that is a view of another: `look(whole base)` is the whole view."""
    root, outer = base.__dict__.get("origin") or (base, None)
    found = partial(local, base.ranks)
    found.__dict__["origin"] = root, look if outer is None else lambda tensor: look(outer(tensor))
    if not root.is_partial:
        found.__dict__["source"] = base.__dict__.get("source") or (root, _version(root.local))
    else:
        root.__dict__.setdefault("views", []).append(weakref.ref(found))
    return found


def view_copy(base: SplitTensor, whole_view: torch.Tensor, look: Look) -> SplitTensor:
    """What is a view of `base` on one device and had to be gathered here: known already, and `base` follows its changes."""
    found = view_of(base, whole_view, look)
    found.cell.hold(whole_view)
    return found


def _rebase(value: SplitTensor) -> tuple[SplitTensor, torch.Tensor] | None:
    """Before a partial value is changed in place: it and all its views become plain views of one whole tensor of their own.

    A view of a cut value becomes one of the whole, which is returned with that value.
    """
    root, look = value.__dict__.get("origin") or (value, None)
    if not root.is_partial:
        total = value.__dict__.get("copied")
        if total is None:
            total = value.__dict__["copied"] = whole(root).clone()
            _become(value, look(total))  # type: ignore[misc]
        return root, total
    if not root.__dict__.get("rebased"):
        total = whole(root).clone()
        kin = [root, *(found for found in (made() for made in root.__dict__.pop("views", ())) if found is not None)]
        for member in kin:
            _, look = member.__dict__.get("origin") or (None, None)
            _become(member, total if look is None else look(total))
    return None


def _become(value: SplitTensor, total: torch.Tensor) -> None:
    """From now on this partial value is this whole tensor."""
    cell = Cell(False)
    cell.hold(total)
    value.__dict__.pop("_total", None)
    value.__dict__.update(cell=cell, extra=None, rebased=True)


# ---- planning: what rules may ask of the chooser; at run time without effect --------------------------------------------

Wish = tuple[str, str, Any]
"""(kind, axis, how): coarsen to whole heads, group channels, section as q | k | v, resize by one more border, unify with another axis."""


class RefineError(Exception):
    """While planning: run again with one of these wishes granted."""

    def __init__(self, states: list[Any], wishes: tuple[Wish, ...]) -> None:
        super().__init__(str(wishes))
        self.states, self.wishes = states, wishes


def refine(ranks: SplitRanks, *wishes: Wish) -> None:
    """While planning: start again with one of the wished changes to the cuts."""
    if ranks.plan:
        ranks.refine(wishes)


def same(first: Cut, second: Cut, ranks: SplitRanks) -> bool:
    """Whether two dims are cut alike; while planning, if that can be had, the run starts again with it."""
    if first == second:
        return True
    if first.axis is not second.axis:
        refine(ranks, ("unify", first.axis.name, second.axis.name))
    return first.alike(second)
