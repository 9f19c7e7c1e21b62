"""What an open `with epl.split(k):` does to the calls that make tensors: large ones get no memory."""

from __future__ import annotations

from typing import Any

from epl import _torch
from epl.graph.deferred.factories import make
from epl.graph.deferred.tensor import Cell, DeferredTensor, become_ordinary, plain

LEAST = 1 << 24
"""Bytes from which on a tensor is deferred; smaller ones are built whole and cut later, as exactly and more cheaply."""


class Deferring:
    """Large tensors that are made between `begin` and `end`, in this thread, have no memory until they are placed.

    What has not become a parameter by the end (buffers, tables) gets its memory then: nobody would cut it.
    """

    def __init__(self) -> None:
        self._mode = _torch.OperationMode(self._answer)
        self._made: dict[int, Cell] = {}

    def begin(self) -> None:
        """Defer from now on."""
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Undo `begin`."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for cell in self._made.values():
            if cell.parameter is None and not cell.settled:
                for tensor in list(cell.holders.values()):
                    become_ordinary(tensor, plain(tensor, ""))
        self._made = {}

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = make(func, args, kwargs, least=LEAST) if _torch.current_fake_mode() is None else None
        result = func(*args, **kwargs) if made is None else made
        for tensor in _torch.tree_leaves(result):
            if isinstance(tensor, DeferredTensor):
                self._made[id(tensor.epl_cell)] = tensor.epl_cell
        return result
