"""Carrying the plan out: gradients, buffers, clipping. Each part also works alone, in a script without the rest of epl."""

from epl.parallel.batch_norm import sync_batch_norm
from epl.parallel.buffers import copy_from_first
from epl.parallel.clip import clip_grad_norm_
from epl.parallel.pipeline.ties import tie
from epl.parallel.reducer import GradientReducer, ReducePolicy

__all__ = ["GradientReducer", "ReducePolicy", "clip_grad_norm_", "copy_from_first", "sync_batch_norm", "tie"]
