"""Words that the ranks of a split say before the loop's own code has them send something: `logits.argmax(1)`, a loss, a penalty.

Inside the model ranks are at the same place, since they have met at the call. In the loop one may be alone (`if rank == 0:`), and what it
sends would be taken for a part of the next backward. A line says its word once between two calls of the model, so that a
penalty over all parameters costs one.
"""

from __future__ import annotations

from epl.cluster.communication import Circle, Job
from epl.cluster.place import user_place


class LoopWords:
    """Called before every collective outside of split parts and of backward passes."""

    def __init__(self, job: Job, circle: Circle) -> None:
        """`circle`: the ranks of the split."""
        self._job, self._circle = job, circle
        self._lines: set[str] = set()
        self._calling = False

    def call_begins(self) -> None:
        """The model is called."""
        self._calling = True
        self._lines.clear()

    def call_ends(self) -> None:
        """The loop goes on."""
        self._calling = False

    def __call__(self) -> None:
        if self._calling:
            return
        line = user_place()
        if line not in self._lines:
            self._lines.add(line)
            self._job.meet(f"computing with split values in {line}", place=line, circle=self._circle).wait()
