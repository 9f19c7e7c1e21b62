"""How gradients travel, as `communication.*` says."""

from __future__ import annotations

from typing import Literal

from epl.config import Config
from epl.parallel import ReducePolicy


def reduce_policy(config: Config, when: Literal["backward", "step"] = "backward") -> ReducePolicy:
    """The reducer's policy under these settings."""
    settings = config.communication
    return ReducePolicy(
        method=settings.gradients_reduce_method,
        when=when,
        max_splits=settings.max_splits,
        fp16=settings.fp16,
        fp16_scale=settings.fp16_scale,
        sparse_as_dense=settings.sparse_as_dense,
    )
