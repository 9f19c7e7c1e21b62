"""Carrying the plan out: gradients, buffers, clipping. Each part also works alone, in a script without the rest of epl."""

from epl.parallel.buffers import copy_from_first
from epl.parallel.reducer import GradientReducer, ReducePolicy

__all__ = ["GradientReducer", "ReducePolicy", "copy_from_first"]
