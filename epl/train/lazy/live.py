"""The lazy tensors that the loop still holds, weakly: what it can still ask for after backward."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING

from epl.graph.spec import Spec
from epl.train.lazy.node import Node

if TYPE_CHECKING:
    from epl.train.lazy.tensor import LazyTensor


PUSHED_BYTES = 4096
"""Values up to this size reach every rank at the end of backward; larger ones travel only if all ranks read them."""


class _Live(threading.local):
    """One for each thread: in tests, ranks are threads of one process."""

    def __init__(self) -> None:
        self.tensors: weakref.WeakValueDictionary[int, LazyTensor] = weakref.WeakValueDictionary()
        self.keys = itertools.count()


_live = _Live()


def enter(tensor: LazyTensor) -> None:
    """A new one."""
    _live.tensors[next(_live.keys)] = tensor


def live_nodes() -> list[Node]:
    """The nodes of all of them, in the order in which the tensors were made."""
    return list(dict.fromkeys(tensor.epl_node for _, tensor in sorted(_live.tensors.items())))


def is_small(node: Node) -> bool:
    """Whether its value comes to every rank by itself."""
    return isinstance(node.spec, Spec) and node.spec.nbytes <= PUSHED_BYTES
