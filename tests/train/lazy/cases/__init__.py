"""Loops that people write, each run plainly and through lazy values: `CASES`, by name.

Others run them too, over other carriers: `env.run(CASES[name], Env(rows, wrap, micro_batches))`.
"""

from __future__ import annotations

from tests.train.lazy.cases import layouts, loops, losses, more, odd
from tests.train.lazy.cases.env import CASES, Case, Env, Outcome, differences, run

SHELVES = (loops, losses, layouts, odd, more)

REFUSED = {
    "gradient_penalty": "a second derivative across micro batches",
    "read_after_step_only": "a parameter changed between model(x) and its use",
    "target_changed_in_place": "a target changed between its use and its computation",
    "input_changed_in_place": "an input changed between model(x) and its use",
}
"""Cases that raise, and why they must."""

__all__ = ["CASES", "REFUSED", "SHELVES", "Case", "Env", "Outcome", "differences", "run"]
