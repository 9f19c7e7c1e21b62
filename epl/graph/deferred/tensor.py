"""A tensor without memory that remembers how its numbers come about, until somebody says which of them are wanted here.

It sees every basic operation (below autograd, below `nn.init`, below `.data`), and answers in one of four ways:

    view            another such tensor on the same memory-to-be: `weight[0]`, `weight.data`, `weight.t()`
    written down    filling, drawing, arithmetic with numbers, copying: a step more in the recipe
    derived         `torch.randn(…) * 0.02`, `.double()`, `.clone()`: a new one, made from this one as it is now
    built whole     anything else: the memory is made now, with all numbers, and the operation simply runs
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn

from epl import _torch
from epl.errors import StateError
from epl.graph.deferred import recipe
from epl.graph.deferred.place import Place
from epl.graph.deferred.recipe import Recipe
from epl.report.log import notice


class Cell:
    """The memory-to-be of one or several tensors that are views of each other."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.whole: torch.Tensor | None = None
        """All elements, flat, once something needed them; from then on they are what counts, not the recipe."""
        self.settled = False
        """Whether its parameter has become an ordinary one, so that what else looked at this memory no longer shows it."""
        self.holders: WeakValueDictionary[int, DeferredTensor] = WeakValueDictionary()

    @property
    def parameter(self) -> DeferredTensor | None:
        """A parameter that has this memory, if there is one."""
        return next((held for held in list(self.holders.values()) if isinstance(held, nn.Parameter)), None)

    def build(self, why: str) -> torch.Tensor:
        """All elements, flat, as real memory from now on; `why` is for the notice, if a parameter is concerned."""
        if self.whole is None:
            parameter = self.parameter
            drawn = any(isinstance(step, recipe.Draw) for step in self.recipe.steps)
            if why and (
                parameter is not None or drawn
            ):  # what is drawn is going to be a parameter (`nn.init.orthogonal_`)
                shape = next(
                    (tuple(held.shape) for held in (parameter, *self.holders.values()) if held is not None), ()
                )
                notice(
                    f"a parameter of shape {shape} under epl.split was built whole on every rank, to be cut later: {why} "
                    "needs its numbers, or cannot be done in parts. Initialise it with fill, uniform, normal, truncated normal, and arithmetic "
                    "with numbers, and no rank ever holds the whole"
                )
            with _torch.without_operation_modes():
                self.whole = self.recipe.whole()
        return self.whole

    def copied(self) -> Cell:
        """Memory of its own with the same numbers."""
        made = Cell(self.recipe)
        made.whole = None if self.whole is None else self.whole.clone()
        return made


class DeferredTensor(torch.Tensor):
    """A tensor of a part under `split`, before the first call. `nn.Parameter` makes a parameter of it as of any other."""

    epl_cell: Cell
    epl_twin: torch.Tensor
    """On the meta device, with the same shape, strides and offset."""

    __torch_function__ = _torch.NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from epl.graph.deferred.operations import answer

        return answer(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """A view that autograd does not follow, as of any tensor; setting it gives the tensor other numbers."""
        found: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Torch's own would copy shape and dtype, and not how the numbers come about.
        if isinstance(value, DeferredTensor):
            cell, twin = value.epl_cell, value.epl_twin
            _torch.become(self, DeferredTensor, _empty(cell, twin))
            self.show(cell, twin)
        else:
            become_ordinary(self, value.detach())

    def show(self, cell: Cell, twin: torch.Tensor) -> None:
        """From now on it is a view of this memory-to-be, of its own shape."""
        if "epl_cell" in vars(self):
            self.epl_cell.holders.pop(id(self), None)
        self.epl_cell, self.epl_twin = cell, twin
        cell.holders[id(self)] = self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter containing:\n" if isinstance(self, nn.Parameter) else ""
        known = None if self.epl_cell.settled else _numbers_at_hand(self)
        if known is not None:
            return f"{kind}{known.requires_grad_(self.requires_grad and self.is_leaf)!r}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{kind}tensor(..., size={tuple(self.shape)}, dtype={self.dtype}{grad}; under epl.split, without memory until the first call)"

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredTensor:
        if id(self) in memo:
            known: DeferredTensor = memo[id(self)]
            return known
        if not self.is_leaf:
            raise RuntimeError(
                "only leaf tensors can be copied by deepcopy: detach() it first, or copy it under no_grad"
            )
        own = self.epl_cell
        if id(own) not in memo:
            memo[id(own)] = own.copied()
        made = wrap(memo[id(own)], self.epl_twin)
        made.requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            _torch.mark_parameter(made)
        memo[id(self)] = made
        for name, value in vars(self).items():
            if not name.startswith("epl_"):
                made.__dict__[name] = copy.deepcopy(value, memo)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            f"a parameter of shape {tuple(self.shape)} under epl.split has no memory before the first call of the model, and cannot be saved "
            "as it is: torch.save(epl.full_state_dict(model), path) saves it whole, after epl.parallelize"
        )

    def share_memory_(self) -> NoReturn:
        """Refused: there is nothing to share yet."""
        raise StateError(
            f"share_memory_: a tensor of shape {tuple(self.shape)} under epl.split has no memory before the first call of the model"
        )

    # Torch refuses these for every subclass with operations of its own; nothing here is a reason to.

    def numpy(self, *, force: bool = False) -> Any:
        """The numbers, as of any tensor."""
        check_unsettled(self)
        return plain(self, "numpy").requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """The numbers, as of any tensor."""
        check_unsettled(self)
        known = _numbers_at_hand(self)
        return (plain(self, "tolist") if known is None else known).tolist()

    def data_ptr(self) -> int:
        """Where its memory is, as of any tensor."""
        return plain(self, "data_ptr").data_ptr()


