"""A parameter that lives on another rank: module, name, shape and dtype are here, its numbers are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import nn

from epl import _torch
from epl.errors import LazyValueError
from epl.graph.context import Context
from epl.graph.spec import Spec
from epl.plan.split.layout import layout_of, whole_shape
from epl.train.lazy.journal import Parts
from epl.train.lazy.lane import LaneParameter
from epl.train.lazy.node import Node, foreign, name_of, topological
from epl.train.lazy.tensor import LazyTensor, answer


class ForeignParameter(nn.Parameter):
    """What a rank holds of another rank's parameter. Optimizers and clipping skip it, since it never has a gradient."""

    epl_owner: int
    epl_name: str
    epl_together: bool
    """Whether those that have it, the lanes of a split stage, write down what is computed from it as this rank does."""
    epl_node: Node
    epl_parts: Parts
    """Of the model that it belongs to, once that was called."""

    @property
    def grad(self) -> torch.Tensor | None:  # a property of ours: optimizers ask for it many times a step
        """None: the gradient is where the parameter is."""
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """Nothing happens: the owner runs the same line (`p.grad = g` after autograd.grad), and its optimizer uses it."""
        if value is not None and value.shape != self.shape:
            raise LazyValueError(f"expected a gradient of shape {tuple(self.shape)}, found {tuple(value.shape)}")

    @classmethod
    @_torch.without_dynamo
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(func)
        if special is not None and args and isinstance(args[0], ForeignParameter):
            return special(func, args, kwargs or {})
        return answer(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> NoReturn:  # type: ignore[override]
        refuse(self, "printing")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse(self, "copying")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self, "saving")


LAZY = (LazyTensor, ForeignParameter, LaneParameter)


def node_of(tensor: torch.Tensor) -> Node:
    """The recorded operation behind a lazy tensor, or behind another rank's parameter."""
    assert isinstance(tensor, LAZY)
    return tensor.node() if isinstance(tensor, LaneParameter) else tensor.epl_node


def become_foreign(parameter: nn.Parameter, owner: int, name: str, *, together: bool = False) -> None:
    """`parameter`, the same object, no longer has its numbers: rank `owner` has them, with others if `together`. `name` is for messages."""
    with torch.no_grad():
        parameter.grad = None
        shape = parameter.shape
        # Not a number: code that goes round torch functions (TorchScript) cannot take it for a weight.
        nothing = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
        parameter.data = parameter.data.new_full((1,) * len(shape), nothing).expand(shape)
    parameter.__class__ = ForeignParameter
    assert isinstance(parameter, ForeignParameter)
    parameter.epl_owner, parameter.epl_name, parameter.epl_together = owner, name, together
    parameter.epl_node = Node(foreign, (parameter,), {}, Context(True, ()), Spec.of(parameter))


def become_own(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Undo `become_foreign`: `parameter`, the same object, has these numbers from now on."""
    assert isinstance(parameter, ForeignParameter)
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    for attribute in ("epl_owner", "epl_name", "epl_together", "epl_node", "epl_parts"):
        vars(parameter).pop(attribute, None)
    parameter.data = data


def refuse(parameter: ForeignParameter | LaneParameter, doing: str) -> NoReturn:
    """Raise: its numbers would be needed here."""
    if isinstance(parameter, LaneParameter):
        ranks = ", ".join(map(str, parameter.epl_lanes))
        where = f"is on ranks {ranks}, which compute with it together"
        if layout_of(parameter) is not None:
            where += f"; this one has the block {tuple(parameter.shape)}, which is what p.shape and p.numel() tell of"
    else:
        where = f"lives on rank {parameter.epl_owner}; here is only its place"
    raise LazyValueError(
        f"{doing}: the parameter {parameter.epl_name!r}, {tuple(whole_shape(parameter))}, {where}. Its numbers come with epl.full_state_dict(model), on every rank (an average of weights is one of those states); in a "
        "loss (an L2 term) it may be used as it is; a part of the model runs when the whole model is called."
    )


def foreign_parameters(node: Node) -> list[ForeignParameter | LaneParameter]:
    """Those that the expression is made from, as far as it is not computed."""
    found = (n.args[0] for n in topological([node]) if not n.done and n.func is foreign)
    return list(dict.fromkeys(p for p in found if isinstance(p, (ForeignParameter, LaneParameter))))


def refuse_foreign(node: Node, doing: str) -> None:
    """Raise if the expression needs another rank's parameters and no model call connects the ranks."""
    if node.carrier is None and not node.done:
        for parameter in foreign_parameters(node):
            refuse(parameter, doing)


# ---- calls that mean something else for a foreign parameter itself --------------------------------------------------


def _is_called_by(code: CodeType) -> bool:
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_code is code:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _copy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Loading a whole state dict on every rank: each takes its part, and this is another's."""
    if not _is_called_by(_torch.LOADING_STATE):
        refuse(args[0], name_of(func))
    return args[0]


def _requires_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parameter = args[0]
    with _torch.no_tensor_subclass():
        func(*args, **kwargs)
        parameter.epl_node.spec = Spec.of(parameter)
    return parameter if func is torch.Tensor.requires_grad_ else None


def _convert(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`model.to(…)` on every rank: the owner converts the numbers, here the place changes its dtype."""
    parameter = args[0]
    with _torch.no_tensor_subclass():
        converted = func(parameter.detach(), *args[1:], **kwargs)
        same = converted.dtype == parameter.dtype and converted.device == parameter.device
    if same:
        return parameter
    if not _is_called_by(_torch.CONVERTING):
        return answer(func, args, kwargs)
    if converted.device != parameter.device:
        refuse(parameter, f"moving it to {converted.device} (move the model before epl.parallelize)")
    return converted


def _set_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameter, data = args
    if data is parameter:
        return
    if not _is_called_by(_torch.CONVERTING):
        refuse(parameter, "setting its data")
    with _torch.no_tensor_subclass():
        func(parameter, data[(slice(0, 1),) * data.dim()].clone().expand(data.shape))
        parameter.epl_node.spec = Spec.of(parameter)


_SPECIAL: dict[Callable[..., Any], Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.Tensor.copy_: _copy,
    torch.Tensor.requires_grad_: _requires_grad,
    torch.Tensor.requires_grad.__set__: _requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **{getattr(torch.Tensor, name): _convert for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16")},
}