def _empty(cell: Cell, twin: torch.Tensor) -> DeferredTensor:
    made = _torch.storageless(DeferredTensor, twin, cell.recipe.device)
    assert isinstance(made, DeferredTensor)
    return made


def wrap(cell: Cell, twin: torch.Tensor) -> DeferredTensor:
    """A new tensor that shows what its twin shows of the memory-to-be."""
    made = _empty(cell, twin)
    made.show(cell, twin)
    return made


def defer(parameter: nn.Parameter, cell: Cell, twin: torch.Tensor) -> None:
    """`parameter`, the same object, has no memory from now on, and its numbers come from there."""
    _torch.become(parameter, DeferredTensor, _empty(cell, twin))
    assert isinstance(parameter, DeferredTensor)
    parameter.show(cell, twin)


def plain(tensor: DeferredTensor, why: str) -> torch.Tensor:
    """An ordinary tensor on the same memory, which is built for it."""
    twin = tensor.epl_twin
    return tensor.epl_cell.build(why).as_strided(twin.shape, twin.stride(), twin.storage_offset())


def _numbers_at_hand(tensor: DeferredTensor) -> torch.Tensor | None:
    return numbers_of(tensor) if tensor.epl_cell.whole is None else plain(tensor, "")


def check_unsettled(tensor: DeferredTensor) -> None:
    """Raise if the parameter that it is a view of got its memory elsewhere."""
    if tensor.epl_cell.settled:
        raise StateError(
            f"a tensor of shape {tuple(tensor.shape)} was taken from a parameter under epl.split before the first call of the model (a "
            "state_dict(), .data or .detach() of it), and the parameter has been cut since: take it anew; epl.full_state_dict(model) "
            "gives whole parameters. Two parameters on the same memory must be one object there"
        )


def become_ordinary(tensor: DeferredTensor, memory: torch.Tensor) -> None:
    """`tensor`, the same object, is an ordinary tensor or `nn.Parameter` with this memory from now on."""
    _torch.become(tensor, nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor, memory)
    tensor.epl_cell.holders.pop(id(tensor), None)
    del tensor.epl_cell, tensor.epl_twin


def order_of(tensor: DeferredTensor) -> Place | None:
    """Where its elements are, if they lie in order and without gaps; else None."""
    twin = tensor.epl_twin
    return Place(int(twin.storage_offset()), (twin.numel(),), (1,)) if twin.is_contiguous() else None


def numbers_of(tensor: DeferredTensor) -> torch.Tensor | None:
    """A copy of its numbers, if they are few and close together; else None."""
    twin, cell = tensor.epl_twin, tensor.epl_cell
    reach = 1 + sum((size - 1) * stride for size, stride in zip(twin.shape, twin.stride(), strict=True))
    if cell.whole is not None or reach > recipe.PIECE or not twin.numel():
        return None
    start = int(twin.storage_offset())
    with _torch.without_operation_modes():
        return cell.recipe.numbers(start, start + reach).clone().as_strided(twin.shape, twin.stride(), 0)
